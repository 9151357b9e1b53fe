"""Synthesized stacks without cdktf: what FleetStack adds to a stack's JSON, written where a project keeps it.

For tests of what reads cdktf.out, where modules need not be there or the module of a provider cannot be applied here.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import skyinfra as sky
from skyinfra.compiler import compile_pools
from skyinfra.places.choices import Choice
from skyinfra.stack.sections import additions_of, module_inputs
from skyinfra.terraform.expressions import folded, literal
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack


def document_of(
    name: str, pools: Sequence[sky.ComputePool], choices: Mapping[str, Choice] | None = None
) -> dict[str, Any]:
    """The stack's JSON, as `app.synth()` writes it, but for what cdktf adds of its own. choices: as `compile_pools`."""
    deployments = compile_pools(pools, name, choices)
    kinds = {deployment.pool.provider.kind for deployment in deployments}
    inputs = {each.pool.name: folded(literal(module_inputs(each, "../../.."))) for each in deployments}
    sources = {kind: f"./{kind}" for kind in kinds}
    document: dict[str, Any] = {}
    for section, content in additions_of(name, deployments, inputs, sources, "./runner.whl").items():
        place = document
        *path, last = section.split(".")
        for key in path:
            place = place.setdefault(key, {})
        place[last] = _without_none(content)
    return document


def _without_none(value: Any) -> Any:
    """As cdktf does it."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def write(folder: Path, name: str, document: dict[str, Any]) -> None:
    """Writes *document* as a stack of the project in *folder*."""
    stack = folder / "cdktf.out" / "stacks" / name
    stack.mkdir(parents=True, exist_ok=True)
    (stack / "cdk.tf.json").write_text(json.dumps(document))
    entry = {"name": name, "workingDirectory": f"stacks/{name}", "synthesizedStackPath": f"stacks/{name}/cdk.tf.json"}
    (folder / "cdktf.out" / "manifest.json").write_text(json.dumps({"stacks": {name: entry}}))


def synthesized(
    folder: Path, *pools: sky.ComputePool, name: str = "s", backend: dict[str, Any] | None = None
) -> SynthesizedStack:
    """The stack *name* of *pools*, written to *folder* and read back as a project does; *backend*: of Terraform."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cdktf.json").write_text(json.dumps({"app": "true"}))
    document = document_of(name, pools)
    if backend is not None:
        document.setdefault("terraform", {})["backend"] = backend
    write(folder, name, document)
    return Project.find(folder).stack(name)


def project_of(folder: Path, pools: str, *, change: str = "", name: str = "s") -> Path:
    """A project whose program declares *pools*, a list in Python, and writes them; *change* edits `document`."""
    folder.mkdir(parents=True, exist_ok=True)
    program = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import skyinfra as sky
        from terraform_projects.synthesized import document_of, write
        document = document_of({name!r}, {pools})
        {change}
        write(Path.cwd(), {name!r}, document)
        """
    (folder / "main.py").write_text(textwrap.dedent(program))
    (folder / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
    return folder
