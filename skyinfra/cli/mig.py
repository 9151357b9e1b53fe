"""``skyinfra mig``: MIG profiles and layouts. No command changes a device."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

from skyinfra.cli.options import (
    Commands,
    Fleet,
    InRegion,
    Json,
    OfProviders,
    Wide,
    complete_accelerators,
    complete_layout,
    errors_name_options,
)

app = typer.Typer(cls=Commands, help="MIG: profiles and layouts of GPUs, without changing one.", no_args_is_help=True)

# typer reads these annotations at run time.
Gpu = Annotated[
    str,
    typer.Argument(
        metavar="ACCELERATOR",
        help='Such as "H100", "A100-40GB" or "h100_80gb".',
        autocompletion=complete_accelerators,
    ),
]
LayoutText = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="LAYOUT",
        help='Such as "3g.40gb+2g.20gb+1g.10gb*2"; one profile fills a GPU.',
        autocompletion=complete_layout,
    ),
]
Driver = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="VERSION", help='Of the node, such as "535.161.07" or "R510".'),
]
AllProfiles = Annotated[
    bool, typer.Option("--all-profiles", help="Also profiles with double memory, +me, +gfx and the like.")
]


class ExportFormat(StrEnum):
    """For whom a layout is printed."""

    parted = "mig-parted"
    manager = "mig-manager"
    gres = "gres"
    plugin = "device-plugin"


@app.command()
def show(
    accelerator: Gpu,
    layout: LayoutText = None,
    svg: Annotated[Optional[Path], typer.Option(help="Write the picture to this file.")] = None,  # noqa: UP045
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Draw a layout: partitions, memory, SMs, free room. One that is impossible is drawn as far as it goes (exit 2)."""
    from skyinfra.cli.layouts import show_layout

    raise typer.Exit(show_layout(accelerator, layout, svg=svg, as_json=as_json))


@app.command()
def check(accelerator: Gpu, layout: LayoutText = None, driver: Driver = None) -> None:
    """Print the placements of a layout, or why it has none. As JSON with exit code 0, or drawn with 1."""
    from skyinfra.cli.layouts import check_layout

    raise typer.Exit(check_layout(accelerator, layout, driver=driver))


@app.command()
def profiles(accelerator: Gpu, as_json: Json = False, wide: Wide = False) -> None:
    """List the profiles of a GPU."""
    from skyinfra.cli.layouts import show_profiles

    show_profiles(accelerator, as_json=as_json)


@app.command()
def layouts(
    accelerator: Gpu,
    all_profiles: AllProfiles = False,
    driver: Driver = None,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """List the layouts of a GPU beside which nothing more fits."""
    from skyinfra.cli.layouts import show_layouts

    show_layouts(accelerator, every_profile=all_profiles, driver=driver, as_json=as_json)


@app.command()
def plan(
    fleet: Fleet,
    layout: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="LAYOUT", help='The declared one where it is left out; "off" for whole GPUs.'),
    ] = None,
    svg: Annotated[Optional[Path], typer.Option(help="Write the picture to this file.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """Show what another layout does to a running fleet. It says what stays, goes and comes, and which tasks end."""
    from skyinfra.cli.layouts import plan_layout

    plan_layout(fleet, layout, svg=svg, as_json=as_json)


@app.command()
def advise(
    fleet: Fleet,
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the tasks to this file as well, CSV, as `sky.mig.advise` reads it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Recommend a fixed layout, from the tasks that ran on a fleet: what they used, how long they waited."""
    from skyinfra.cli.layouts import show_advice

    show_advice(fleet, save=save, as_json=as_json)


@app.command()
def gallery(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the pages; made where it is not there.")],
    accelerators: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[ACCELERATOR]...", help="Only these; else those whose placements were seen."),
    ] = None,
    all_profiles: AllProfiles = False,
    expected: Annotated[
        bool, typer.Option("--expected", help="Also GPUs whose placements follow from the driver's source alone.")
    ] = False,
) -> None:
    """Write a page for each GPU model. It has a drawing of every layout beside which nothing more fits."""
    from skyinfra.cli.layouts import write_gallery

    write_gallery(out, accelerators, every_profile=all_profiles, expected=expected)


@app.command()
def pack(
    demand: Annotated[str, typer.Argument(metavar="DEMAND", help='Such as "1g.10gb*20, 3g.40gb*4, >=18GB*6".')],
    provider: OfProviders = None,
    region: InRegion = None,
    spot: Annotated[bool, typer.Option("--spot", help="At spot prices.")] = False,
    max_nodes: Annotated[Optional[int], typer.Option(metavar="N", help="Machines, at most.")] = None,  # noqa: UP045
    exact: Annotated[bool, typer.Option("--exact", help="No larger profile may serve for a named one.")] = False,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Find the cheapest machines that hold so many partitions. With their layouts, and the pools that declare them."""
    from skyinfra.cli.pack import show_packing

    with errors_name_options():
        show_packing(
            demand, provider=provider, region=region, spot=spot, max_nodes=max_nodes, exact=exact, as_json=as_json
        )


@app.command()
def export(
    accelerator: Annotated[str, typer.Argument(metavar="ACCELERATOR", help='With its layout: "H100:8/3g.40gb".')],
    label: Annotated[str, typer.Option(help="Name of the configuration, for mig-parted.")] = "skyinfra",
    form: Annotated[ExportFormat, typer.Option("--format", help="For whom.")] = ExportFormat.parted,
) -> None:
    """Print a layout for mig-parted, mig-manager, Slurm or Kubernetes, whose device plugin is that of NVIDIA."""
    from skyinfra.cli import parted

    if form in (ExportFormat.parted, ExportFormat.manager):
        parted.export_parted(accelerator, label=label, manager=form == ExportFormat.manager)
    else:
        parted.export_for_cluster(accelerator, slurm=form == ExportFormat.gres)


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A configuration file of NVIDIA mig-parted, or a listing.")
    ],
    config: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="LABEL", help="Which of the file's configurations; without it, FILE is a listing."),
    ] = None,
    accelerator: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help='The GPUs of the node, such as "H100:8". Without it nothing is checked.'),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a layout of others as an accelerator string. From mig-parted's file, or `nvidia-smi mig -lgi`."""
    from skyinfra.cli import parted

    if config is None:
        parted.import_listing(file, accelerator=accelerator, as_json=as_json)
    else:
        parted.import_parted(file, label=config, accelerator=accelerator, as_json=as_json)
