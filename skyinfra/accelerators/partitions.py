"""The partition modes of AMD Instinct GPUs: partitions.json.

A GPU is divided by its compute mode into partitions of whole XCDs, all alike, and by its memory mode (NPS) into memory
domains. Both hold for every GPU of a node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from skyinfra.errors import InvalidPartition, PartitionNotSupported, did_you_mean
from skyinfra.mig.grid import Layout, Placement

_DATA = Path(__file__).with_name("partitions.json")

# One memory domain: goes with every compute mode of every part.
UNIFORM = "NPS1"
FORM = 'Write it like "MI300X:8/CPX" or "MI300X:8/CPX+NPS4".'


@dataclass(frozen=True, slots=True)
class Part:
    """The partition modes of one GPU model.

    xcds: compute dies, of which a partition has one or more. modes: for each compute mode the memory modes that the
    driver allows with it. validated: the pairs, such as "CPX+NPS4", that AMD has validated on bare metal.
    source: where this comes from, see sources().
    """

    name: str
    xcds: int
    modes: Mapping[str, tuple[str, ...]]
    validated: tuple[str, ...]
    source: tuple[str, ...]

    def partitions(self, mode: str) -> int:
        """Returns the number of partitions of one GPU in a compute mode."""
        return int(_data()["modes"][mode] or self.xcds)

    def layout(self, mode: str) -> Layout:
        """Returns the partitions of one GPU; start and size are in XCDs."""
        size = self.xcds // self.partitions(mode)
        return tuple(Placement(mode, start, size) for start in range(0, self.xcds, size))


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data


@cache
def _parts() -> dict[str, Part]:
    return {name: _part(name, row) for name, row in _data()["parts"].items()}


def _part(name: str, row: dict[str, Any]) -> Part:
    modes = {mode: tuple(memory) for mode, memory in row["modes"].items()}
    return Part(name, row["xcds"], modes, tuple(row["validated"]), tuple(row["source"]))


def sources() -> dict[str, str]:
    """Returns the texts of the keys in Part.source."""
    return dict(_data()["sources"])


def parts() -> tuple[Part, ...]:
    """Returns all GPUs with known partition modes."""
    return tuple(_parts().values())


def part(name: str, vendor: str = "amd") -> Part:
    """Returns the modes of one GPU, by its name in the catalog.

    Raises PartitionNotSupported where it has none, or where they are not known, with the reason.
    """
    found = _parts().get(name)
    if found is not None:
        return found
    able = f"With partition modes: {', '.join(_parts())}."
    if name in _data()["unknown"]:
        reason = _data()["unknown"][name]
        raise PartitionNotSupported(f"the partition modes of {name} are not known: {reason}", hint=able)
    if vendor == "nvidia":
        able = f'NVIDIA GPUs are divided with mig=, such as mig="1g.10gb". {able}'
    raise PartitionNotSupported(f"{name} has no partition modes", hint=able)


def choose(part: Part, partition: object, memory_mode: object) -> tuple[str, str]:
    """Returns the compute and the memory mode that are meant, as AMD writes them; without a memory mode it is NPS1.

    Raises InvalidPartition for an unknown mode, with the nearest, and for two that do not go together.
    """
    mode = _compute(part, partition)
    if memory_mode is None:
        return mode, UNIFORM
    known = dict.fromkeys(memory for modes in part.modes.values() for memory in modes)
    memory = memory_mode.strip().upper() if isinstance(memory_mode, str) else ""
    if memory not in known:
        hint = _hint(memory, known, f"{part.name} has {', '.join(known)}.")
        raise InvalidPartition("no memory mode of that name", field="memory_mode", given=memory_mode, hint=hint)
    if memory not in part.modes[mode]:
        raise InvalidPartition(
            f"{mode} and {memory} do not go together on {part.name}",
            field="memory_mode",
            given=memory_mode,
            hint=f"With {mode}: {', '.join(part.modes[mode])}. With {memory}: {', '.join(_going_with(part, memory))}."
            f" AMD has validated {', '.join(part.validated)}.",
        )
    return mode, memory


def _compute(part: Part, partition: object) -> str:
    mode = partition.strip().upper() if isinstance(partition, str) else ""
    if mode in part.modes:
        return mode
    each = ", ".join(f"{name} ({part.partitions(name)})" for name in part.modes)
    has = f"{part.name} has, with the number of partitions: {each}."
    elsewhere = [other.name for other in parts() if mode in other.modes]
    if elsewhere:
        raise InvalidPartition(
            f"{part.name}, with {part.xcds} XCDs, has no {mode}",
            field="partition",
            given=partition,
            hint=f"{has} With {mode}: {', '.join(elsewhere)}.",
        )
    if "+" in mode or "/" in mode:
        has = f'The memory mode has a field of its own: partition="CPX", memory_mode="NPS4". {has}'
    hint = _hint(mode, part.modes, has)
    raise InvalidPartition("no partition mode of that name", field="partition", given=partition, hint=hint)


def memory_alone(part: Part, memory_mode: object) -> InvalidPartition:
    """Returns the error for a memory mode without a partition mode."""
    modes = _going_with(part, memory_mode.strip().upper()) if isinstance(memory_mode, str) else []
    return InvalidPartition(
        "a memory mode needs a partition mode beside it",
        field="memory_mode",
        given=memory_mode,
        hint=f"Give partition= as well: {' or '.join(modes or part.modes)}.",
    )


def _going_with(part: Part, memory: str) -> list[str]:
    return [mode for mode, memories in part.modes.items() if memory in memories]


def _hint(given: str, known: Mapping[str, object], otherwise: str) -> str:
    return f"{did_you_mean(given, known)} {otherwise}".strip()
