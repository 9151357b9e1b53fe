"""A machine with the fake driver: how tests load it, and do to it what no driver does."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pynvml
from fake_nvml.build import HERE, LIBRARY


@dataclass
class FakeMachine:
    """The GPUs *gpus* (models, comma-separated) of the driver that was built in *driver*; *folder* is its own.

    ``settings`` are those of README.md without the prefix: ``{"LINGER": "2"}``. ``old``: with the library of a driver
    before R510.
    """

    driver: Path
    folder: Path
    gpus: str
    settings: dict[str, str] = field(default_factory=dict)
    old: bool = False

    @property
    def library(self) -> Path:
        return self.driver / "old" if self.old else self.driver

    def variables(self, **settings: str) -> dict[str, str]:
        """What a process on this machine has in its environment, beyond LD_LIBRARY_PATH and PATH."""
        own = {"STATE": str(self.folder / "state"), "GPUS": self.gpus, "LOG": str(self.folder / "calls")}
        return {f"FAKE_NVML_{name}": value for name, value in (own | self.settings | settings).items()}

    def environment(self, **settings: str) -> dict[str, str]:
        """The whole environment of a process on this machine, which never reaches the services of the one below."""
        path = f"{self._programs()}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"LD_LIBRARY_PATH": str(self.library), "PATH": path} | self.variables(**settings)

    def python(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Runs Python there; pynvml loads the driver as it does everywhere."""
        return self._run(sys.executable, *arguments, **settings)

    def control(self, *arguments: str | int) -> str:
        """Runs fake-nvml-ctl, and gives what it prints."""
        done = self._run(str(self.driver / "fake-nvml-ctl"), *map(str, arguments))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def reset(self, *addresses: str) -> subprocess.CompletedProcess[str]:
        """Runs ``nvidia-smi --gpu-reset``."""
        return self._run("nvidia-smi", "--gpu-reset", "-i", ",".join(addresses))

    @property
    def root(self) -> Path:
        """The root of its /proc and /sys, with what the tests below put there."""
        (self.folder / "state.root" / "proc").mkdir(parents=True, exist_ok=True)
        return self.folder / "state.root"

    def service(self, name: str, gpu: int | None, pid: int, *, start: int | None = None, required_by: str = "") -> None:
        """The service *name* runs. Its process has the GPU open, as a monitor does, and the partition at *start*.

        required_by: the name of a service that stops with it.
        """
        folder = self.folder / "state.services"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"{'-' if gpu is None else gpu} {'-' if start is None else start} {pid}\n")
        if required_by:
            (folder / f"{name}.required-by").write_text(f"{required_by}\n")
        self.opens(pid, gpu, start=start, group=f"/system.slice/{name}")

    def mig_manager(self, environment: str, state: str = "enabled") -> None:
        """systemd has nvidia-mig-manager.service, with this environment."""
        folder = self.folder / "state.services"
        folder.mkdir(exist_ok=True)
        for name, value in (("UnitFileState", state), ("Environment", environment)):
            (folder / f"nvidia-mig-manager.service.{name}").write_text(f"{value}\n")

    def opens(self, pid: int, gpu: int | None, *, start: int | None = None, group: str, live: bool = False) -> None:
        """A process of the control group *group* opens the GPU, and the partition at *start*. live: until it ends."""
        process = self.root / "proc" / str(pid)
        (process / "fd").mkdir(parents=True)
        (process / "cgroup").write_text(f"0::{group}\n")
        if gpu is None:
            return
        lives = ["--live"] if live else []
        self.control("hold", gpu, "--pid", pid, "--look", *lives)
        (process / "fd" / "3").symlink_to(f"/dev/nvidia{gpu}")
        if start is not None:
            self.control("hold", gpu, "--pid", pid, "--look", "--start", start, *lives)
            (process / "fd" / "4").symlink_to(self._capability(gpu, start))

    def _capability(self, gpu: int, start: int) -> str:
        """The device file of the partition's capability."""
        instance = next(each["id"] for each in self.show()[gpu]["instances"] if each["start"] == start)
        folder = self.root / f"proc/driver/nvidia/capabilities/gpu{gpu}/mig/gi{instance}"
        folder.mkdir(parents=True, exist_ok=True)
        minor = 3 + 135 * gpu + 9 * instance
        (folder / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 256\n")
        return f"/dev/nvidia-caps/nvidia-cap{minor}"

    def load_display(self, *gpus: int) -> Path:
        """The kernel has loaded nvidia_drm, which holds the GPUs. Returns its folder; a file ``used`` there: in use."""
        module = self.root / "sys/module/nvidia_drm"
        module.mkdir(parents=True)
        (module / "gpus").write_text("".join(f"{gpu}\n" for gpu in gpus))
        for gpu in gpus:
            self.control("hold", gpu, "--pid", 1, "--look")
        return module

    def asked_of_systemd(self) -> list[str]:
        """What systemctl was called for, beside questions."""
        log = self.folder / "state.systemctl"
        return log.read_text().splitlines() if log.exists() else []

    def show(self) -> list[dict[str, Any]]:
        """Each GPU as it stands."""
        gpus: list[dict[str, Any]] = json.loads(self.control("show"))["gpus"]
        return gpus

    def calls(self) -> Counter[str]:
        """How often each function of NVML was called, by all processes, since `forget_calls`."""
        log = self.folder / "calls"
        return Counter(log.read_text().split() if log.exists() else [])

    def forget_calls(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)

    @contextlib.contextmanager
    def loaded(self, **settings: str) -> Iterator[None]:
        """Within the block pynvml has loaded this driver, in this process.

        LD_LIBRARY_PATH is read when a process starts, so it is told; `python` does it the real way.
        """
        library = ctypes.CDLL(str(self.library / LIBRARY))
        state = {"nvmlLib": library, "_nvmlGetFunctionPointer_cache": {}, "_nvmlLib_refcount": 0}
        try:
            with mock.patch.dict(os.environ, self.variables(**settings)), mock.patch.multiple(pynvml, **state):
                yield
        finally:
            # With what it remembers: the next one begins anew.
            _ctypes.dlclose(library._handle)

    def _programs(self) -> Path:
        programs = self.folder / "bin"
        if not programs.exists():
            programs.mkdir()
            for file in (self.driver / "nvidia-smi", self.driver / "fake-nvml-ctl", HERE / "systemctl"):
                (programs / file.name).symlink_to(file)
            for name in ("rmmod", "modprobe"):
                (programs / name).symlink_to(HERE / "kmod")
        return programs

    def _run(self, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**settings)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
