"""The report of `python -m benchmarks gpu`: what was measured on which GPUs, in a file that one can send to others.

It holds no name of a host or an account, no path, no address, and nothing that tells one GPU from another of its model.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pynvml

import skyinfra
from benchmarks.measure import Result

SCHEMA_VERSION = 1
_GIB = 2**30
_MIG = {0: "off", 1: "on"}


@dataclass
class Report:
    """The measurements for the report. said: what was not measured, and why. doctor: each finding, and its result."""

    gpus: list[dict[str, Any]] = field(default_factory=list)
    driver: str | None = None
    cuda: str | None = None
    rows: list[Result] = field(default_factory=list)
    doctor: list[dict[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    failed: str | None = None

    def say(self, text: str) -> None:
        """Prints what was not measured, and keeps it."""
        self.said.append(text)
        print(f"gpu: {text}", file=sys.stderr)

    def kept(self, results: Iterable[Result], file: Path) -> Iterator[Result]:
        """Yields *results*, and writes the report to *file* when they end, also by an exception."""
        try:
            for result in results:
                self.rows.append(result)
                yield result
        except Exception as error:
            self.failed = type(error).__name__  # its words may name a host or a path
            raise
        finally:
            file.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")
            print(f"gpu: written to {file}: no host, account or path is named there; docs/gpu-run.md", file=sys.stderr)

    def document(self) -> dict[str, Any]:
        """Returns the report as JSON."""
        return {
            "report": "skyinfra gpu",
            "schema_version": SCHEMA_VERSION,
            "date": datetime.now(UTC).date().isoformat(),
            "skyinfra": skyinfra.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "distribution": _distribution(),
            "driver": self.driver,
            "cuda": self.cuda,
            "torch": _version("torch"),
            "gpus": self.gpus,
            "rows": [asdict(row) for row in self.rows],
            "doctor": self.doctor,
            "said": self.said,
            "failed": self.failed,
        }


def look(report: Report) -> None:
    """Adds the GPUs and their driver to *report*; nothing where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        report.driver = str(pynvml.nvmlSystemGetDriverVersion())
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        report.cuda = f"{version // 1000}.{version % 1000 // 10}"
        for index in range(pynvml.nvmlDeviceGetCount()):
            report.gpus.append(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": str(pynvml.nvmlDeviceGetName(handle)), "mig": None, "memory_gib": None}
    with suppress(pynvml.NVMLError):
        found["memory_gib"] = round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / _GIB, 1)
    with suppress(pynvml.NVMLError):
        found["mig"] = _MIG.get(pynvml.nvmlDeviceGetMigMode(handle)[0])
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None
