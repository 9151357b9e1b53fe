"""The device files of NVIDIA's driver that tasks open: of unified memory, and of each partition's capabilities.

The driver's libraries have a setuid program, nvidia-modprobe, make them when a process first needs them (NVIDIA, MIG
User Guide, "Device Nodes and Capabilities"). A node's tasks gain no privileges, so that it would fail for them: root
makes the files, at every boot and after each change of a layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_PROC = "proc/driver/nvidia"
# Below `capabilities`: who has it may use a GPU instance, a compute instance in it, and watch all partitions.
_CAPABILITIES = ("gpu[0-9]*/mig/gi[0-9]*/access", "gpu[0-9]*/mig/gi[0-9]*/ci[0-9]*/access")
_MONITOR = "mig/monitor"
_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)$", re.MULTILINE)


def needed(root: Path = Path("/")) -> tuple[Path, ...]:
    """Those that the driver below *root* has now; none where it is not loaded."""
    if not (root / _PROC / "version").exists():
        return ()
    capabilities = (root / "dev/nvidia-caps" / f"nvidia-cap{minor}" for _, minor in _minors(root))
    return (root / "dev/nvidia-uvm", *capabilities)


def missing(root: Path = Path("/")) -> tuple[Path, ...]:
    """Those of `needed` that are not there."""
    return tuple(file for file in needed(root) if not file.exists())


def commands(program: str, root: Path = Path("/")) -> Iterator[Sequence[str]]:
    """What makes them, with *program*, the path of nvidia-modprobe."""
    yield program, "-u", "-c", "0"
    files = [str(file) for file, _ in _minors(root)]
    if files:
        yield program, *(word for file in files for word in ("-f", file))


def _minors(root: Path) -> Iterator[tuple[Path, int]]:
    """The file in /proc of each capability, and the minor number of its device file."""
    folder = root / _PROC / "capabilities"
    files = [file for pattern in _CAPABILITIES for file in sorted(folder.glob(pattern))]
    for file in [*files, folder / _MONITOR] if files else []:
        try:
            found = _MINOR.search(file.read_text(encoding="ascii", errors="replace"))
        except OSError:  # the partition has just gone
            continue
        if found:
            yield file, int(found[1])
