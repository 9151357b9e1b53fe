"""The operations that steps are made of.

Each has `done`, which looks whether there is something to do and changes nothing, and `do`, which may be called again
after it has failed, and raises `Failed` or an OSError.
"""

from __future__ import annotations

import contextlib
import glob
import grp
import json
import os
import pwd
import shutil
import sys
import zipfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from .conditions import Clock, Space
from .disks import Scratch, Volume
from .programs import (
    Failed,
    apt_get,
    changed_units,
    command,
    link,
    numbers,
    nvidia_driver,
    output,
    read,
    read_json,
    replace,
)

# Where systems keep the certificates that they trust.
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
# The programs that take a certificate over, and where they look for it.
_ANCHORS = (
    ("update-ca-certificates", "/usr/local/share/ca-certificates/skyinfra.crt"),
    ("update-ca-trust", "/etc/pki/ca-trust/source/anchors/skyinfra.crt"),
)
_VERSION = ("-c", "import sys; print(sys.version.split()[0])")


@dataclass(frozen=True)
class File:
    """The file *path*, which root alone reads, with what stands at *url*. A node keeps what it has got.

    sha256: of the file, where it is known.
    """

    url: str
    path: str
    sha256: str | None = None

    def done(self) -> bool:
        file = Path(self.path)
        return file.is_file() and file.stat().st_size > 0

    def do(self) -> None:
        # It needs urllib and ssl: not for who only names an operation.
        from .fetch import fetch

        file = Path(self.path)
        file.parent.mkdir(parents=True, exist_ok=True)
        fetch(self.url, file, self.sha256)
        if not self.done():
            raise Failed(f"{self.url} is empty")


@dataclass(frozen=True)
class NodeName:
    """The nodes of a group have one configuration between them: *stands_for* becomes *prefix* and the instance's id."""

    node: str
    stands_for: str
    prefix: str
    instance_id: str

    def done(self) -> bool:
        return bool(read_json(self.node)["node"] != self.stands_for)

    def do(self) -> None:
        name = self.prefix + read(self.instance_id).strip()
        key = '"node":'
        text = read(self.node).replace(key + json.dumps(self.stands_for), key + json.dumps(name), 1)
        replace(self.node, text)


@dataclass(frozen=True)
class User:
    """The user that the runner and its tasks run as, in those of *groups* that there are, and its *folder*."""

    user: str
    groups: list[str]
    folder: str

    def _groups(self) -> set[str]:
        return set(self.groups) & {group.gr_name for group in grp.getgrall()}

    def done(self) -> bool:
        found = [user.pw_uid for user in pwd.getpwall() if user.pw_name == self.user]
        inside = {group.gr_name for group in grp.getgrall() if self.user in group.gr_mem}
        folder = Path(self.folder)
        return bool(found) and folder.is_dir() and folder.stat().st_uid == found[0] and self._groups() <= inside

    def do(self) -> None:
        if self.user not in [user.pw_name for user in pwd.getpwall()]:
            command("useradd", "--system", "--home-dir", self.folder, "--shell", "/usr/sbin/nologin", self.user)
        for group in sorted(self._groups()):
            command("usermod", "-aG", group, self.user)
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        shutil.chown(self.folder, self.user)


@dataclass(frozen=True)
class Trust:
    """The CA certificate of the node configuration, for the system and, in *bundle*, for pip and uv."""

    node: str
    bundle: str

    def _certificate(self) -> str:
        return str(read_json(self.node)["packages"]["ca_certificate"])

    def done(self) -> bool:
        certificate = self._certificate()
        anchors = [path for program, path in _ANCHORS if shutil.which(program)]
        if not all(Path(path).exists() and read(path) == certificate for path in anchors):
            return False
        return Path(self.bundle).exists() and read(self.bundle).endswith(certificate)

    def do(self) -> None:
        certificate = self._certificate()
        system = next((read(path) for path in _BUNDLES if Path(path).exists()), "")
        for program, path in _ANCHORS:
            if shutil.which(program):
                replace(path, certificate)
                command(program)
        replace(self.bundle, f"{system.rstrip()}\n{certificate}")


@dataclass(frozen=True)
class Packages:
    """Packages of the system. *stamp*: a file that says which were installed."""

    apt: list[str]
    stamp: str

    def done(self) -> bool:
        return Path(self.stamp).exists() and bool(read_json(self.stamp) == self.apt)

    def do(self) -> None:
        if not shutil.which("apt-get"):
            raise Failed("packages need Debian or Ubuntu: this machine has no apt-get")
        # What an earlier attempt has left half done.
        output("dpkg", "--configure", "-a")
        apt_get("update")
        apt_get("install", "-y", "--no-install-recommends", *self.apt)
        replace(self.stamp, json.dumps(self.apt))


@dataclass(frozen=True)
class Driver:
    """The driver of *accelerator*, which nothing installs here. minimum: of NVIDIA's, such as ``525``."""

    vendor: str
    accelerator: str
    minimum: str | None

    # What is there when the driver of a vendor is.
    DEVICES: ClassVar[dict[str, str]] = {"aws": "/dev/neuron[0-9]*", "amd": "/dev/kfd"}

    def done(self) -> bool:
        return self._problem() is None

    def do(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise Failed(problem)

    def _problem(self) -> str | None:
        choose = "Choose an image with it."
        if self.vendor != "nvidia":
            pattern = self.DEVICES[self.vendor]
            there = glob.glob(pattern)  # noqa: PTH207
            return None if there else f"the driver of {self.accelerator} is missing: no {pattern}. {choose}"
        try:
            found = nvidia_driver()
        except OSError as error:
            return f"the driver of {self.accelerator} is missing: {error}. {choose}"
        if self.minimum is None or numbers(found) >= numbers(self.minimum):
            return None
        return f"the driver is {found}, and {self.accelerator} needs {self.minimum} or later. {choose}"


@dataclass(frozen=True)
class Python:
    """A virtual environment with the declared Python: by uv, which fetches that Python if need be, or else by venv.

    version: None where none is declared: that of the fleet, which the file *versions* names. tools: a folder whose
    ``bin/uv`` is uv afterwards, where it can be had.
    """

    version: str | None
    venv: str
    tools: str
    versions: str

    def _wanted(self) -> str:
        return self.version or str(read_json(self.versions)["python"])

    def done(self) -> bool:
        return self._is(f"{self.venv}/bin/python")

    def _is(self, python: str) -> bool:
        wanted, found = self._wanted().split("."), output(python, *_VERSION).split(".")
        return found[: len(wanted)] == wanted

    def do(self) -> None:
        version = self._wanted()
        # A link, so that an upgrade takes the place of one whole environment at once.
        folder = f"{self.venv}.d"
        for path in (os.path.realpath(self.venv), folder):
            shutil.rmtree(path, ignore_errors=True)
        self._make(version, folder)
        link(folder, self.venv)

    def _make(self, version: str, venv: str) -> None:
        uv = self._uv()
        if uv is not None:
            command(uv, "venv", "-q", "--python", version, venv)
            return
        minor = ".".join(version.split(".")[:2])
        python = shutil.which(f"python{minor}") or sys.executable
        if not self._is(python):
            raise Failed(f"Python {version} is not on this machine, and uv, which fetches it, cannot be had")
        command(python, "-m", "venv", venv)

    def _uv(self) -> str | None:
        uv = Path(self.tools, "bin", "uv")
        if not os.access(uv, os.X_OK):
            found = shutil.which("uv")
            if found:
                # It may stand in root's home, where the runner's user cannot look.
                uv.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, uv)
            else:
                self._install_uv()
        return str(uv) if os.access(uv, os.X_OK) else None

    def _install_uv(self) -> None:
        try:
            pip = self._pip()
            if pip is None and shutil.which("apt-get"):
                # Ubuntu's images have a Python that cannot make virtual environments.
                apt_get("update")
                apt_get("install", "-y", "--no-install-recommends", "python3-venv")
                pip = self._pip()
            if pip is not None:
                command(sys.executable, *pip, "install", "-q", "--upgrade", "--target", self.tools, "uv")
        except Failed as error:
            print(error, flush=True)

    def _pip(self) -> list[str] | None:
        """Returns the arguments for Python to run pip: the system's, or that for virtual environments."""
        if output(sys.executable, "-m", "pip", "--version"):
            return ["-m", "pip"]
        bundled = Path(os.__file__).parent / "ensurepip" / "_bundled"
        wheels = [*bundled.glob("pip-*.whl"), *Path("/usr/share/python-wheels").glob("pip-*.whl")]
        return [f"{wheels[0]}/pip"] if wheels else None


@dataclass(frozen=True)
class Runner:
    """The runner, in the virtual environment *venv*: a declared one (*requirements*), or else the wheel of the fleet.

    The file *versions* names that wheel, which stands in *bucket* and may be compressed, and the versions that go with
    a declared runner.
    """

    venv: str
    tools: str
    requirements: list[str]
    versions: str
    bucket: str

    @property
    def _stamp(self) -> str:
        return f"{self.venv}/skyinfra.json"

    def _wheel(self) -> dict[str, str]:
        """Name and SHA-256."""
        found = read_json(self.versions)["wheel"]
        if not found:
            raise Failed(f"{self.versions} names no runner: give the module runner_file, or declare image.runner")
        return dict(found)

    def _asked(self) -> str:
        if self.requirements:
            return json.dumps([[*self.requirements, *read_json(self.versions)["requirements"]], None])
        return json.dumps([[], self._wheel()["sha256"]])

    def done(self) -> bool:
        there = Path(self.venv, "bin", "skyinfra-runner").exists() and Path(self._stamp).exists()
        return there and read(self._stamp) == self._asked()

    def do(self) -> None:
        asked = json.loads(self._asked())[0]
        if not asked:
            from .fetch import fetch

            # It says itself what it needs, in which versions.
            wheel = self._wheel()
            path = Path(self.venv).with_name(wheel["name"])
            try:
                fetch(f"{self.bucket}/{wheel['name']}", path, wheel["sha256"])
            except Failed:
                # The fleet may have been upgraded since: the next attempt takes what the versions name then.
                with contextlib.suppress(Failed):
                    fetch(f"{self.bucket}/versions.json", Path(self.versions))
                raise
            if path.suffix != ".whl":
                from . import gce

                path = gce.unpacked(path)
            asked.append(str(path))
        uv, python = f"{self.tools}/bin/uv", f"{self.venv}/bin/python"
        pip = [uv, "pip", "install", "--python", python] if Path(uv).exists() else [python, "-m", "pip", "install"]
        only = ["--no-index"] if os.environ.get("PIP_NO_INDEX") else []
        if not self.requirements and (hashed := _hashed(Path(asked[0]))):
            # All that the wheel needs, and of each no file but those whose hashes it brings.
            command(*pip, "-q", *only, "--require-hashes", "-r", hashed)
            only.append("--no-deps")
        command(*pip, "-q", *only, *asked)
        # What the stamp stands for is on the disk before it: after a power cut it is not looked at again.
        os.sync()
        replace(self._stamp, self._asked())


def _hashed(wheel: Path) -> str | None:
    """Puts the requirements with hashes that *wheel* brings into a file beside it; None where it brings none."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".dist-info/requirements.txt"):
                return archive.extract(name, wheel.parent)
    return None


@dataclass(frozen=True)
class Units:
    """The units that stay, as the runner in *venv* brings them: in *folder*, enabled, and started.

    marker: the file that they wait for; running: those that never end.
    """

    units: list[str]
    running: list[str]
    marker: str
    venv: str
    folder: str

    def _enabled(self) -> bool:
        return output("systemctl", "is-enabled", *self.units).split() == ["enabled"] * len(self.units)

    def done(self) -> bool:
        active = output("systemctl", "is-active", *self.running).split() == ["active"] * len(self.running)
        return not changed_units(self.venv, self.folder) and Path(self.marker).exists() and active and self._enabled()

    def do(self) -> None:
        changed = changed_units(self.venv, self.folder)
        for path, text in changed.items():
            replace(path, text)
        # Enabling makes systemd read all of its units again, which takes a second.
        begin = ("start",) if self._enabled() else ("enable", "-q", "--now")
        if changed and begin == ("start",):
            command("systemctl", "daemon-reload")
        # Below /run: the next boot has to get as far as this again.
        replace(self.marker, "")
        # They come after the unit that this is: waiting for them would be for ever.
        command("systemctl", *begin, "--no-block", *self.units)


OPERATIONS = {
    "clock": Clock,
    "space": Space,
    "file": File,
    "node_name": NodeName,
    "user": User,
    "trust": Trust,
    "scratch": Scratch,
    "packages": Packages,
    "driver": Driver,
    "python": Python,
    "runner": Runner,
    "volume": Volume,
    "units": Units,
}
# Only nodes that need them have these.
for _module in "slices", "mounts", "buckets":
    with contextlib.suppress(ImportError):
        OPERATIONS.update(import_module(f"{__package__}.{_module}").OPERATIONS)
