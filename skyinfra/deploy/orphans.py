"""Orphans: Terraform states with resources that no declared stack owns, such as those of a stack that was renamed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyinfra.errors import ProjectError, TerraformError
from skyinfra.providers import provider_of
from skyinfra.terraform.project import Project
from skyinfra.terraform.state import BETWEEN, Resource, read_state_file
from skyinfra.terraform.synthesized import SynthesizedStack

_STATE = re.compile(r"terraform\.(?P<stack>[A-Za-z0-9][\w-]{0,63})\.tfstate")


@dataclass(frozen=True)
class Orphan:
    """A state that no declared stack owns.

    stack: for Terraform; its folder may not hold a configuration yet, see `restore`. workspace: of the state, where it
    is not the default one. where: the state's file, or the kind of its backend. problem: why it cannot be read.
    """

    stack: SynthesizedStack
    where: str
    resources: tuple[Resource, ...]
    workspace: str | None = None
    problem: str | None = None

    @property
    def command(self) -> str:
        """The command that destroys what it holds."""
        selected = f"TF_WORKSPACE={self.workspace} " if self.workspace else ""
        return f"{selected}skyinfra destroy {self.stack.name}"

    @property
    def move(self) -> str:
        """The command that gives its pools to a declared stack."""
        selected = f"TF_WORKSPACE={self.workspace} " if self.workspace else ""
        return f"{selected}skyinfra move {self.stack.name} STACK"


def find_orphans(project: Project, declared: Iterable[SynthesizedStack]) -> tuple[Orphan, ...]:
    """Returns the states with resources that none of the *declared* stacks owns, by name.

    Looked through are the state files in the project's folder, and the states of what was synthesized before in this
    checkout, in whichever backend. Workspaces of HCP Terraform and keys in S3 that another checkout has used are not
    found: no declaration says which of them belong to the project.
    """
    declared = list(declared)
    owned = {path for stack in declared for path in _paths(stack)}
    names = {stack.name for stack in declared}
    stacks = {stack.name: stack for stack in project.earlier(names) if not owned & set(_paths(stack))}
    for file in project.folder.glob("terraform.*.tfstate*"):
        name = _STATE.match(file.name)
        if name and name["stack"] not in stacks and name["stack"] not in names:
            stack = _of_file(project, name["stack"])
            if not owned & set(_paths(stack)):
                stacks[stack.name] = stack
    return tuple(orphan for _, stack in sorted(stacks.items()) for orphan in _orphans(project, stack))


def _of_file(project: Project, name: str) -> SynthesizedStack:
    """Returns the stack of which nothing but its state file is left."""
    path = f"../../../terraform.{name}.tfstate"
    # Terraform ran there: the folders of local nodes in the state are counted from it.
    folder = project.output / "stacks" / name
    return SynthesizedStack(name, folder, (), {}, backend={"local": {"path": path, "workspace_dir": f"{path}.d"}})


def _paths(stack: SynthesizedStack) -> tuple[Path, ...]:
    """The file of the stack's state, and the folder of those of its other workspaces; none for other backends."""
    return tuple((stack.folder / path).resolve() for path in stack.backend.get("local", {}).values())


def _orphans(project: Project, stack: SynthesizedStack) -> Iterator[Orphan]:
    if not (paths := _paths(stack)):
        if stack.data_folder.exists():  # nothing was deployed where it was never set up
            yield from _orphan(stack, next(iter(stack.backend), "its backend"), None, stack.resources)
        return
    states: dict[str | None, Path] = {None: paths[0]}
    states |= {file.parent.name: file for file in sorted(paths[-1].glob("*/terraform.tfstate"))}
    for workspace, file in states.items():
        shown = file.relative_to(project.folder) if file.is_relative_to(project.folder) else file
        yield from _orphan(stack, str(shown), workspace, lambda file=file: read_state_file(file))


def _orphan(stack: SynthesizedStack, where: str, workspace: str | None, read: Any) -> Iterator[Orphan]:
    try:
        resources = read()
    except (ProjectError, TerraformError) as error:
        yield Orphan(stack, where, (), workspace, problem=error.message.splitlines()[0])
        return
    if resources:
        yield Orphan(stack, where, resources, workspace)


def stack_to_destroy(project: Project, name: str | None) -> SynthesizedStack:
    """Returns the stack of that name, declared, of a ``with`` block or orphaned, or the only one of the first.

    Where none is declared, the only one of a block. Raises `StackNotFound`.
    """
    declared = project.stacks() or tuple(block.stack for block in project.blocks() if not project.app)
    if name is not None and name not in {stack.name for stack in declared}:
        for block in project.blocks():
            if block.stack.name == name:
                return block.stack
        for orphan in find_orphans(project, declared):
            if orphan.stack.name == name:
                return restore(orphan)
        if not declared:
            declared = project.synth()
    return project.stack(name, stacks=declared or None)


def restore(orphan: Orphan) -> SynthesizedStack:
    """Returns the stack of *orphan* with a configuration that can destroy it, made from the state where there is none.

    Terraform needs the providers that the resources were made by, and for local nodes, containers and hosts the module,
    which ends them.
    """
    stack = orphan.stack
    if (stack.folder / "cdk.tf.json").exists():
        return stack
    providers: dict[str, list[dict[str, Any]]] = {}
    required = {}
    for found in map(provider_of, dict.fromkeys(resource.provider for resource in orphan.resources)):
        if found is not None and found.configuration() not in providers.setdefault(found.name, []):
            providers[found.name].append(found.configuration())
            required[found.name] = {"source": found.source, "version": found.version}
    stack.folder.mkdir(parents=True, exist_ok=True)
    document = {
        "terraform": {"backend": stack.backend, "required_providers": required},
        "provider": providers,
        "module": ending_modules(stack.folder, ending_kinds(orphan.resources)),
    }
    text = json.dumps({key: value for key, value in document.items() if value}, indent=2)
    (stack.folder / "cdk.tf.json").write_text(text, encoding="utf-8")
    return stack


def ending_kinds(resources: Iterable[Resource]) -> dict[str, str]:
    """Returns the provider of each module whose nodes its own program ends, as a resource of it is destroyed.

    Terraform forgets the nodes of one that is not in the configuration (hashicorp/terraform#13549).
    """
    named = {(each.call, each.name) for each in resources if each.type == "terraform_data"}
    modules = {call for call, name in named if name in ("node", "state")}
    marks = {"engine": "container", "fleet": "ssh"}
    return {call: next((kind for mark, kind in marks.items() if (call, mark) in named), "local") for call in modules}


def ending_modules(folder: Path, kinds: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns the blocks of the modules that end what `ending_kinds` has found; their files are put into *folder*."""
    if kinds:
        from skyinfra.stack import modules_folder

        shutil.copytree(modules_folder(frozenset(kinds.values())), folder, dirs_exist_ok=True)
    # Terraform reads these values, and makes nothing of them where everything is destroyed.
    return {
        name: {
            "source": f"./{kind}",
            "name": name.partition(BETWEEN)[0],
            "user_data_head": "{}",
            **({"hosts": [{"address": "x"}]} if kind == "ssh" else {}),
        }
        for name, kind in sorted(kinds.items())
    }


def forget(project: Project, stack: SynthesizedStack) -> None:
    """Removes the folder of a destroyed stack that is not declared, so that nothing of it is found again."""
    if stack.folder.is_relative_to(project.output) and stack.name not in {each.name for each in project.stacks()}:
        shutil.rmtree(stack.folder, ignore_errors=True)
