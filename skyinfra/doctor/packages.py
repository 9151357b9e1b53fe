"""The CUDA, ROCm or Neuron versions that the installed Python packages need, from their files.

Nothing is imported: importing torch takes seconds and opens devices.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from skyinfra.doctor.system import text_of

# Packages with a CUDA runtime, or built for one; the name may hold its version.
_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu(\d+))?")
_MADE_FOR = re.compile(r"(?:cupy-cuda|jax-cuda|numba-cuda-cu|onnxruntime-gpu-cuda|cudf-cu|cuml-cu)(\d+)x?(?:-plugin)?")


@dataclass(frozen=True)
class Need:
    """The *package*, with its version, needs *version* of CUDA (or ROCm): ``(12, 8)``, or ``(12,)`` for any 12."""

    package: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


def search_path(packages: Path | None) -> list[str]:
    """Returns the import path of tasks: the folder of the node's *packages*, then this Python's own path."""
    return [*([str(packages)] if packages is not None and packages.is_dir() else []), *sys.path]


def cuda(path: list[str]) -> list[Need]:
    """Returns the CUDA needs of the packages on the import path *path*, by name."""
    found: dict[str, Need] = {}
    for name, need in _cuda(path):
        found.setdefault(name, need)  # the first one on the path is imported
    return [found[name] for name in sorted(found)]


def _cuda(path: list[str]) -> Iterator[tuple[str, Need]]:
    for distribution in metadata.distributions(path=path):
        try:
            name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        except (ImportError, OSError):  # an interrupted installation leaves folders without a name
            continue
        shown = f"{name} {distribution.version}"
        if name == "torch":
            built = torch_version(distribution, "cuda")
            if built is not None:
                yield name, Need(shown, built)
        elif form := _RUNTIME.fullmatch(name):
            numbers = _numbers(distribution.version)
            yield name, Need(shown, numbers[:2] if form[1] is None or numbers[0] == int(form[1]) else (int(form[1]),))
        elif form := _MADE_FOR.fullmatch(name):
            yield name, Need(shown, (int(form[1]),))


def torch_version(distribution: metadata.Distribution, what: str) -> tuple[int, ...] | None:
    """Returns the version that torch was built for: ``torch.version.cuda`` (or ``hip``), from ``torch/version.py``."""
    text = text_of(Path(str(distribution.locate_file("torch/version.py"))))
    assigned = re.search(rf"""^{what}\b[^=\n]*= *["']([^"']*)""", text, re.MULTILINE)
    return _numbers(assigned[1])[:2] if assigned else None


def installed(name: str, path: list[str]) -> metadata.Distribution | None:
    """Returns the package *name* that tasks import; None where it is not installed."""
    return next(iter(metadata.distributions(path=path, name=name)), None)


def version(name: str, path: list[str]) -> tuple[str, tuple[int, ...]] | None:
    """Returns the version of the package *name* that tasks import, as text and as numbers; None where there is none."""
    found = installed(name, path)
    return None if found is None else (found.version, _numbers(found.version))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)) or (0,)
