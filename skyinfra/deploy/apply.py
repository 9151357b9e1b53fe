"""Carrying out a stack: plan, apply, destroy."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from skyinfra.deploy.affected_nodes import SICK
from skyinfra.deploy.disks import refuse_removed, refuse_smaller, refuse_volumes
from skyinfra.deploy.last_run import recorded
from skyinfra.deploy.missing_nodes import SickNodes, lost_nodes, sick_nodes, stopped_nodes
from skyinfra.deploy.next_steps import next_steps
from skyinfra.deploy.places import accounts, kept_in_place, refuse_gone, refuse_moved
from skyinfra.deploy.reporting import Line, Reporter
from skyinfra.errors import (
    CloudRefused,
    DeployInterrupted,
    RunsElsewhere,
    StateLocked,
    StateNotSaved,
    TerraformError,
    TerraformFailed,
    WrongAccount,
)
from skyinfra.terraform.program import Plan, Terraform
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack
from skyinfra.terraform.text import Event

NODES = ".skyinfra"
# The modules that those of the providers call.
_CALLED = ("hosts", "google", "market")
_CONFIGURATION = re.compile(r'module\.[^.]+\.(?:module\.hosts\.)?terraform_data\.(?:head|worker\["[^"]+"\])')


@contextlib.contextmanager
def planned(
    stack: SynthesizedStack,
    *,
    destroy: bool = False,
    replace: Sequence[str] = (),
    target: Sequence[str] = (),
    gone: bool = False,
) -> Iterator[tuple[Terraform, Plan]]:
    """Plans a deploy of *stack*, or a destroy; the plan file exists as long as the block runs.

    replace: addresses of resources to make anew. target: addresses of those that alone are deployed, with what they
    need; none: all. gone: resources that the cloud does not find were removed by other means. Raises `TerraformFailed`,
    `TerraformNotFound`, `DeployInterrupted`, `RunsElsewhere`, `DiskTooSmall`, `PlaceChanged`, `VolumeProtected`.
    """
    with contextlib.ExitStack() as inside:
        stack.keep_private()
        resources: tuple[Resource, ...] = ()
        try:
            resources = stack.resources()
            refuse_volumes(stack, resources, destroy=destroy)
            if not destroy:
                refuse_moved(stack, resources)
            inside.enter_context(kept_in_place(stack, resources, destroy=destroy, gone=gone))
            terraform = stack.prepared(anew=True)
            sick = SickNodes({}, ()) if destroy or target else sick_nodes(stack, resources)
            again = [*wherever(replace), *sick.replaced, *([] if destroy or target else lost_nodes(stack))]
            plan = inside.enter_context(_plan(terraform, destroy=destroy, replace=again, target=target))
        except CloudRefused as error:
            where = accounts(resources) if isinstance(error, WrongAccount) else ""
            error.hint = hint_for(stack, error, f"{where} Nothing was changed.".strip())
            raise
        _check_place(stack, plan)
        if not gone:
            judged = [each for each in resources if not target or each.address.startswith(tuple(target))]
            refuse_gone(stack, judged, plan, destroy=destroy)
        refuse_smaller(stack, plan)
        if not destroy:
            refuse_removed(stack, resources, plan)
        reasons = {**plan.reasons, **{address: f"{SICK}: {why}" for address, why in sick.replaced.items()}}
        changes = tuple(map(_meant, plan.changes))
        stopped = stopped_nodes(stack, terraform, plan)
        yield terraform, dataclasses.replace(plan, changes=changes, reasons=reasons, notes=sick.kept, stopped=stopped)


def wherever(addresses: Sequence[str]) -> Iterator[str]:
    """Yields *addresses*, each also in the modules that the pool's calls. Terraform passes over those that there are
    not, and one is given by who does not know in which module of its pool a resource is."""
    for address in addresses:
        yield address
        if found := re.fullmatch(r"(module\.[^.]+\.)(?!module\.)(.+)", address):
            yield from (f"{found[1]}module.{name}.{found[2]}" for name in _CALLED)


def _meant(change: tuple[str, str]) -> tuple[str, str]:
    """*change* as it is for the fleet: a running node of this machine takes another configuration over, in place.

    Terraform replaces the resource that stands for the configuration; another one stands for the node.
    """
    action, address = change
    return ("update", address) if action == "replace" and _CONFIGURATION.fullmatch(address) else change


@contextlib.contextmanager
def _plan(terraform: Terraform, *, destroy: bool, replace: Sequence[str], target: Sequence[str]) -> Iterator[Plan]:
    """The plan; where a destroy cannot be planned for its configuration, one from the state alone.

    What a cloud lists, or a check of the configuration, must keep nobody from ending what costs money.
    """
    with contextlib.ExitStack() as inside:
        make = partial(terraform.planned, lambda event: None, destroy=destroy, replace=replace, target=target)
        try:
            plan = inside.enter_context(make())
        except (CloudRefused, StateLocked):
            raise
        except TerraformFailed:
            if not destroy:
                raise
            plan = inside.enter_context(make(refresh=False))
        yield plan


def _check_place(stack: SynthesizedStack, plan: Plan) -> None:
    """Nodes of this machine are processes or containers that Terraform starts here."""
    local = [pool["name"] for pool in stack.pools if pool["provider"] in ("local", "container")]
    if plan.run is not None and local and not plan.empty:
        raise RunsElsewhere(
            f"the stack {stack.name!r} has nodes of this machine (pool {', '.join(local)}), and its workspace runs "
            f"Terraform in HCP Terraform: {plan.run}",
            hint="Nothing was changed. Set the workspace's execution mode to local, or declare a provider to buy from.",
        )


def hint_for(stack: SynthesizedStack, error: TerraformError, last: str) -> str:
    """Returns the next steps after a refusal by a cloud, and the resources that exist."""
    return "\n".join([*(next_steps(stack, error) if isinstance(error, CloudRefused) else []), last])


def carry_out(
    stack: SynthesizedStack,
    *,
    approve: Callable[[Plan], bool] = lambda plan: True,
    destroy: bool = False,
    replace: Sequence[str] = (),
    target: Sequence[str] = (),
    gone: bool = False,
    planning: contextlib.AbstractContextManager[object] | None = None,
    before: Callable[[Plan], object] = lambda plan: None,
    on_event: Callable[[Event], object] | None = None,
    line: Line | None = None,
) -> Plan | None:
    """Plans *stack*, asks *approve*, applies. Returns the plan, or None where *approve* returned False.

    An empty plan is returned without asking; names that its resources get in the state are written. planning: is
    entered while Terraform plans. before: is called with an approved plan, before anything is changed. on_event: gets
    the events of the apply. line: shows them in place of lines of their own. Takes and raises what `planned` does.
    """
    verb = "destroy" if destroy else "deploy"
    # Parts are removed by a deploy, which goes on; the command of that name would remove all of the stack.
    command = "deploy" if target else verb
    with contextlib.ExitStack() as inside:
        with planning or contextlib.nullcontext():
            terraform, plan = inside.enter_context(
                planned(stack, destroy=destroy, replace=replace, target=target, gone=gone)
            )
        if plan.empty:
            if plan.moves and not destroy:
                # A module of another version has other names for what stands. Only the state is written.
                terraform.apply_plan(plan, lambda event: None)
            return plan
        if not approve(plan):
            return None
        before(plan)
        in_place = {address for action, address in plan.changes if action == "update"}
        title = f"{verb} {stack.name}"
        total = len(plan.changes)
        reporting = Reporter(title, total=total, in_place=in_place, on_event=on_event, line=line)
        with recorded(stack, command), reporting as reporter:
            try:
                terraform.apply_plan(plan, reporter)
            except (StateLocked, StateNotSaved):
                raise
            except DeployInterrupted as error:
                instead = "" if destroy else f", or `skyinfra destroy {stack.name}` to remove what exists"
                last = f"Run `skyinfra {command} {stack.name}` to go on{instead}."
                error.hint = f"{error.hint}\n{last}" if error.hint else last
                raise
            except TerraformFailed as error:
                again = "" if destroy else f", or `skyinfra destroy {stack.name}`"
                error.hint = hint_for(
                    stack,
                    error,
                    "The state is intact, and what exists is in it. "
                    f"Mend the cause and run `skyinfra {command} {stack.name}` again{again}.",
                )
                raise
        return plan
