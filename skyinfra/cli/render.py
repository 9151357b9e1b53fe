"""``skyinfra render``: the inputs of a stack's modules, for plain Terraform; its pools for Slurm and Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from skyinfra.bootstrap import FORMS, Form, clusters, runner_wheel
from skyinfra.cli.options import Json, Wide
from skyinfra.cli.stacks import show_differing
from skyinfra.deploy.rendering import cluster_files, module_files, pool_files, write_file
from skyinfra.errors import InvalidField
from skyinfra.providers import read
from skyinfra.terminal import tables
from skyinfra.terminal.progress import synthesized
from skyinfra.terraform.project import Project

app = typer.Typer()


@app.command()
def render(
    project: Annotated[Path, typer.Argument(help="The project's folder.")] = Path(),
    stack: Annotated[str | None, typer.Option(help="Only of this stack.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the files there.")] = None,
    runner: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write nothing but the runner of this skyinfra, a wheel, and say its hash."),
    ] = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="Show what takes the room in the user data.")] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Of the user data: cloud-config, script or container, whatever the provider takes. sbatch or "
            "kubernetes: the pools as jobs of Slurm, or as pods.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", help="Write a folder for each pool, with its module, for `terraform apply`.")
    ] = False,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Write what plain Terraform needs: user data and module inputs. Or a pool as a job of Slurm, or as pods."""
    if runner is not None:
        write_runner(runner, as_json=as_json)
        return
    cluster = next((each for each in clusters.CLUSTERS if each == form), None)
    wanted = None if cluster else _form(form)
    if out is None and not sizes:
        raise InvalidField(
            "nothing to do", field="skyinfra render", hint="Give --out DIR to write, or --sizes to look."
        )
    if module and (out is None or cluster is not None):
        raise InvalidField("needs --out DIR, and takes no job or pods", field="--module")
    declared = Project.find(project)
    found = synthesized(declared)
    selected = (declared.stack(stack, stacks=found),) if stack else found
    # Modules beside them are of other constructs.
    pools = [(each, pool["name"]) for each in selected for pool in each.pools]
    if cluster is not None:
        rows = [row for each, pool in pools for row in cluster_files(each, pool, out, cluster)]
    elif module:
        rows = [row for each, pool in pools for row in module_files(each, pool, out, wanted)]
    else:
        rows = [row for each, pool in pools for row in pool_files(each, pool, out, wanted)]
    if as_json:
        tables.print_document({"files": rows})
        return
    made = tables.table("POOL", "FILE", "BYTES", "COMPRESSED", leave_out=("COMPRESSED",), sentences=("FILE",))
    for row in rows:
        made.add_row(row["fleet"], row["file"], str(row["bytes"]), str(row["compressed"] or ""))
        for path, size in (row["parts"] if sizes else {}).items():
            made.add_row("", f"  {path}", "", str(size))
    tables.console().print(made)
    show_differing()
    if cluster is not None:
        return
    for kind in sorted({pool["provider"] for each in selected for pool in each.pools}):
        boot = read(kind).boot
        if boot.limit is not None:
            packed = ", compressed" if boot.gzip else ""
            tables.console().print(f"{read(kind).about.called} takes {boot.limit} bytes of user data{packed}.")


def write_runner(folder: Path, *, as_json: bool) -> None:
    """Writes the runner of this skyinfra into *folder*, for nodes that fetch it themselves."""
    wheel = runner_wheel.wheel()
    file = folder / wheel.name
    write_file(file, wheel.content)
    if as_json:
        tables.print_document({"file": str(file), "sha256": wheel.sha256})
        return
    out = tables.console()
    tables.say(f"{file}: put it where the nodes reach it, and declare")
    out.print(
        escape(f'image=sky.Image(runner="https://HOST/{wheel.name}#sha256={wheel.sha256}")'),
        soft_wrap=True,
        highlight=False,
    )


def _form(name: str | None) -> Form | None:
    found = next((form for form in FORMS if form == name), None)
    if name is not None and found is None:
        known = ", ".join((*FORMS, *clusters.CLUSTERS))
        raise InvalidField("no such form", field="--format", given=name, hint=f"One of {known}.")
    return found
