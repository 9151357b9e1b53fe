"""Podman from Debian with a store of its own in memory, and images of nodes in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from booted_nodes import image as bed_image
from skyinfra.bootstrap import runner_wheel

PREFIX = "skyinfra-engine-"
PROGRAMS = {
    "podman": "podman",
    "runc": "runc",
    "iptables": "iptables",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "mmdebstrap": "mmdebstrap",
}
# A Debian with Python and, in WHEELS, all packages that a node needs; that with the runner; that without Python.
NODE, PREPARED, NO_PYTHON = (f"localhost/skyinfra-{name}" for name in ("node", "prepared", "nopython"))
WHEELS = "/wheels"

# crun fails where both versions of cgroups are mounted. A container has no right to raise limits.
_CONTAINERS = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{folder}/tmp"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{folder}/graph"
runroot = "{folder}/run"
"""


class Engine:
    """Podman whose containers, networks and volumes are those of the tests alone. `close` leaves nothing behind.

    environment: with it `podman` uses this store. Raises `bed_image.Unavailable` where there can be no containers.
    """

    def __init__(self) -> None:
        bed_image.install_programs(PROGRAMS)
        _sweep()
        self._left = ExitStack()
        try:
            folder = self._scratch()
            for name, text in (("containers", _CONTAINERS), ("storage", _STORAGE)):
                (folder / f"{name}.conf").write_text(text.format(folder=folder))
            self.environment = _environment(folder)
            self._left.callback(self._remove_all)
            self._make_images()
        except BaseException:
            self._left.close()
            raise

    def run(self, *arguments: str, check: bool = True) -> str:
        """What podman prints. Raises `bed_image.Unavailable` where it fails."""
        command = ["podman", *arguments]
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        if check and done.returncode != 0:
            raise bed_image.Unavailable(f"podman {arguments[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    def left(self) -> list[str]:
        """The names of all containers, volumes, and networks but podman's own."""
        kinds = {"ps": ["-a", "--format", "{{.Names}}"], "volume": ["ls", "-q"], "network": ["ls", "-q"]}
        names = [name for kind, rest in kinds.items() for name in self.run(kind, *rest).split()]
        return [name for name in names if name != "podman"]

    def close(self) -> None:
        self._left.close()

    def _scratch(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._left.callback(shutil.rmtree, folder, ignore_errors=True)
        mount = ["mount", "-t", "tmpfs", "-o", "mode=700,size=6g", "skyinfra-engine", str(folder)]
        if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
            raise bed_image.Unavailable("this machine allows no file system in memory")
        self._left.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=False)
        return folder

    def _make_images(self) -> None:
        root = bed_image.rootfs()
        packed = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        with packed:
            command = ["podman", "import", "--quiet", "-", "localhost/skyinfra-debian"]
            done = subprocess.run(
                command, stdin=packed.stdout, env={**os.environ, **self.environment}, capture_output=True, text=True
            )
        if done.returncode != 0:
            raise bed_image.Unavailable(f"podman import: {done.stderr.strip()}")
        wheels = bed_image.wheelhouse(runner_wheel.wheel())
        self.image(NODE, "localhost/skyinfra-debian", "true", copied={f"{wheels}/.": WHEELS})

    def image(self, name: str, base: str, command: str, *, copied: dict[str, str] | None = None) -> None:
        """Makes the image *name* of *base*: *copied* into it, then the shell's *command* run."""
        self.run("create", "--name", "making", "--network", "none", "--entrypoint", "/bin/sh", base, "-ec", command)
        try:
            for source, target in (copied or {}).items():
                self.run("cp", source, f"making:{target}")
            self.run("start", "--attach", "making")
            self.run("commit", "--quiet", "making", name)
        finally:
            self.run("rm", "-f", "making")

    def _remove_all(self) -> None:
        with contextlib.suppress(bed_image.Unavailable):
            self.run("rm", "-f", "-a", "-v", "-t", "0")
            self.run("network", "prune", "-f")


def _environment(folder: Path) -> dict[str, str]:
    return {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }


def _sweep() -> None:
    """Ends what tests that were killed have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*-*"):
        pid = re.match(rf"{PREFIX}(\d+)-", folder.name)
        if pid is None or Path(f"/proc/{pid[1]}").exists():
            continue
        if (folder / "storage.conf").exists():
            environment = {**os.environ, **_environment(folder)}
            for command in (["rm", "-f", "-a", "-v", "-t", "0"], ["network", "prune", "-f"]):
                subprocess.run(["podman", *command], env=environment, check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
