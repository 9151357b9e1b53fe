"""``skyinfra mig show | check | plan | advise | profiles | layouts | gallery``: drawings, lists and advice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from skyinfra import mig
from skyinfra.accelerators import Accelerator, grammar
from skyinfra.cli.options import Fleet, Json, Wide, names_of
from skyinfra.deploy.advice import advice
from skyinfra.deploy.transitions import transition
from skyinfra.errors import InvalidField, InvalidLayout, counted, written
from skyinfra.mig import gallery
from skyinfra.mig.drawing import EXPECTED
from skyinfra.protocol.manifest import Manifest
from skyinfra.terminal import advice as terminal_advice
from skyinfra.terminal import tables
from skyinfra.terminal.drawing import layout_text, show_transition, write_svg
from skyinfra.terminal.progress import deployed

_SOURCES = ("name", "profile_id", "starts")

# As many GPUs as a machine has are drawn one by one; what is said of more is drawn once.
_DRAWN = 16

# A comma between two profiles; one within a name is followed by a letter.
_COMMA = re.compile(r"\s*,(?=\s*[\d>])")


app = typer.Typer()
Gpu = Annotated[
    str,
    typer.Argument(
        metavar="ACCELERATOR",
        help='Such as "H100", "A100-40GB" or "h100_80gb".',
        autocompletion=names_of("accelerators"),
    ),
]
LayoutText = Annotated[
    str | None,
    typer.Argument(
        metavar="LAYOUT",
        help='Such as "3g.40gb+2g.20gb+1g.10gb*2"; one profile fills a GPU.',
        autocompletion=names_of("layouts", "accelerator"),
    ),
]
Driver = Annotated[str | None, typer.Option(metavar="VERSION", help='Of the node, such as "535.161.07" or "R510".')]
Picture = Annotated[Path | None, typer.Option(help="Write the picture to this file.")]
AllProfiles = Annotated[
    bool, typer.Option("--all-profiles", help="Also profiles with double memory, +me, +gfx and the like.")
]


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
        held = [placement.profile for placement in self.tried.layout]
        return mig.joinable(held, self.picture.geometry) if held else self.tried.fitting


@app.command()
def show(
    accelerator: Gpu, layout: LayoutText = None, svg: Picture = None, as_json: Json = False, wide: Wide = False
) -> None:
    """Draw a layout: partitions, memory, SMs, free room. One that is impossible is drawn as far as it goes (exit 2)."""
    named = read_gpu(accelerator, layout)
    shown = _shown(named)
    if svg is not None:
        text = mig.svg([(each.title, each.picture, each.notes) for each in shown])
        with written(InvalidField, "--svg", str(svg)):
            svg.write_text(text, encoding="utf-8")
    if as_json:
        tables.print_document(_document(named, shown))
    else:
        out = tables.console()
        for each in shown:
            out.print(layout_text(each.title, each.picture, each.notes, out.width), soft_wrap=True)
        if svg is not None:
            out.print(f"written to {escape(str(svg))}")
    if any(each.tried.missing for each in shown):
        raise typer.Exit(2)


@app.command()
def check(accelerator: Gpu, layout: LayoutText = None, driver: Driver = None) -> None:
    """Print the placements of a layout, or why it has none. As JSON with exit code 0, or drawn with 1."""
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
    if impossible:
        raise typer.Exit(1)
    tables.print_document(_document(named, shown))


@app.command()
def plan(
    fleet: Fleet,
    layout: Annotated[
        str | None,
        typer.Argument(metavar="LAYOUT", help='The declared one where it is left out; "off" for whole GPUs.'),
    ] = None,
    svg: Picture = None,
    as_json: Json = False,
) -> None:
    """Show what another layout does to a running fleet. It says what stays, goes and comes, and which tasks end."""
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


@app.command()
def advise(
    fleet: Fleet,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the tasks to this file as well, CSV, as `sky.mig.advise` reads it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Recommend a fixed layout, from the tasks that ran on a fleet: what they used, how long they waited."""
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
    stack, manifest = deployed(fleet)
    pool = next((each for each in stack.pools if each["name"] == manifest.pool), {})
    if not pool.get("accelerator"):
        raise InvalidField("no accelerators are declared for this pool", given=fleet)
    return manifest, pool, Accelerator.parse(pool["accelerator"]).with_(count=pool["accelerators_per_node"])


@app.command()
def profiles(accelerator: Gpu, as_json: Json = False, wide: Wide = False) -> None:
    """List the profiles of a GPU."""
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


@app.command()
def layouts(
    accelerator: Gpu,
    all_profiles: AllProfiles = False,
    driver: Driver = None,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """List the layouts of a GPU beside which nothing more fits."""
    named = read_gpu(accelerator)
    geometry = named.geometry
    profiles = _profiles(geometry, all_profiles)
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


@app.command("gallery")
def write_gallery(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the pages; made where it is not there.")],
    accelerators: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ACCELERATOR]...", help="Only these; else those whose placements were seen."),
    ] = None,
    all_profiles: AllProfiles = False,
    expected: Annotated[
        bool, typer.Option("--expected", help="Also GPUs whose placements follow from the driver's source alone.")
    ] = False,
) -> None:
    """Write a page for each GPU model. It has a drawing of every layout beside which nothing more fits."""
    geometries = list(dict.fromkeys(read_gpu(each).geometry for each in accelerators or ())) or _drawn(expected)
    pages = {"index.html": gallery.index(geometries)}
    for each in geometries:
        pages[f"{each.model}.html"] = gallery.page(each, _profiles(each, all_profiles))
    with written(InvalidField, "--out", str(out)):
        out.mkdir(parents=True, exist_ok=True)
        for name, page in pages.items():
            (out / name).write_text(page, encoding="utf-8")
    tables.console().print(f"{counted(len(geometries), 'page')} and index.html written to {out}", markup=False)


def _profiles(geometry: mig.Geometry, every: bool) -> tuple[str, ...]:
    return tuple(profile.name for profile in geometry.profiles) if every else mig.plain_profiles(geometry)


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
