"""``skyinfra mig show | check | plan | advise | profiles | layouts | gallery``: drawings, lists and advice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from skyinfra import mig
from skyinfra.accelerators import Accelerator, grammar
from skyinfra.deploy.advice import advice
from skyinfra.deploy.transitions import transition
from skyinfra.errors import InvalidField, InvalidLayout, counted
from skyinfra.mig import gallery
from skyinfra.mig.drawing import EXPECTED
from skyinfra.protocol.manifest import Manifest
from skyinfra.terminal import advice as terminal_advice
from skyinfra.terminal import tables
from skyinfra.terminal.drawing import layout_text, show_transition, write_svg
from skyinfra.terminal.progress import every_stack
from skyinfra.terraform.project import Project

_SOURCES = ("name", "profile_id", "starts")

# As many GPUs as a machine has are drawn one by one; what is said of more is drawn once.
_DRAWN = 16

# A comma between two profiles; one within a name is followed by a letter.
_COMMA = re.compile(r"\s*,(?=\s*[\d>])")


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


def show_layout(accelerator: str, layout: str | None, *, svg: Path | None, as_json: bool) -> int:
    """Draws it. Returns the exit code: 2 where a layout has no placement."""
    named = read_gpu(accelerator, layout)
    shown = _shown(named)
    if svg is not None:
        _write(svg, mig.svg([(each.title, each.picture, each.notes) for each in shown]))
    if as_json:
        tables.print_document(_document(named, shown))
    else:
        out = tables.console()
        for each in shown:
            out.print(layout_text(each.title, each.picture, each.notes, out.width), soft_wrap=True)
        if svg is not None:
            out.print(f"written to {escape(str(svg))}")
    return 2 if any(each.tried.missing for each in shown) else 0


def check_layout(accelerator: str, layout: str | None, *, driver: str | None) -> int:
    """Prints the placements as JSON, or the drawing of how far it got. Returns the exit code: 1 without a placement.

    Raises DriverTooOld where *driver* does not offer the layout.
    """
    named = read_gpu(accelerator, layout)
    if named.declared is None:
        raise InvalidLayout("there is no layout to check", hint='Write it behind the accelerator: H100 "3g.40gb*2".')
    shown = _shown(named)
    impossible = [each for each in shown if each.tried.missing]
    out = tables.console()
    for each in impossible:
        out.print(layout_text(each.title, each.picture, each.notes, out.width), soft_wrap=True)
    for each in shown if driver else ():
        mig.check_driver(each.tried.layout, named.geometry, driver or "")
    if not impossible:
        tables.print_document(_document(named, shown))
    return 1 if impossible else 0


def plan_layout(fleet: str, layout: str | None, *, svg: Path | None, as_json: bool) -> None:
    """Prints what *layout*, else the declared one, does to the running fleet ``STACK/POOL``. Changes nothing.

    Raises `InvalidField` for a pool without accelerators, what reading and placing a layout raises, and `FleetError`.
    """
    manifest, pool, accelerator = _deployed(fleet)
    if layout is not None:
        accelerator = accelerator.with_(mig=None if mig.is_off(layout) else grammar.read_layout(layout))
    found = transition(manifest, accelerator, pool.get("drain_seconds", 600.0))
    if svg is not None:
        write_svg(svg, found)
    if as_json:
        tables.print_document(found.to_json())
        return
    show_transition(found)
    if svg is not None:
        tables.console().print(f"written to {svg}", markup=False)


def show_advice(fleet: str, *, save: Path | None, as_json: bool) -> None:
    """Prints the fixed layout under which the tasks that ran on the fleet ``STACK/POOL`` would have waited least.

    save: a file for the trace of those tasks. Raises `TooLittleMeasured`, and as plan_layout().
    """
    manifest, _, accelerator = _deployed(fleet)
    with tables.console(to_stderr=True).status("asking the fleet, and trying layouts ..."):
        found = advice(manifest, accelerator)
    if save is not None:
        mig.write_trace(save, found.trace)
    if as_json:
        tables.print_document(found.to_json())
    else:
        terminal_advice.show(found)


def _deployed(fleet: str) -> tuple[Manifest, dict[str, Any], Accelerator]:
    """The manifest of the fleet ``STACK/POOL``, its pool as compiled, and the accelerators of a node as declared.

    Raises `InvalidField` for a pool without accelerators, and `FleetError`.
    """
    name, _, pool_name = fleet.partition("/")
    project = Project.find()
    stack = project.stack(name, stacks=every_stack(project))
    manifest = stack.fleet(pool_name or stack.only_pool)
    pool = next((each for each in stack.pools if each["name"] == manifest.pool), {})
    if not pool.get("accelerator"):
        raise InvalidField("no accelerators are declared for this pool", given=fleet)
    return manifest, pool, Accelerator.parse(pool["accelerator"]).with_(count=pool["accelerators_per_node"])


def show_profiles(accelerator: str, *, as_json: bool) -> None:
    """Lists the profiles of a GPU."""
    geometry = read_gpu(accelerator).geometry
    if as_json:
        fields = asdict(geometry)
        named = [
            {**row, "attributes": profile.attributes, "sources": dict(zip(_SOURCES, profile.sources, strict=True))}
            for row, profile in zip(fields.pop("profiles"), geometry.profiles, strict=True)
        ]
        tables.print_document({**fields, "profiles": named})
        return
    made = tables.table(
        *("PROFILE", "MEMORY", "COMPUTE SLICES", "SM", "AT MOST", "SIZE", "STARTS AT"),
        leave_out=("SM", "SIZE"),
        sentences=("STARTS AT",),
    )
    for profile in geometry.profiles:
        starts = "unknown" if profile.starts is None else " ".join(map(str, profile.starts))
        made.add_row(
            profile.name,
            f"{profile.memory_gb} GB",
            str(profile.compute_slices),
            tables.known(profile.sm),
            tables.known(profile.max_count),
            tables.known(profile.size),
            starts + (" (expected)" if profile.expected else ""),
        )
    out = tables.console()
    out.print(f"{geometry.model}: {', '.join(geometry.products)}; driver {geometry.min_driver or 'unknown'} or later")
    out.print(made)


def show_layouts(accelerator: str, *, every_profile: bool, driver: str | None, as_json: bool) -> None:
    """Lists the layouts of a GPU beside which nothing more fits."""
    named = read_gpu(accelerator)
    geometry = named.geometry
    profiles = tuple(p.name for p in geometry.profiles) if every_profile else mig.plain_profiles(geometry)
    placed = mig.maximal_layouts(geometry, profiles, driver=driver)
    maximal = mig.maximal_multisets(geometry, profiles, driver=driver)
    if not as_json:
        out = tables.console()
        table = _layout_table(placed, maximal, geometry)
        out.print(table)
        for line in _totals(named.name, len(placed), table.row_count, len(maximal)):
            out.print(line, soft_wrap=True)
        if any(geometry.profile(name).expected for name in profiles):
            out.print(EXPECTED)
        return
    every = mig.multisets(mig.layouts(geometry, profiles, driver=driver), geometry)
    tables.print_document(
        {
            "accelerator": named.name,
            "model": geometry.model,
            "profiles": list(profiles),
            "placements": [
                [{**tables.place(each), "expected": geometry.profile(each.profile).expected} for each in layout]
                for layout in placed
            ],
            "multisets": [mig.text(names) for names in every],
            "maximal": [mig.text(names) for names in maximal],
        }
    )


def write_gallery(out: Path, accelerators: Sequence[str] | None, *, every_profile: bool, expected: bool) -> None:
    """Writes a page for each GPU model into the folder *out*, and one that lists them.

    accelerators: only these; without any, the models whose places were seen, with *expected* also those where they
    follow from the driver's source. every_profile: also with double memory, +me, +gfx and the like. Raises what reading
    an accelerator raises, MigNotSupported, and InvalidField for a folder that cannot be written.
    """
    geometries = list(dict.fromkeys(read_gpu(each).geometry for each in accelerators or ())) or _drawn(expected)
    pages = {"index.html": gallery.index(geometries)}
    for each in geometries:
        profiles = tuple(p.name for p in each.profiles) if every_profile else mig.plain_profiles(each)
        pages[f"{each.model}.html"] = gallery.page(each, profiles)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, page in pages.items():
            (out / name).write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidField(f"cannot be written: {error.strerror}", field="--out", given=str(out)) from None
    tables.console().print(f"{counted(len(geometries), 'page')} and index.html written to {out}", markup=False)


def _drawn(expected: bool) -> list[mig.Geometry]:
    """Returns the GPU models with known places; without *expected* those where every one was seen."""
    known = [each for each in map(mig.geometry, mig.models()) if each.profiles and all(p.starts for p in each.profiles)]
    return [each for each in known if expected or not any(profile.expected for profile in each.profiles)]


def _totals(name: str, placed: int, combinations: int, maximal: int) -> list[str]:
    """Returns what is counted in the table of layouts."""
    return [
        f"{placed} layouts of {name} (the sum of PLACEMENTS) beside whose partitions nothing more fits: "
        f"{combinations} combinations of profiles (the rows), each in one or more placements.",
        f"{maximal} maximal combinations among them: nothing can be added, however they are placed.",
    ]


def _layout_table(placed: Sequence[mig.Layout], maximal: Sequence[Sequence[str]], geometry: mig.Geometry) -> Table:
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


def _shown(named: NamedGpu) -> list[Shown]:
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


def _word(declared: str | None) -> str:
    if declared is None:
        return "empty"
    return "a whole GPU, without partitions" if mig.is_off(declared) else declared


def _one(title: str, declared: str | None, geometry: mig.Geometry) -> Shown:
    if declared is None or mig.is_off(declared):
        empty = mig.picture((), geometry)
        return Shown(title, mig.Attempt((), (), "", empty.fitting), empty)
    tried = mig.attempt(declared, geometry)
    return Shown(title, tried, mig.picture(tried.layout, geometry, tried.missing))


def _document(named: NamedGpu, shown: list[Shown]) -> dict[str, Any]:
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


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidField(f"cannot be written: {error.strerror}", field="--svg", given=str(file)) from None
