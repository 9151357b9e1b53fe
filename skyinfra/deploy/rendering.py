"""Writes what plain Terraform needs of a pool: user data, inputs, its module; or a job of Slurm, or pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyinfra.bootstrap import Form, bundled, clusters, converted, runner_wheel, sizes, steps
from skyinfra.errors import InvalidField, NotSupported, ProjectError, at, written
from skyinfra.terraform.expressions import file_of, is_reference, plain
from skyinfra.terraform.synthesized import SynthesizedStack

_USER_DATA = {"user_data_head": "head", "user_data_worker": "worker"}
_UP = "../../../"
# Arguments of the call of a module that are no inputs.
_CALL = ("source", "providers", "version", "depends_on", "for_each", "count")


def _inputs(stack: SynthesizedStack, pool: str, out: Path | None, form: Form | None) -> dict[str, Any]:
    """Returns the inputs of the pool's module, with user data of that *form*.

    Raises `NotSupported` for outputs of other constructs that would be written below *out*.
    """
    given = {key: value for key, value in stack.modules[pool].items() if key not in _CALL}
    if out is not None and (outputs := [key for key, value in given.items() if is_reference(value)]):
        raise NotSupported(
            "no file of variables holds outputs of other constructs, which Terraform alone knows",
            field=f"{stack.name}/{pool}",
            given=", ".join(outputs),
            hint="Declare their values, or deploy the stack as it is.",
        )
    inputs = {key: _declared(stack, value) for key, value in given.items()}
    if inputs.get("runner_file"):
        # It is written beside the variables.
        inputs["runner_file"] = Path(inputs["runner_file"]).name
    for key in _USER_DATA:
        if form is not None and inputs.get(key):
            with at(f"{stack.name}/{pool}", InvalidField):
                inputs[key] = converted(str(inputs[key]), form)
    return inputs


def module_files(stack: SynthesizedStack, pool: str, out: Path | None, form: Form | None) -> list[dict[str, Any]]:
    """Writes a folder that Terraform applies as it is: the module, its variables, and the provider's configuration."""
    source, name = stack.folder / str(stack.modules[pool]["source"]), f"{stack.name}-{pool}"
    # Paths were relative to the synthesized stack, three folders below the project.
    inputs = {
        key: value.removeprefix(_UP) if isinstance(value, str) else value
        for key, value in _inputs(stack, pool, out, form).items()
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


def pool_files(stack: SynthesizedStack, pool: str, out: Path | None, form: Form | None) -> list[dict[str, Any]]:
    inputs = _inputs(stack, pool, out, form)
    texts = {}
    for key, role in _USER_DATA.items():
        text = str(inputs.get(key) or "")
        kind = "yaml" if text.startswith("#cloud-config") else "sh" if text.startswith("#!") else "json"
        if text:
            texts[f"{stack.name}-{pool}.{role}.{kind}"] = text
    texts[f"{stack.name}-{pool}.tfvars.json"] = _json(inputs).decode()
    rows = _runner(stack, pool, out)
    for name, text in texts.items():
        parts = {} if name.endswith(".json") else sizes(text)
        total = parts.pop("total", None)
        rows.append(_row(stack, pool, out, name, text.encode()) | {"compressed": total, "parts": parts})
    return rows


def cluster_files(
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
        write_file(file, content)
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


def write_file(file: Path, content: bytes) -> None:
    with written(ProjectError, str(file)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
