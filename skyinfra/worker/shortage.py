"""Recognizes that the memory of a device ran out under a task, by the names and texts of exceptions alone.

No library is imported for it. Their texts hold figures: what PyTorch and CuPy had taken, and what was asked for. Where
a text does not, the readings of the runner tell what the task had taken, every two seconds or so.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from skyinfra.errors import SkyinfraError
from skyinfra.node import device
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol import pickles
from skyinfra.protocol.instance import NODE_DIRECTORY, InstanceInfo, instance_info
from skyinfra.protocol.shortage import Shortage

# Classes by their names, and the packages that they are of.
_CLASSES = {"OutOfMemoryError": ("torch", "cupy", "cupy_backends"), "ResourceExhaustedError": ("tensorflow",)}
_SAYS = re.compile(
    r"(CUDA|HIP|XPU) out of memory"
    r"|(CUDA|HIP)( runtime)? error: out of memory"
    r"|(cuda|hip)ErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|RESOURCE_EXHAUSTED: .*(memory|allocat)",
    re.I | re.S,
)
_SIZE = r"([\d.,]+)\s*(bytes?|[KMGT]i?B|B)\b"
_ASKED = re.compile(rf"(?:allocate|allocating)\s+{_SIZE}", re.I)
_HAS = (re.compile(rf"total capacity of {_SIZE}"), re.compile(rf"{_SIZE} total capacity"))
# The best first: what the whole process has, what the library has.
_TAKEN = (
    (re.compile(rf"this process has {_SIZE} memory in use"), "PyTorch"),
    (re.compile(rf"{_SIZE} is allocated by PyTorch"), "PyTorch"),
    (re.compile(rf"{_SIZE} already allocated"), "PyTorch"),
    (re.compile(rf"allocated so far: {_SIZE}"), "CuPy"),
)
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
# Memory that tasks before left in use, from which it is worth another start in a new process. A context has less.
_MANY = 2e9
# Of a chain of exceptions, and of a text.
_DEEP, _LONG = 10, 100_000


# The bytes in use when the present task began, after others in this process.
_held: int | None = None


def begin(*, used: bool) -> None:
    """Notes how much of the device is in use as a task begins. used: whether tasks before it had this process."""
    global _held
    found = device.held() if used else None
    _held = found if found is not None and found >= _MANY else None


def of(error: BaseException) -> dict[str, Any] | None:
    """The `Shortage` behind *error*, or behind an exception that caused it, as JSON; adds it to *error* as a note.

    None for any other exception, and outside of a task. Never raises.
    """
    with contextlib.suppress(Exception):  # whatever an exception of others does when it is looked at
        text = next((text for each in _chain(error) if (text := _out_of_memory(each)) is not None), None)
        if text is not None:
            found = _shortage(text, instance_info())
            error.add_note(str(found))
            return _document(found)
    return None


def in_lines(lines: Iterable[Sequence[str]]) -> str | None:
    """The last of the lines of a program, each a stream and a text, that says that the memory of a device ran out."""
    return next((text for _, text in reversed(list(lines)) if _SAYS.search(text[:_LONG])), None)


def of_line(text: str) -> str | None:
    """Returns the `Shortage` behind a line of `in_lines`, as JSON; None outside of a task."""
    with contextlib.suppress(SkyinfraError, ValueError):
        return json.dumps(_document(_shortage(text, instance_info())))
    return None


def _document(found: Shortage) -> dict[str, Any]:
    """Returns *found* as JSON, without what clients of the version before do not know where it says nothing."""
    return {name: value for name, value in found.to_json().items() if name != "held" or value is not None}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """*error* and those before it."""
    found: BaseException | None = error
    for _ in range(_DEEP):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _out_of_memory(error: BaseException) -> str | None:
    """Returns the text of an exception that says that the memory of a device ran out; None for any other."""
    text = pickles.said(error)
    if text is None:
        return None
    text = text[:_LONG]
    named = any(
        kind.__module__.partition(".")[0] in _CLASSES.get(kind.__qualname__.rpartition(".")[2], ())
        for kind in type(error).__mro__
    )
    return text if named or _SAYS.search(text) else None


def _shortage(text: str, slot: InstanceInfo) -> Shortage:
    said = next((found for pattern in _HAS if (found := _bytes(pattern.search(text))) is not None), None)
    taken, measured = next(
        ((found, by) for pattern, by in _TAKEN if (found := _bytes(pattern.search(text))) is not None), (None, "")
    )
    if taken is None and not _is_at_once(text) and (taken := _read(slot)) is not None:
        measured = "the most at any reading of the node"
    return Shortage(
        slot.slot,
        slot.accelerator,
        slot.profile,
        has=round(slot.memory_gb * 1e9) if slot.memory_gb else said,
        taken=taken,
        measured=measured,
        asked=_bytes(_ASKED.search(text)),
        held=_held,
    )


def _is_at_once(text: str) -> bool:
    """Returns whether a library says *text* that takes most of the device before it is asked for anything, as JAX does.

    https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    """
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0")
    return preallocates and "RESOURCE_EXHAUSTED" in text


def _bytes(found: re.Match[str] | None) -> int | None:
    if found is None:
        return None
    unit = found[2].upper()
    base = 1024.0 if "I" in unit else 1000.0
    return round(float(found[1].replace(",", "")) * math.pow(base, _UNITS.get(unit[0], 0)))


def _read(slot: InstanceInfo) -> int | None:
    """The memory high-water of the task that runs here, by the readings of the runner; None where there are none."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, SkyinfraError):
        key = str(distributed.get_worker().get_current_task())
        file = NodeDirectory(Path(os.environ[NODE_DIRECTORY])).figures_file
        document = json.loads(file.read_text(encoding="utf-8"))[str(slot.worker)]
        if document["task"] == key:
            return int(document["figures"]["memory_peak"] or 0) or None
    return None
