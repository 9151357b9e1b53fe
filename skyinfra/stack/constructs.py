"""The constructs of a stack: the only file that knows cdktf and cdktn.

Both libraries carry the same API under two names. The library is found from the scope a FleetStack is put in, so one
class serves both and neither is a hard dependency.
"""

from __future__ import annotations

import atexit
import importlib
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from skyinfra.bootstrap import bundled, carries_runner, runner_wheel
from skyinfra.compiler import Deployment, compile_pool, compile_pools
from skyinfra.declared import is_output
from skyinfra.errors import InvalidField, MissingDependency
from skyinfra.places.choices import Choices
from skyinfra.pool import STACK_NAME, ComputePool
from skyinfra.providers.volumes import Volume
from skyinfra.stack.sections import additions_of, module_inputs, own_block, packs_runner, provider_sections, users
from skyinfra.terraform.backends import S3, Backend, HCPTerraform, LocalState
from skyinfra.terraform.expressions import folded, from_file, is_reference, literal

LIBRARIES = ("cdktf", "cdktn")
# User data of more characters go into a file; a node.json is read more easily where it is used.
_SHORT = 8_000


def load_library(name: str | None = None) -> ModuleType:
    """cdktf or cdktn: the one named, else the first that is installed. Raises `MissingDependency`."""
    for candidate in (name,) if name else LIBRARIES:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name != candidate:
                raise
    raise MissingDependency(
        f"{name or 'neither cdktf nor cdktn'} is {'not ' if name else ''}installed",
        hint=f'Install it with: pip install "skyinfra[{name or "cdktf"}]"',
    )


def library_of(scope: object) -> ModuleType:
    """Returns the library that *scope*, an App or a construct inside of one, belongs to. Raises `InvalidField`."""
    node = getattr(scope, "node", None)
    for candidate in (scope, getattr(node, "root", None)):
        for base in type(candidate).__mro__:
            root = base.__module__.partition(".")[0]
            if root in LIBRARIES:
                return importlib.import_module(root)
    raise InvalidField(
        "a FleetStack belongs in an App of cdktf or cdktn",
        field="FleetStack.scope",
        given=type(scope).__name__,
        hint="from cdktf import App; app = App(); sky.FleetStack(app, ...)",
    )


def check_name(id: object, *, field: str) -> None:
    """Raises `InvalidField` where *id* cannot be the name of a stack."""
    if not isinstance(id, str) or not re.fullmatch(STACK_NAME, id):
        raise InvalidField(
            "a stack is named with letters, digits, dashes and underscores, at most 64", field=field, given=id
        )


class _BindingMeta(type):
    """Calling an unbound FleetStack class first binds it to the library of the scope."""

    def __call__(cls, scope: Any, id: str, *args: Any, **kwargs: Any) -> Any:
        library = library_of(scope)
        if issubclass(cls, library.TerraformStack):
            return super().__call__(scope, id, *args, **kwargs)
        return _bind(cls, library)(scope, id, *args, **kwargs)


def _bind(cls: type, library: ModuleType) -> Any:
    """*cls* as a TerraformStack of *library*. jsii needs its own metaclass, so the bound class has both."""
    stack = library.TerraformStack
    meta = type("_BoundMeta", (_BindingMeta, type(stack)), {})
    return meta(cls.__name__, (cls, stack), {"__module__": cls.__module__, "__doc__": cls.__doc__})


class FleetStack(metaclass=_BindingMeta):
    """A Terraform stack with one fleet for each pool.

    scope: an App of cdktf or cdktn. id: name of the stack. pools: what is declared; names differ. A function is called
    with the stack and returns them: what it puts in the stack can be used by its pools. backend: where the state is
    kept; None is a file beside cdktf.json. volumes: that outlive fleets, in place of pools; those of other stacks of
    the app mount them, and are destroyed without them. The instance is a TerraformStack of the scope's library, so
    other constructs can be put in it. Everything is compiled before the library is touched: a `DeclarationError` leaves
    nothing behind.
    """

    def __init__(
        self,
        scope: Any,
        id: str,
        *,
        pools: Sequence[ComputePool] | Callable[[Any], Sequence[ComputePool]] = (),
        backend: Backend | None = None,
        volumes: Sequence[Volume] = (),
    ) -> None:
        check_name(id, field="FleetStack.id")
        _check_volumes(volumes, pools)
        choices = Choices.read(Path.cwd()).fleets
        compiled = () if callable(pools) else compile_pools(pools, id, choices)
        provider_sections(users(compiled))
        library = library_of(scope)
        compiled = _with_ids(scope, compiled)
        super().__init__(scope, id)  # type: ignore[call-arg]
        self.deployments = _with_ids(scope, compile_pools(pools(self), id, choices)) if callable(pools) else compiled
        self.volumes = {each: _volume_id(library, self, each, id) for each in volumes}
        project = _path_to_project(scope, id)
        _add_backend(library, self, id, backend or LocalState(), project)
        sources = _module_sources(library, self, {each.pool.provider.kind for each in self.deployments})
        carriers = {packs_runner(each) for each in self.deployments if carries_runner(each)}
        runners = {packed: _runner_source(library, self, packed) for packed in sorted(carriers)}
        inputs = {each.pool.name: module_inputs(each, project) for each in self.deployments}
        carried = _carry_user_data(library, self, inputs)
        given = {
            each.pool.name: _refer(library, self, each, literal(inputs[each.pool.name])) for each in self.deployments
        }
        self._elements = {("local", local) for found in given.values() for local in _locals(found)}
        self._elements |= {(each.data.resource, each.name) for each in volumes}
        modules = {name: {**folded(found), **carried.get(name, {})} for name, found in given.items()}
        self._additions = additions_of(id, self.deployments, modules, sources, runners, volumes)
        for section, content in self._additions.items():
            self.add_override(section, content)  # type: ignore[attr-defined]

    def prepare_stack(self) -> None:
        """Called by the library when the stack is complete. Raises `InvalidField` for a name that is there twice."""
        super().prepare_stack()  # type: ignore[misc]
        fit_in(library_of(self), self, self._additions, self._elements)


def _refer(library: ModuleType, stack: Any, deployment: Deployment, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns *inputs* of a pool, those with outputs of other constructs as local values of the stack.

    A local value is an element of the stack, of which the library knows what it needs, in another stack too.
    """
    found, begins = dict(inputs), deployment.pool.provider.data.terraform.get("outputs_begin", {})
    for name in sorted(inputs.keys() & {*deployment.selection.inputs, "image"}):
        if is_output(value := inputs[name]):
            key = f"{deployment.pool.name}_{name}"
            local = library.TerraformLocal(stack, f"skyinfra-{key}", _never_null(library, value, begins.get(name)))
            local.override_logical_id(key)
            found[name] = f"${{local.{key}}}"
    return found


def _locals(inputs: Mapping[str, Any]) -> set[str]:
    """Returns the names of the local values that *inputs* of a pool are."""
    return {value[len("${local.") : -1] for value in inputs.values() if is_reference(value)}


def _never_null(library: ModuleType, value: Any, begin: str | None) -> Any:
    """*value* with its texts as Terraform knows before an apply that they are not null, and how they *begin*.

    Modules count what they make besides, and where a value may be null Terraform makes no plan.
    """
    if isinstance(value, dict):
        return {name: _never_null(library, part, begin) for name, part in value.items()}
    if isinstance(value, list):
        # A list that is an output itself has one part, of another form.
        return [_never_null(library, part, begin) for part in value]
    if not isinstance(value, str) or not value.startswith("${") or not is_output(value):
        return value
    return f"{begin}{library.Fn.trimprefix(value, begin)}" if begin else library.Fn.format("%s", [value])


def fit_in(
    library: ModuleType, stack: Any, additions: dict[str, dict[str, Any]], elements: Set[tuple[str, str]]
) -> None:
    """Leaves what else is in *stack* as it is: keeps its versions of providers, and refuses names that are there twice.

    The library would merge them without a word. additions: to the stack's JSON, by sections. elements: ours among those
    of the stack, by their kind, ``local`` or the type of a resource, and name. Raises `InvalidField`.
    """
    blocks, met = additions.get("provider", {}), set[tuple[str, str]]()
    for element in stack.node.find_all():
        if isinstance(element, library.TerraformProvider):
            name = element.terraform_resource_type
            taken = any(block["alias"] == element.alias for block in blocks.get(name, ()))
            if taken:
                hint = f'Give yours another alias, or the pool yours: provider="{name}.{element.alias}".'
                raise InvalidField("a pool has a provider of that alias", field=f"{name}.{element.alias}", hint=hint)
            pin = getattr(element.terraform_generator_metadata, "provider_version", None)
            if pin and name in additions.get("terraform.required_providers", {}):
                stack.add_override(f"terraform.required_providers.{name}.version", pin)
        elif isinstance(element, library.TerraformModule):
            _refuse_taken("module", element, additions)
        elif isinstance(element, library.TerraformOutput):
            _refuse_taken("output", element, additions)
        elif elements and isinstance(element, library.TerraformLocal):
            _refuse_second(("local", element.friendly_unique_id), elements, met)
        elif elements and isinstance(element, library.TerraformResource):
            _refuse_second((element.terraform_resource_type, element.friendly_unique_id), elements, met)


def _refuse_second(found: tuple[str, str], ours: Set[tuple[str, str]], met: set[tuple[str, str]]) -> None:
    if found in met and found in ours:
        kind, name = found
        whose = "an input of a pool" if kind == "local" else "a volume"
        hint = f"Give yours another name: {kind}.{name} of the stack is {whose}."
        raise InvalidField(f"the stack has two of the name {name}", field=f"{kind}.{name}", hint=hint)
    met.add(found)


def _refuse_taken(section: str, element: Any, additions: dict[str, dict[str, Any]]) -> None:
    name = element.friendly_unique_id
    if name in additions.get(section, {}):
        hint = f"Give yours another name, or the pool: {section} {name} of the stack is that of a pool."
        raise InvalidField(f"the stack has two of the name {name}", field=f"{section}.{name}", hint=hint)


def _path_to_project(scope: Any, id: str) -> str:
    """The way from where Terraform runs to the project folder. Relative, so that a moved checkout compiles the same."""
    return Path(os.path.relpath(Path.cwd(), Path(scope.node.root.outdir).absolute() / "stacks" / id)).as_posix()


def _module_sources(library: ModuleType, stack: Any, kinds: Set[str]) -> dict[str, str]:
    """Carries the modules of the providers *kinds* into the stack; a local source must begin with "./"."""
    if not kinds:
        return {}
    path = str(modules_folder(frozenset(kinds)))
    asset = library.TerraformAsset(stack, "modules", path=path, type=library.AssetType.DIRECTORY)
    return {kind: f"./{asset.path}/{kind}" for kind in sorted(kinds)}


@cache
def modules_folder(kinds: frozenset[str]) -> Path:
    """A folder with the modules of the providers *kinds* and those that they call, each in a folder of its name.

    Their examples are nothing to a stack.
    """
    folder = _temporary_folder()
    for module in bundled.modules(sorted(kinds)):
        shutil.copytree(module, folder / module.name, ignore=shutil.ignore_patterns("examples", ".terraform*"))
    return folder


def _runner_source(library: ModuleType, stack: Any, packed: bool) -> str:
    """Carries the runner into the stack, for the modules that hand it on."""
    name = "runner-packed" if packed else "runner"
    asset = library.TerraformAsset(stack, name, path=str(_runner_file(packed)), type=library.AssetType.FILE)
    return f"./{asset.path}"


@cache
def _runner_file(packed: bool) -> Path:
    """Returns the runner's wheel in a file; packed: compressed."""
    wheel = runner_wheel.wheel()
    name, content = runner_wheel.packed(wheel) if packed else (wheel.name, wheel.content)
    file = _temporary_folder() / name
    file.write_bytes(content)
    return file


def _temporary_folder() -> Path:
    """Returns a folder for assets, which the library copies at the end of the synthesis."""
    folder = tempfile.mkdtemp(prefix="skyinfra-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _carry_user_data(library: ModuleType, stack: Any, inputs: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Puts the user data of machines into files of the stack. Gives, by pool, the inputs that read them.

    In the stack's JSON the library would walk through each of them several times.
    """
    long = [
        (pool, key)
        for pool, found in inputs.items()
        for key in ("user_data_head", "user_data_worker")
        if len(found[key]) > _SHORT
    ]
    if not long:
        return {}
    folder = _temporary_folder()
    for pool, key in long:
        (folder / f"{pool}.{key}").write_bytes(inputs[pool][key].encode())
    asset = library.TerraformAsset(stack, "user-data", path=str(folder), type=library.AssetType.DIRECTORY)
    path, expressions = asset.path, defaultdict[str, dict[str, str]](dict)
    for pool, key in long:
        expressions[pool][key] = from_file(f"{path}/{pool}.{key}")
    return expressions


def _check_volumes(volumes: Sequence[Volume], pools: object) -> None:
    """Raises `InvalidField` for what is no volume, one that there is already, a name twice, and pools beside them."""
    if volumes and pools:
        hint = "Declare them in a stack of their own, and mount them in this one: ComputePool(volumes={...})."
        raise InvalidField("would be destroyed with the pools of their stack", field="FleetStack.volumes", hint=hint)
    seen: set[str] = set()
    for index, volume in enumerate(volumes):
        field = f"FleetStack.volumes[{index}]"
        if not isinstance(volume, Volume):
            raise InvalidField("expected a Volume", field=field, given=type(volume).__name__)
        if volume.id is not None:
            hint = "Mount it as it is: ComputePool(volumes={...}). A stack declares the volumes that it makes."
            raise InvalidField("has an id, so there is one already", field=f"{field}.id", given=volume.id, hint=hint)
        if volume.name in seen:
            raise InvalidField("the stack has another volume of that name", field=f"{field}.name", given=volume.name)
        seen.add(volume.name)


def _volume_id(library: ModuleType, stack: Any, volume: Volume, id: str) -> str:
    """Adds the resource of *volume* to *stack*, and returns its id, which is an output for stacks that mount it."""
    if not stack.node.try_find_child("volumes"):
        # The state remembers which ones are protected, also when their declaration is gone.
        library.TerraformResource(stack, "volumes", terraform_resource_type="terraform_data")
        stack.add_override("resource.terraform_data.volumes.input", {})
    stack.add_override(f"resource.terraform_data.volumes.input.{volume.name}", volume.protect)
    made = library.TerraformResource(stack, f"volume-{volume.name}", terraform_resource_type=volume.data.resource)
    made.override_logical_id(volume.name)
    provider = volume.provider.terraform()[0]
    made.add_override("provider", own_block(volume.provider, provider) or f"{provider.name}.{provider.alias}")
    for name, value in volume.resource(id).items():
        made.add_override(name, value)
    found: str = made.get_string_attribute("id")
    return found


def _with_ids(scope: Any, compiled: tuple[Deployment, ...]) -> tuple[Deployment, ...]:
    """*compiled* with the ids of the volumes that other stacks of the app declare. Raises `InvalidField` for others."""
    return tuple(_compiled_with_ids(scope, each) if each.pool.volumes else each for each in compiled)


def _compiled_with_ids(scope: Any, deployment: Deployment) -> Deployment:
    pool = deployment.pool
    volumes = {path: _with_id(scope, pool, path) for path in pool.volumes}
    made = compile_pool(pool.model_copy(update={"volumes": volumes}), deployment.stack)
    return replace(
        made, module=deployment.module, place=deployment.place, places=deployment.places, scale=deployment.scale
    )


def _with_id(scope: Any, pool: ComputePool, path: str) -> Volume:
    volume = pool.volumes[path]
    if volume.id is not None:
        return volume
    for stack in scope.node.root.node.find_all():
        for declared, id in getattr(stack, "volumes", {}).items() if isinstance(stack, FleetStack) else ():
            if declared == volume:
                return volume.found(id, stack.node.id)
    raise InvalidField(
        "no stack before this one declares it",
        field=f"{pool.name}.volumes[{path!r}]",
        given=volume.name,
        hint="Put it in one: sky.FleetStack(app, ..., volumes=[...]). Or give the id of one that there is: id=...",
    )


def _add_backend(library: ModuleType, stack: Any, id: str, backend: Backend, project: str) -> None:
    if isinstance(backend, LocalState):
        path = f"{project}/{backend.path or f'terraform.{id}.tfstate'}"
        # Terraform would keep the states of other workspaces in its working folder, which is thrown away.
        library.LocalBackend(stack, path=path, workspace_dir=f"{path}.d")
    elif isinstance(backend, S3):
        library.S3Backend(stack, bucket=backend.bucket, key=backend.key)
        # Not all that Terraform takes is known to cdktf.
        for name, value in backend.settings().items():
            stack.add_override(f"terraform.backend.s3.{name}", value)
    elif isinstance(backend, HCPTerraform):
        workspace = library.NamedCloudWorkspace(backend.workspace, backend.project)
        options = {"hostname": backend.hostname} if backend.hostname else {}
        library.CloudBackend(stack, organization=backend.organization, workspaces=workspace, **options)
    else:
        raise InvalidField(
            "expected sky.LocalState, sky.S3 or sky.HCPTerraform",
            field="FleetStack.backend",
            given=type(backend).__name__,
        )
