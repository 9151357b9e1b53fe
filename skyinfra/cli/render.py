"""``skyinfra render``: the inputs of a stack's modules, for plain Terraform; its pools for Slurm and Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from skyinfra.bootstrap import FORMS, Form, bundled, clusters, converted, runner_wheel, steps
from skyinfra.bootstrap import sizes as sizes_of
from skyinfra.cli.options import Json, Wide
from skyinfra.cli.stacks import show_differing
from skyinfra.errors import InvalidField, NotSupported, ProjectError, at, written
from skyinfra.providers import read
from skyinfra.terminal import tables
from skyinfra.terminal.progress import synthesized
from skyinfra.terraform.expressions import file_of, plain
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack

_USER_DATA = {"user_data_head": "head", "user_data_worker": "worker"}
_UP = "../../../"
# Arguments of the call of a module that are no inputs.
_CALL = ("source", "providers", "version", "depends_on", "for_each", "count")


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
    if cluster is not None:
        rows = [row for each in selected for pool in each.modules for row in _on_cluster(each, pool, out, cluster)]
    elif module:
        rows = [row for each in selected for pool in each.modules for row in _module(each, pool, out, wanted)]
    else:
        rows = [row for each in selected for pool in each.modules for row in _pool(each, pool, out, wanted)]
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
    _write(file, wheel.content)
    if as_json:
        tables.print_document({"file": str(file), "sha256": wheel.sha256})
        return
    out = tables.console()
    out.print(f"{file}: put it where the nodes reach it, and declare", soft_wrap=True)
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


def _inputs(stack: SynthesizedStack, pool: str, form: Form | None) -> dict[str, Any]:
    """Returns the inputs of the pool's module, with user data of that *form*."""
    inputs = {key: _declared(stack, value) for key, value in stack.modules[pool].items() if key not in _CALL}
    if inputs.get("runner_file"):
        # It is written beside the variables.
        inputs["runner_file"] = Path(inputs["runner_file"]).name
    for key in _USER_DATA:
        if form is not None and inputs.get(key):
            with at(f"{stack.name}/{pool}", InvalidField):
                inputs[key] = converted(str(inputs[key]), form)
    return inputs


def _module(stack: SynthesizedStack, pool: str, out: Path | None, form: Form | None) -> list[dict[str, Any]]:
    """Writes a folder that Terraform applies as it is: the module, its variables, and the provider's configuration."""
    source, name = stack.folder / str(stack.modules[pool]["source"]), f"{stack.name}-{pool}"
    # Paths were relative to the synthesized stack, three folders below the project.
    inputs = {
        key: value.removeprefix(_UP) if isinstance(value, str) else value
        for key, value in _inputs(stack, pool, form).items()
    }
    # Terraform begins in the module itself, so those that it calls stand below it.
    own, *called = bundled.modules([source.name], source.parent)
    files = {path.relative_to(own): path.read_bytes().replace(b'"../', b'"./') for path in _files(own)}
    files |= {path.relative_to(own.parent): path.read_bytes() for module in called for path in _files(module)}
    files[Path("terraform.tfvars.json")] = _json(inputs)
    if configuration := stack.configuration(pool):
        provider = next(iter(stack.modules[pool]["providers"]))
        given = {key: value for key, value in configuration.items() if key != "alias"}
        files[Path("provider.tf.json")] = _json({"provider": {provider: given}})
    rows = [_row(stack, pool, out, str(Path(name) / path), content) for path, content in files.items()]
    return [*rows, *_runner(stack, pool, out / name if out else None)]


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _pool(stack: SynthesizedStack, pool: str, out: Path | None, form: Form | None) -> list[dict[str, Any]]:
    inputs = _inputs(stack, pool, form)
    texts = {}
    for key, role in _USER_DATA.items():
        text = str(inputs.get(key) or "")
        kind = "yaml" if text.startswith("#cloud-config") else "sh" if text.startswith("#!") else "json"
        if text:
            texts[f"{stack.name}-{pool}.{role}.{kind}"] = text
    texts[f"{stack.name}-{pool}.tfvars.json"] = _json(inputs).decode()
    rows = _runner(stack, pool, out)
    for name, text in texts.items():
        parts = {} if name.endswith(".json") else sizes_of(text)
        total = parts.pop("total", None)
        rows.append(_row(stack, pool, out, name, text.encode()) | {"compressed": total, "parts": parts})
    return rows


def _on_cluster(
    stack: SynthesizedStack, pool: str, out: Path | None, cluster: clusters.Cluster
) -> list[dict[str, Any]]:
    """Writes the pool as a job or as pods, and the runner that its nodes install."""
    inputs = {key: _declared(stack, value) for key, value in stack.modules[pool].items() if key not in _CALL}
    described = next(each for each in stack.pools if each["name"] == pool)
    with at(f"{stack.name}/{pool}", NotSupported):
        found = clusters.declared(stack.name, inputs, described, python=steps.versions()["python"])
        wheel = None if found.runner else runner_wheel.wheel()
        name, text = clusters.render(found, cluster, wheel=wheel.name if wheel else None)
    rows = [_row(stack, pool, out, name, text.encode())]
    if wheel is not None:
        rows.append(_row(stack, pool, out, wheel.name, runner_wheel.compressed(wheel)))
    return rows


def _row(stack: SynthesizedStack, pool: str, out: Path | None, name: str, content: bytes) -> dict[str, Any]:
    """Writes *content* to the file *name* below *out*, if that is given."""
    file = (out or Path()) / name
    if out is not None:
        _write(file, content)
    return {
        "fleet": f"{stack.name}/{pool}",
        "file": str(file),
        "bytes": len(content),
        "compressed": None,
        "parts": {},
    }


def _declared(stack: SynthesizedStack, value: Any) -> Any:
    """Returns an input as it was before the stack was synthesized."""
    carried = file_of(value)
    return plain(value) if carried is None else (stack.folder / carried).read_bytes().decode()


def _runner(stack: SynthesizedStack, pool: str, out: Path | None) -> list[dict[str, Any]]:
    """Writes the runner that the module hands to the nodes, where there is one."""
    if not (carried := stack.modules[pool].get("runner_file")):
        return []
    return [_row(stack, pool, out, Path(carried).name, (stack.folder / carried).read_bytes())]


def _write(file: Path, content: bytes) -> None:
    with written(ProjectError, str(file)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
