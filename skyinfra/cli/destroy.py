"""``skyinfra destroy``: at once, or when nothing has used the fleets of the stack for some time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import typer

from skyinfra.cli.options import StackName, Yes, seconds
from skyinfra.cli.stacks import Approval, Gone, keep_jobs
from skyinfra.deploy.affected_nodes import Use, uses
from skyinfra.deploy.apply import carry_out
from skyinfra.deploy.disks import kept_lines
from skyinfra.deploy.orphans import forget, stack_to_destroy
from skyinfra.deploy.spending import program_of
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.failover.strays import stray_lines
from skyinfra.places.choices import Choices
from skyinfra.ssh import hosts
from skyinfra.terminal import tables
from skyinfra.terminal.progress import working
from skyinfra.terraform.blocks import kept_from_programs
from skyinfra.terraform.program import Plan
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack

# Between two looks, while it waits.
_LOOK_S = 60.0
_LEAST_S = 1.0


app = typer.Typer()


@app.command()
def destroy(
    stack: StackName = None,
    auto_approve: Yes = False,
    gone: Gone = False,
    when_idle: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only where nothing has used any of its fleets for so long, such as 30m."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="With --when-idle: until that is so.")] = False,
) -> None:
    """Remove everything a stack created, after keeping its jobs' logs. It need not be declared any more. Exit code 1
    where --when-idle cannot say whether a fleet is used; 0 where one is, and nothing is destroyed.
    """
    limit = _limit(when_idle, wait=wait, auto_approve=auto_approve)
    project = Project.find()
    selected = stack_to_destroy(project, stack)
    block = next((each for each in project.blocks() if each.stack.folder == selected.folder), None)
    if block is not None:
        tables.say(f"{selected.name}: {program_of(block)}", to_stderr=True)
    unused = None if limit is None else _Unused(selected, limit, wait=wait)

    def attempt() -> Plan:
        for line in stray_lines(selected):
            tables.say((line, "red"), to_stderr=True)
        with kept_from_programs(block) if block is not None else nullcontext() as forget_block:
            done = _attempt(selected, project, unused, auto_approve=auto_approve, gone=gone)
            if forget_block is not None:
                forget_block()
        return done

    done = attempt() if unused is None else unused.attempt(attempt)
    forget(project, selected)
    if project.app:
        Choices.read(project.folder).without(selected.name)
    try:
        hosts.forget_hosts(project.folder, selected.name)
    except NotSupported as error:
        tables.say(f"the hosts of {selected.name} stay in {hosts.file()}: {error}", to_stderr=True)
    typer.echo(f"{selected.name}: {'nothing to destroy' if done.empty else 'destroyed'}")
    for line in kept_lines(selected):
        tables.say(f"{selected.name}: {line}")


def _attempt(
    stack: SynthesizedStack, project: Project, unused: _Unused | None, *, auto_approve: bool, gone: bool
) -> Plan:
    """Destroys *stack* by a plan that is approved, and returns the plan. Raises `typer.Exit`, and `_InUse`."""
    approval = Approval(stack, "destroy", auto_approve)

    def approve(plan: Plan) -> bool:
        if unused is not None:
            unused.check(plan)
        return approval(plan)

    def before(plan: Plan) -> None:
        keep_jobs(stack, project.base_of(stack), plan, destroy=True)
        if unused is not None:  # a person has answered, and jobs were copied: once more
            unused.check(plan)

    planning = working(f"plan {stack.name}: terraform")
    done = carry_out(stack, approve=approve, destroy=True, gone=gone, planning=planning, before=before)
    if done is None:
        raise typer.Exit(1)
    return done


def _limit(when_idle: str | None, *, wait: bool, auto_approve: bool) -> float | None:
    """Returns the seconds of ``--when-idle``; None without it. Raises `InvalidField`."""
    if wait and (when_idle is None or not auto_approve):
        raise InvalidField(
            "waits for the end of use, when nobody is there to be asked",
            field="--wait",
            hint="Give it with both: skyinfra destroy --when-idle 30m --wait --auto-approve",
        )
    if when_idle is None:
        return None
    return seconds("--when-idle", when_idle)


class _InUse(Exception):
    """A plan is dropped, as the fleet is used again. pause_s: for how long to wait before the next look."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s


@dataclass
class _Unused:
    """Ends the command where a fleet of *stack* was used within the last *limit* seconds, or nobody knows; or *wait*s
    until that is so no more."""

    stack: SynthesizedStack
    limit: float
    wait: bool = False
    _said: dict[str, str] = field(default_factory=dict)

    def attempt(self, destroy: Callable[[], Plan]) -> Plan:
        """Returns what *destroy* does, once the fleets are unused. Raises `typer.Exit`."""
        while True:
            self.check()
            try:
                return destroy()
            except _InUse as found:
                time.sleep(found.pause_s)

    def check(self, plan: Plan | None = None) -> None:
        """Looks at the fleets, and again and again to wait. Raises `typer.Exit`, and `_InUse` to wait for another plan.

        plan: of the destroy. Before there is one, a head that does not answer decides nothing: its machine may be gone.
        """
        while True:
            with working(f"destroy {self.stack.name}: asking the heads who uses them"):
                found = uses(self.stack, plan)
            known = [each for each in found if each.idle_s is not None]
            used = [each for each in known if (each.idle_s or 0.0) < self.limit]
            unknown = [each for each in found if each not in known and (plan is not None or not each.silent)]
            if not used and not unknown:
                return
            self._say(used, unknown)
            if not self.wait:
                tables.say(f"{self.stack.name}: not destroyed")
                raise typer.Exit(1 if unknown and not used else 0)
            left = max([self.limit - (each.idle_s or 0.0) for each in used], default=_LOOK_S)
            pause_s = min(_LOOK_S, max(_LEAST_S, left))
            if plan is not None:
                raise _InUse(pause_s)
            time.sleep(pause_s)

    def _say(self, used: list[Use], unknown: list[Use]) -> None:
        """Prints what uses each fleet, unless that was printed last."""
        whys = {each.fleet: each.what for each in (*used, *unknown)}
        for each in (each for each in used if self._said.get(each.fleet) != each.what):
            tables.say(f"{each.fleet}: {_words(each)}", to_stderr=True)
        for each in (each for each in unknown if self._said.get(each.fleet) != each.what):
            tables.say((f"{each.fleet}: nobody knows whether it is used: {each.what}", "red"), to_stderr=True)
        self._said = whys


def _words(use: Use) -> str:
    if use.kept_s:
        return f"kept from being idle for {tables.span(use.kept_s)} (`skyinfra keep`)"
    if use.what:
        return f"in use: {use.what}"
    return f"was used {tables.span(use.idle_s or 0.0)} ago"
