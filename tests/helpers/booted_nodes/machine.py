"""One booted machine: systemd and cloud-init in a container of systemd-nspawn, which can be rebooted and cut off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from namespaces.network import METADATA, Link

from booted_nodes.metadata import Metadata
from skyinfra.bootstrap import places

# How systemd-nspawn ends when the machine has asked for a reboot.
_REBOOT = 133
_STOP_S = 10.0
# The folder of the fake driver's state, within the machine: units that may write nothing else still reach /dev.
DRIVER_FOLDER = "/dev/fake-nvml"
_UNITS = ("cloud-final", "skyinfra-boot", "skyinfra-partition", "skyinfra-runner", "skyinfra-watch")


@dataclass(frozen=True)
class Hardware:
    """The GPUs of a machine: *control* is fake-nvml-ctl, *variables* what the fake driver reads beside its state.

    *guest*: they are passed through to a virtual machine, which cannot reset them. *stuck*: a mode that is pending is
    so after a reboot as well.
    """

    control: Path
    variables: Mapping[str, str]
    guest: bool = False
    stuck: bool = False


class Machine:
    """*layers*: folders of its image, the upper ones first. *folder*: where its own files are kept, on any disk."""

    # A folder that stands for a volume that is attached, where one is.
    volume: Path | None = None
    # Device files besides those of the fake driver, as names below /dev.
    devices: Sequence[str] = ()
    # Device files that it has of this machine, as names below /dev.
    real_devices: Sequence[str] = ()

    def __init__(self, name: str, *, folder: Path, layers: Sequence[Path], link: Link, hardware: Hardware) -> None:
        self.name = name
        self.link = link
        self.address = link.address
        self.root = folder / "root"
        self.boots = 0
        self._booted_at = 0.0
        self._folder = folder
        self._hardware = hardware
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._power = False
        self._thread: threading.Thread | None = None
        self._cgroups = [each / link.namespace for each in hierarchies()]
        self._mount(layers)
        self._driver(folder / "driver")
        listener = link.listen(METADATA, 80)
        self.metadata = Metadata(listener, f"i-{link.namespace.encode().hex():0>17.17}", self.address)

    def start(self) -> None:
        """Switches it on."""
        self._power = True
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    @property
    def off(self) -> bool:
        """Whether it has shut down, or was."""
        return self._ended.is_set()

    def kill(self) -> None:
        """Takes its power away."""
        self._power = False
        while self._thread is not None and self._thread.is_alive():
            # One that has just been started may not have entered its group yet.
            if self._process is not None:
                self._process.kill()
            for cgroup in self._cgroups:
                end_cgroup(cgroup)
            self._thread.join(0.1)
        for cgroup in self._cgroups:
            end_cgroup(cgroup)

    def close(self) -> None:
        """Removes all of it, in whatever state it is."""
        self.kill()
        self.metadata.close()
        subprocess.run(["umount", "--lazy", str(self.root)], capture_output=True, check=False)

    @property
    def leader(self) -> int:
        """The process that is 1 within the machine. Raises LookupError where it is off."""
        if self._process is not None and not self._ended.is_set():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._process.pid).children():
                    return child.pid
        raise LookupError(f"{self.name} is off")

    def execute(self, *command: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs *command* as root on the machine."""
        inside = ["nsenter", "--target", str(self.leader), "--mount", "--uts", "--ipc", "--net", "--pid", "--root"]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **self._variables(DRIVER_FOLDER)}
        done = subprocess.run(
            [*inside, "--wd=/", "--", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stdout}{done.stderr}"
        return done

    def read(self, path: str) -> str:
        """The text of a file on the machine, empty where there is none."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def status(self) -> dict[str, Any]:
        """What its runner says of itself since it was booted, empty while it says nothing."""
        file = self.root / "var/lib/skyinfra/status.json"
        try:
            old = file.stat().st_mtime < self._booted_at
            found: dict[str, Any] = {} if old else json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found

    def control(self, *arguments: str) -> str:
        """Runs fake-nvml-ctl on its GPUs, and gives what it prints."""
        environment = {**os.environ, **self._variables(str(self._folder / "driver"))}
        command = [str(self._hardware.control), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def gpus(self) -> list[dict[str, Any]]:
        """Its GPUs as they stand."""
        found: list[dict[str, Any]] = json.loads(self.control("show"))["gpus"]
        return found

    def show(self, unit: str, name: str) -> str:
        """A property of a unit, as systemd says it."""
        return self.execute("systemctl", "show", "--value", f"--property={name}", unit).stdout.strip()

    def report(self) -> str:
        """What a person would look at first when the node is not what it should be."""
        units = [argument for unit in _UNITS for argument in ("-u", unit)]
        journal = ["journalctl", f"--directory={self.root}/var/log/journal", "--no-pager", "--lines=60", *units]
        done = subprocess.run(journal, capture_output=True, text=True, check=False)
        parts = {"status.json": json.dumps(self.status(), indent=1), "journal": done.stdout + done.stderr}
        for path in ("/var/log/skyinfra/boot.jsonl", "/var/log/skyinfra-setup.log", "/var/log/cloud-init-output.log"):
            parts[path] = "\n".join(self.read(path).splitlines()[-30:])
        parts["console"] = (self._folder / "console").read_text(errors="replace")[-3000:]
        return "\n".join(f"=== {self.name}: {what}\n{text}" for what, text in parts.items() if text.strip())

    def _run(self) -> None:
        """Boots it, again for every reboot it asks for; ends when it is off."""
        try:
            while True:
                self._booted_at = time.time()
                self.boots += 1
                with (self._folder / "console").open("ab") as console:
                    self._process = subprocess.Popen(
                        self._command(), stdin=subprocess.DEVNULL, stdout=console, stderr=console
                    )
                    code = self._process.wait()
                if code != _REBOOT or not self._power:
                    return
                if not self._hardware.stuck:
                    self.control("reboot")
        finally:
            self._ended.set()

    def _command(self) -> list[str]:
        # Nodes that share one cgroup end each other's services; systemd may not be what runs this machine.
        enter = "".join(f"mkdir -p {each}; echo $$ >{each}/cgroup.procs; " for each in self._cgroups)
        nspawn = [
            "systemd-nspawn",
            "--quiet",
            "--boot",
            f"--directory={self.root}",
            f"--machine={self.link.namespace}",
            f"--hostname={self.name}",
            "--register=no",
            "--keep-unit",
            f"--network-namespace-path=/run/netns/{self.link.namespace}",
            f"--bind={self._folder / 'driver'}:{DRIVER_FOLDER}",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            "--console=pipe",
        ]
        if self.volume is not None:
            # A container has no disks of its own to mount.
            nspawn.append(f"--bind={self.volume}:{places.STATE}")
        nspawn += [f"--bind=/dev/{name}" for name in self.real_devices]
        for name in self.devices:
            # A file stands for the device: nothing here opens one. As with the real drivers, every user may.
            file = self._folder / "devices" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            file.chmod(0o666)
            nspawn.append(f"--bind={file}:/dev/{name}")
        return ["sh", "-c", f'{enter}exec "$@"', "sh", *nspawn]

    def _mount(self, layers: Sequence[Path]) -> None:
        for name in ("root", "upper", "work"):
            (self._folder / name).mkdir(parents=True)
        lower = ":".join(map(str, layers))
        options = f"lowerdir={lower},upperdir={self._folder / 'upper'},workdir={self._folder / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)], check=True)
        (self.root / "var/log/journal").mkdir(parents=True, exist_ok=True)

    def _driver(self, folder: Path) -> None:
        """Makes the GPUs. Every user may open them, as it is with the device files of the real driver."""
        folder.mkdir()
        self.control("new", self._hardware.variables["FAKE_NVML_GPUS"])
        if self._hardware.guest:
            for index in range(len(self.gpus())):
                self.control("passthrough", str(index))
        (folder / "state.clients").touch()
        folder.chmod(0o777)
        for file in folder.iterdir():
            file.chmod(0o666)

    def _variables(self, folder: str) -> dict[str, str]:
        return {**self._hardware.variables, "FAKE_NVML_STATE": f"{folder}/state"}


def hierarchies() -> list[Path]:
    """Where systemd keeps its groups of processes: cgroup2 alone, or beside the hierarchies of cgroup v1."""
    found = []
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.append(Path(point))
    return found


def end_cgroup(path: Path) -> None:
    """Ends the processes of a group, and removes it. A container outlives the systemd-nspawn that is killed."""
    # The kernel takes a moment to forget processes that have ended.
    deadline = time.monotonic() + _STOP_S
    while path.exists() and time.monotonic() < deadline:
        for folder, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                for pid in Path(folder, "cgroup.procs").read_text(encoding="ascii").split():
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
        if path.exists():
            time.sleep(0.05)
