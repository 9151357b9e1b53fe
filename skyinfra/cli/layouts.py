"""``skyinfra mig show | check | plan | advise | profiles | layouts | gallery``: drawings, lists and advice."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

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
from skyinfra.terminal.layouts import (
    gpu_names,
    layout_table,
    layouts_document,
    profile_names,
    read_gpu,
    shown_layouts,
    totals,
)
from skyinfra.terminal.progress import deployed

_SOURCES = ("name", "profile_id", "starts")


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


@app.command()
def show(
    accelerator: Gpu, layout: LayoutText = None, svg: Picture = None, as_json: Json = False, wide: Wide = False
) -> None:
    """Draw a layout: partitions, memory, SMs, free room. One that is impossible is drawn as far as it goes (exit 2)."""
    named = read_gpu(accelerator, layout)
    shown = shown_layouts(named)
    if svg is not None:
        text = mig.svg([(each.title, each.picture, each.notes) for each in shown])
        with written(InvalidField, "--svg", str(svg)):
            svg.write_text(text, encoding="utf-8")
    if as_json:
        tables.print_document(layouts_document(named, shown))
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
    shown = shown_layouts(named)
    impossible = [each for each in shown if each.tried.missing]
    out = tables.console()
    for each in impossible:
        out.print(layout_text(each.title, each.picture, each.notes, out.width), soft_wrap=True)
    for each in shown if driver else ():
        mig.check_driver(each.tried.layout, named.geometry, driver or "")
    if impossible:
        raise typer.Exit(1)
    tables.print_document(layouts_document(named, shown))


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
    profiles = profile_names(geometry, all_profiles)
    placed = mig.maximal_layouts(geometry, profiles, driver=driver)
    maximal = mig.maximal_multisets(geometry, profiles, driver=driver)
    if not as_json:
        out = tables.console()
        table = layout_table(placed, maximal, geometry)
        out.print(table)
        for line in totals(named.name, len(placed), table.row_count, len(maximal)):
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
    home: Annotated[str | None, typer.Option(metavar="URL", help="A page that all of them lead back to.")] = None,
) -> None:
    """Write a page for each GPU model. It has a drawing of every layout beside which nothing more fits."""
    geometries = list(dict.fromkeys(read_gpu(each).geometry for each in accelerators or ())) or _drawn(expected)
    profiles = {each.model: profile_names(each, all_profiles) for each in geometries}
    above = None if home is None else (home, "Home")
    pages = gallery.pages(geometries, profiles, gpu_names(geometries), home=above)
    with written(InvalidField, "--out", str(out)):
        out.mkdir(parents=True, exist_ok=True)
        for name, page in pages.items():
            (out / name).write_text(page, encoding="utf-8")
    tables.console().print(f"{counted(len(geometries), 'page')} and index.html written to {out}", markup=False)


def _drawn(expected: bool) -> list[mig.Geometry]:
    """Returns the GPU models with known places; without *expected* those where every one was seen."""
    known = [each for each in map(mig.geometry, mig.models()) if each.profiles and all(p.starts for p in each.profiles)]
    return [each for each in known if expected or not any(profile.expected for profile in each.profiles)]
