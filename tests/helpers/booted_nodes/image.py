"""What booted nodes are made of: a Debian from packages, what a cloud image has beside it, and a wheelhouse.

All of it is built from this machine's own package sources, once for each set of inputs, and kept below ``build/``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

from fake_nvml.build import LIBRARY
from support import ROOT

from skyinfra.bootstrap.runner_wheel import Wheel

KEPT = ROOT / "build" / "boot"
# The release of Debian whose Python is that of the client: tasks are pickled from one to the other.
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
# Program and Debian package of what the bed itself needs.
PROGRAMS = {
    "ip": "iproute2",
    "mmdebstrap": "mmdebstrap",
    "nsenter": "util-linux",
    "systemd-nspawn": "systemd-container",
}
# What tests declare as a package of the image.
EXTRA = ("six",)
# What every cloud image has and a minimal Debian lacks.
PACKAGES = (
    "ca-certificates",
    "cloud-init",
    "dbus",
    "iproute2",
    "procps",
    "python3",
    "python3-venv",
    "systemd",
    "systemd-sysv",
    "util-linux",
)
# What a machine that somebody logs in to has besides, and who may: root, one with sudo, one without.
LOGIN = ("openssh-server", "rsync", "sudo")
USERS = ("ubuntu", "plain")
_SUDO = 'Defaults env_keep += "FAKE_NVML_*"\nubuntu ALL=(ALL) NOPASSWD: ALL\n'
# PAM would set what a container may not.
_SSHD = "UsePAM no\nPasswordAuthentication no\n"
# What a machine has that is no container.
KERNEL = ("linux-image-cloud-amd64", "udev")
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
# The Ec2 datasource alone, with its network ready and nothing to resize; the nodes have no SSH server.
_CLOUD_CONFIG = """\
datasource_list: [Ec2]
datasource: {Ec2: {strict_id: true, timeout: 5, max_wait: 30}}
network: {config: disabled}
growpart: {mode: "off"}
resize_rootfs: false
ssh_genkeytypes: []
ssh_deletekeys: false
manage_etc_hosts: false
locale: false
apt: {preserve_sources_list: true}
"""
# cloud-init asks for tokens where it takes the machine for one of AWS's. It tells by DMI, which no container has, or by
# this file, which no container can make: it looks for it elsewhere here.
_EC2_FILE = ("/sys/hypervisor/uuid", "/etc/hypervisor-uuid")
_EC2_SOURCE = "usr/lib/python3/dist-packages/cloudinit/sources/DataSourceEc2.py"


# A container has a boot id of its own in its /proc, but not in one that systemd mounts anew for a unit.
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Unavailable(Exception):
    """Why nodes cannot be booted on this machine."""


def suite() -> str:
    """The release of Debian for this Python. Raises `Unavailable`."""
    found = SUITES.get(sys.version_info[:2])
    if found is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUITES)
        raise Unavailable(f"no release of Debian has Python {sys.version_info[0]}.{sys.version_info[1]}, only {known}")
    return found


def install_programs(programs: Mapping[str, str] = PROGRAMS) -> None:
    """Installs the *programs* that are missing, from their packages. Raises `Unavailable`."""
    if os.geteuid() != 0:
        raise Unavailable("nodes that boot, and containers, need root")
    KEPT.mkdir(parents=True, exist_ok=True)
    with _locked(KEPT / "programs.lock"):
        _install({package for program, package in programs.items() if shutil.which(program) is None})


def _install(packages: set[str]) -> None:
    lacking = sorted(packages)
    if not lacking:
        return
    if shutil.which("apt-get") is None:
        raise Unavailable(f"{', '.join(lacking)} are needed, and there is no apt-get to install them")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *lacking]
    if subprocess.run(install, env=quiet, capture_output=True, check=False).returncode == 0:
        return
    subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
    done = subprocess.run(install, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{', '.join(lacking)} cannot be installed: {_last(done.stderr)}")


def rootfs() -> Path:
    """The folder of a Debian with cloud-init, never changed once it is there. Raises `Unavailable`."""
    inputs = [suite(), *PACKAGES, *_LEFT_OUT, _CLOUD_CONFIG, *_EC2_FILE, _BOOT_ID]

    def build(folder: Path) -> None:
        _debian(suite(), folder, PACKAGES)
        _have_tokens(folder)
        _have_one_boot_id(folder)

    return _kept("rootfs", inputs, build)


def login_rootfs() -> Path:
    """As `rootfs`, of a machine that stands already: with an SSH server, and nothing that cloud-init would do."""
    base = rootfs()

    def build(folder: Path) -> None:
        # With the device files as such.
        _run(["cp", "--archive", f"{base}/.", str(folder)])
        inside = ["chroot", str(folder)]
        sources = folder / "etc/apt/sources.list"
        sources.write_text(f"deb {_mirror()} {suite()} main\n")
        with _having(
            folder, Path("/etc/resolv.conf"), Path("/etc/hosts"), *Path("/etc/apt/apt.conf.d").glob("*proxy*")
        ):
            _run([*inside, "apt-get", "update", "-qq"])
            _run([*inside, "apt-get", "install", "-y", "-qq", "--no-install-recommends", *LOGIN])
        sources.unlink()
        shutil.rmtree(folder / "var/lib/apt/lists", ignore_errors=True)
        (folder / "etc/cloud/cloud-init.disabled").touch()
        for user in USERS:
            _run([*inside, "useradd", "--create-home", "--shell=/bin/bash", "--password=*", user])
        sudo = folder / "etc/sudoers.d/bed"
        sudo.write_text(_SUDO)
        sudo.chmod(0o440)
        (folder / "etc/ssh/sshd_config.d/bed.conf").write_text(_SSHD)

    return _kept("login", [base.name, *LOGIN, *USERS, _SUDO, _SSHD], build)


@contextlib.contextmanager
def _having(folder: Path, *files: Path) -> Iterator[None]:
    """What this machine needs for its network is below *folder* for as long as the block runs."""
    copies = [folder / str(file).lstrip("/") for file in files if file.exists()]
    before = {copy: copy.read_bytes() if copy.exists() else None for copy in copies}
    for copy in copies:
        copy.write_bytes((Path("/") / copy.relative_to(folder)).read_bytes())
    try:
        yield
    finally:
        for copy, content in before.items():
            if content is None:
                copy.unlink()
            else:
                copy.write_bytes(content)


def virtual_rootfs() -> Path:
    """As `rootfs`, of a virtual machine: with a kernel, and nothing changed for containers."""

    def build(folder: Path) -> None:
        _debian(suite(), folder, (*PACKAGES, *KERNEL))
        # Debian starts no network by itself.
        _run(["systemctl", f"--root={folder}", "enable", "systemd-networkd.service"])

    return _kept("virtual", [suite(), *PACKAGES, *KERNEL, *_LEFT_OUT, _CLOUD_CONFIG], build)


def _have_tokens(folder: Path) -> None:
    looked_for, instead = _EC2_FILE
    source = folder / _EC2_SOURCE
    text = source.read_text(encoding="utf-8")
    if f'"{looked_for}"' not in text:
        raise Unavailable(f"this cloud-init does not look for {looked_for}")
    source.write_text(text.replace(f'"{looked_for}"', f'"{instead}"'), encoding="utf-8")
    (folder / instead.lstrip("/")).write_text("ec2b0a7d-0000-4000-8000-000000000000\n")


def _have_one_boot_id(folder: Path) -> None:
    (folder / "etc/tmpfiles.d/boot-id.conf").write_text(f"C /run/boot-id 0444 - - - {_BOOT_ID}\n")
    override = folder / "etc/systemd/system/skyinfra-runner.service.d"
    override.mkdir()
    (override / "boot-id.conf").write_text(f"[Service]\nBindReadOnlyPaths=/run/boot-id:{_BOOT_ID}\n")


def wheelhouse(wheel: Wheel) -> Path:
    """A folder of wheels with what *wheel* needs, uv and `EXTRA`, as installed here. Raises `Unavailable`."""
    pins = sorted(f"{each.name}=={each.version}" for each in metadata.distributions() if each.name != "skyinfra")
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        [information] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        needs = message_from_bytes(archive.read(information)).get_all("Requires-Dist", [])
    wanted = [*needs, "uv", *EXTRA]

    def build(folder: Path) -> None:
        constraints = folder / "constraints"
        constraints.write_text("\n".join(pins))
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder)]
        _run([*pip, "--constraint", str(constraints), *wanted])

    return _kept("wheelhouse", [sys.version.split()[0], *pins, *wanted], build)


def driver_layer(folder: Path, driver: Path, environment: Mapping[str, str]) -> None:
    """Writes to *folder* what an image with the NVIDIA driver has more than one without: here the fake one.

    *environment*: what the fake driver reads, for every service of the node.
    """
    libraries = folder / "usr" / "lib" / str(sysconfig.get_config_var("MULTIARCH"))
    libraries.mkdir(parents=True)
    shutil.copy(driver / LIBRARY, libraries / LIBRARY)
    programs = folder / "usr" / "bin"
    programs.mkdir(parents=True)
    shutil.copy(driver / "nvidia-smi", programs / "nvidia-smi")
    manager = folder / "etc/systemd/system.conf.d"
    manager.mkdir(parents=True)
    variables = " ".join(json.dumps(f"{name}={value}") for name, value in environment.items())
    (manager / "fake-driver.conf").write_text(f"[Manager]\nDefaultEnvironment={variables}\n")
    # To everybody but root the driver refuses what nvml.h says it does.
    for unit in ("skyinfra-interrupt", "skyinfra-metrics", "skyinfra-runner", "skyinfra-watch"):
        override = folder / f"etc/systemd/system/{unit}.service.d"
        override.mkdir(parents=True)
        (override / "fake-driver.conf").write_text("[Service]\nEnvironment=FAKE_NVML_UNPRIVILEGED=1\n")


def _debian(name: str, folder: Path, packages: Sequence[str]) -> None:
    command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={','.join(packages)}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    done = subprocess.run([*command, name, str(folder), _mirror()], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"mmdebstrap cannot build {name}: {_last(done.stderr)}")
    (folder / "etc/cloud/cloud.cfg.d/90-bed.cfg").write_text(_CLOUD_CONFIG)
    # The name and addresses of the package mirror are this machine's affair.
    (folder / "etc/apt/sources.list").unlink(missing_ok=True)
    (folder / "etc/resolv.conf").unlink(missing_ok=True)
    shutil.rmtree(folder / "var/lib/apt/lists", ignore_errors=True)


def _mirror() -> str:
    """Where this machine gets Debian from."""
    form = "$(REPO_URI)|$(RELEASE)"
    targets = _run(["apt-get", "indextargets", "--format", form, "Created-By: Packages", "Origin: Debian"])
    sources = [line.split("|") for line in targets.splitlines()]
    main = [url for url, release in sources if "-" not in release]
    if not main:
        raise Unavailable("apt on this machine has no source of Debian")
    return main[0]


def _kept(name: str, inputs: list[str], build: Callable[[Path], None]) -> Path:
    """The folder that *build* makes of *inputs*: what is there already is taken, what is half done never is."""
    KEPT.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    folder = KEPT / f"{name}-{digest}"
    with _locked(KEPT / f"{name}.lock"):
        if folder.exists():
            return folder
        unfinished = KEPT / f"{name}-{digest}.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            build(unfinished)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        for old in KEPT.glob(f"{name}-*"):
            if old != unfinished and not _mounted(old):
                shutil.rmtree(old, ignore_errors=True)
        unfinished.rename(folder)
    return folder


def _mounted(folder: Path) -> bool:
    return str(folder) in Path("/proc/mounts").read_text(encoding="utf-8")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> str:
    """What *command* prints. Raises `Unavailable` with its last words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command[:3])}: {_last(done.stderr)}")
    return done.stdout


def _last(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:]) or "it says nothing"
