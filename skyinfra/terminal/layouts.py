"""The layouts that an accelerator string says, tried GPU by GPU: for drawings, as JSON, and in a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from skyinfra import mig
from skyinfra.accelerators import Accelerator, catalog, grammar
from skyinfra.errors import InvalidLayout, SkyinfraError, counted
from skyinfra.terminal import tables

# A comma between two profiles; one within a name is followed by a letter.
_COMMA = re.compile(r"\s*,(?=\s*[\d>])")

# As many GPUs as a machine has are drawn one by one; what is said of more is drawn once.
_DRAWN = 16


@dataclass(frozen=True)
class NamedGpu:
    """The GPU that was named: its name, geometry, how many, and the layout behind the slash."""

    name: str
    geometry: mig.Geometry
    count: int | None
    declared: str | mig.PerGpu | None


def read_gpu(text: str, layout: str | None = None) -> NamedGpu:
    """Reads an accelerator string or the key of a geometry, and a layout given beside it.

    Profiles may be joined by commas, as in a demand. The layout is read, not placed. Raises what reading an
    accelerator raises, and MigNotSupported.
    """
    if text in mig.models():
        named = NamedGpu(text, mig.geometry(text), None, None)
    else:
        read = grammar.read(_COMMA.sub("+", text))
        spelling = read.spelling
        accelerator = Accelerator(spelling.name, memory=spelling.memory_gb, form_factor=spelling.form_factor)
        named = NamedGpu(str(accelerator), accelerator.mig_geometry(), read.count, read.mig)
    if layout is None:
        return named
    if named.declared is not None:
        raise InvalidLayout("the layout is given twice", given=f"{named.declared} and {layout}")
    layout = _COMMA.sub("+", layout)
    return replace(named, declared=mig.per_gpu(*layout.split("|")) if "|" in layout else mig.text(layout))


@dataclass(frozen=True)
class Shown:
    """The layout of one GPU for output: how far its placement got, and the picture of that."""

    title: str
    tried: mig.Attempt
    picture: mig.Picture

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Pairs of a word and a sentence: why the rest has no placement, and alternatives; or others that fit."""
        if self.tried.missing:
            missing = ", ".join(name if count == 1 else f"{name}*{count}" for name, count in self.tried.missing)
            instead = " or ".join(mig.text(names) for names in self.instead)
            return [("missing", f"{missing}: {self.tried.why}"), ("instead", instead)]
        more = [name for name in self.joinable if name not in self.tried.fitting]
        return [("or", f"{', '.join(more)}, when all partitions are placed anew")] if more else []

    @property
    def instead(self) -> tuple[tuple[str, ...], ...]:
        """The nearest combinations of profiles that have a placement."""
        if not self.tried.missing:
            return ()
        wanted = Counter(placement.profile for placement in self.tried.layout)
        return mig.nearest(wanted + Counter(dict(self.tried.missing)), self.picture.geometry)

    @property
    def joinable(self) -> tuple[str, ...]:
        """The profiles of which one more can be declared."""
        if self.tried.missing:
            return ()
        held = [part.name for part in mig.parts(self.tried.layout)]
        return mig.joinable(held, self.picture.geometry) if held else self.tried.fitting


def shown_layouts(named: NamedGpu) -> list[Shown]:
    declared = named.declared
    if isinstance(declared, mig.PerGpu):
        if named.count not in (None, len(declared.layouts)):
            given = f"{counted(len(declared.layouts), 'layout')} for {counted(named.count, 'GPU')}"
            raise InvalidLayout("each GPU needs its own layout", given=given)
        each_gpu: Sequence[str | None] = declared.layouts
    else:
        if named.count is None or named.count > _DRAWN:
            every = f", each of {counted(named.count, 'GPU')}" if named.count else ""
            return [_one(f"{named.name}{every}: {_word(declared)}", declared, named.geometry)]
        each_gpu = [declared] * named.count
    return [
        _one(f"{named.name}, GPU {index}: {_word(layout)}", layout, named.geometry)
        for index, layout in enumerate(each_gpu)
    ]


def _one(title: str, declared: str | None, geometry: mig.Geometry) -> Shown:
    if declared is None or mig.is_off(declared):
        empty = mig.picture((), geometry)
        return Shown(title, mig.Attempt((), (), "", empty.fitting), empty)
    tried = mig.attempt(declared, geometry)
    return Shown(title, tried, mig.picture(tried.layout, geometry, tried.missing))


def _word(declared: str | None) -> str:
    if declared is None:
        return "empty"
    return "a whole GPU, without partitions" if mig.is_off(declared) else declared


def layouts_document(named: NamedGpu, shown: list[Shown]) -> dict[str, Any]:
    return {
        "accelerator": named.name,
        "model": named.geometry.model,
        "declared": None if named.declared is None else str(named.declared),
        "fits": not any(each.tried.missing for each in shown),
        "gpus": [_gpu(each) for each in shown],
    }


def _gpu(shown: Shown) -> dict[str, Any]:
    picture = shown.picture
    geometry = picture.geometry
    return {
        "partitions": [
            {
                "profile": segment.profile.name,
                "start": segment.start,
                "size": segment.size,
                "memory_gb": segment.profile.memory_gb,
                "memory_slices": segment.profile.memory_slices,
                "compute_slices": segment.profile.compute_slices,
                "sm": segment.profile.sm,
                "expected": segment.profile.expected,
                **({"compute": [asdict(each) for each in segment.compute]} if segment.compute else {}),
            }
            for segment in picture.segments
            if segment.profile
        ],
        "free": [{"start": s.start, "size": s.size} for s in picture.segments if s.profile is None],
        "compute_slices": {"used": picture.compute_used, "total": geometry.compute_slices},
        "memory_slices": {"used": picture.memory_used, "total": geometry.memory_slices},
        "fitting": list(picture.fitting),
        "joinable": list(shown.joinable),
        "min_driver": mig.required_driver((profile.name for profile in picture.placed), geometry),
        "missing": dict(shown.tried.missing),
        "why": shown.tried.why or None,
        "instead": [mig.text(names) for names in shown.instead],
    }


def totals(name: str, placed: int, combinations: int, maximal: int) -> list[str]:
    """Returns what is counted in the table of layouts."""
    return [
        f"{placed} layouts of {name} (the sum of PLACEMENTS) beside whose partitions nothing more fits: "
        f"{combinations} combinations of profiles (the rows), each in one or more placements.",
        f"{maximal} maximal combinations among them: nothing can be added, however they are placed.",
    ]


def layout_table(placed: Sequence[mig.Layout], maximal: Sequence[Sequence[str]], geometry: mig.Geometry) -> Table:
    ways: dict[tuple[str, ...], list[mig.Layout]] = {}
    for layout in placed:
        ways.setdefault(mig.multisets([layout], geometry)[0], []).append(layout)
    made = tables.table(
        *("LAYOUT", "PARTITIONS", "MEMORY", "COMPUTE SLICES", "PLACEMENTS", "DRIVER"),
        leave_out=("DRIVER", "PARTITIONS", "COMPUTE SLICES"),
        sentences=("LAYOUT",),
    )
    for names in mig.multisets(placed, geometry):
        shown = mig.picture(ways[names][0], geometry)
        made.add_row(
            mig.text(names) + ("" if names in maximal else " (more fits when placed otherwise)"),
            str(len(names)),
            f"{shown.memory_used_gb} GB",
            f"{shown.compute_used} of {geometry.compute_slices}",
            str(len(ways[names])),
            mig.required_driver(names, geometry) or "unknown",
        )
    return made


def profile_names(geometry: mig.Geometry, every: bool) -> tuple[str, ...]:
    return tuple(profile.name for profile in geometry.profiles) if every else mig.plain_profiles(geometry)


def gpu_names(geometries: Iterable[mig.Geometry]) -> dict[str, str]:
    """Returns by model the shortest accelerator string that means it; of one that none means, the key itself."""
    found: dict[str, list[str]] = {each.model: [] for each in geometries}
    for variant in (variant for name in catalog.names() for variant in catalog.variants(name)):
        size, form = f"{variant.name}-{variant.memory_gb}GB", f"-{variant.form_factor}" if variant.form_factor else ""
        for text in (variant.name, f"{variant.name}{form}", size, f"{size}{form}"):
            if variant.mig_model in found and _model(text) == variant.mig_model:
                found[variant.mig_model].append(text)
    return {model: min(texts, key=len, default=model) for model, texts in found.items()}


def _model(text: str) -> str | None:
    with suppress(SkyinfraError):
        return read_gpu(text).geometry.model
    return None
