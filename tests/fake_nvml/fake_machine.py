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

    def service(self, name: str, gpu: int, pid: int) -> None:
        """The service *name* runs, and its process has the GPU open, as a monitor does."""
        folder = self.folder / "state.services"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"{gpu} {pid}\n")
        self.control("hold", gpu, "--pid", pid, "--look")

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
        return programs

    def _run(self, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**settings)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
