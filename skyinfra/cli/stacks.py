"""``skyinfra synth | plan | deploy | preflight | iam``: stacks, by way of Terraform."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from skyinfra.bootstrap import runner_wheel
from skyinfra.cli.options import Json, StackName, Wide, Yes, can_be_asked, seconds
from skyinfra.deploy.affected_nodes import endings
from skyinfra.deploy.apply import carry_out, planned, wherever
from skyinfra.deploy.cost import Cost, cost_of
from skyinfra.deploy.kept import keep_before
from skyinfra.deploy.missing_nodes import ended_nodes
from skyinfra.deploy.orphans import Orphan, find_orphans
from skyinfra.deploy.spending import holdings
from skyinfra.deploy.transitions import transitions
from skyinfra.errors import SkyinfraError, counted
from skyinfra.failover.deploying import Failover
from skyinfra.places.choices import Choices
from skyinfra.protocol.manifest import Manifest
from skyinfra.terminal import tables
from skyinfra.terminal.drawing import show_transition
from skyinfra.terminal.overview import show_steps, steps_of
from skyinfra.terminal.places import ask_clouds
from skyinfra.terminal.plans import plan_document, show_plan
from skyinfra.terminal.progress import synthesized, working
from skyinfra.terminal.reports import show_report
from skyinfra.terraform.program import Plan
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack
from skyinfra.terraform.text import Event

app = typer.Typer()
Replace = Annotated[list[str] | None, typer.Option(help="Address of a resource to make anew.")]
Gone = Annotated[bool, typer.Option("--gone", help="What the cloud does not find was removed by other means.")]


@app.command()
def synth(as_json: Json = False, wide: Wide = False) -> None:
    """Compile the declared stacks to Terraform in cdktf.out."""
    show_choices(synthesized(Project.find()), as_json=as_json)


def synthesize(name: str | None, project: Project | None = None, *, fresh: bool = True) -> SynthesizedStack:
    """Synthesizes the project, by default that of here, and returns the stack, after a table of its pools on stderr.

    fresh: also where nothing has changed.
    """
    project = project or Project.find()
    stacks = synthesized(project, fresh=fresh)
    stack = project.stack(name, stacks=stacks)
    show_choices((stack,), to_stderr=True)
    show_orphans(find_orphans(project, stacks), to_stderr=True)
    for name, inputs in stack.modules.items():
        for cidr in {"0.0.0.0/0", "::/0"} & set(inputs.get("allow_cidrs", ())):
            text = f"{name}: allow_cidrs lets all of the internet ({cidr}) reach the port of the head's scheduler."
            tables.say((text, "yellow"), " Name the networks that you use.", to_stderr=True)
    if any(inputs.get("runner_file") for inputs in stack.modules.values()):
        show_differing()
    return stack


def show_differing() -> None:
    """Prints which packages nodes get in other versions than this machine has."""
    other = runner_wheel.differing()
    if not other:
        return
    text = "Nodes of a fleet that is made now get versions that this machine does not have:"
    each = "; ".join(f"{name} {there}, here {here or 'none'}" for name, (here, there) in other.items())
    todo = shlex.join(["pip", "install", *(f"{name}=={there}" for name, (_, there) in other.items())])
    tables.say((text, "yellow"), f" {each}. To run tasks from here: `{todo}`", to_stderr=True)


def show_orphans(orphans: Iterable[Orphan], *, to_stderr: bool = False) -> None:
    """Prints the states that no declared stack owns, with the cost of their machines and how to destroy them."""
    for orphan in orphans:
        if orphan.problem is not None:
            text = f"No declared stack owns the state {orphan.where}, and it cannot be read: {orphan.problem}"
        else:
            text = f"No declared stack owns {holdings(orphan.resources)} in {orphan.where}."
        tables.say((text, "yellow"), to_stderr=to_stderr)
        if orphan.problem is None:
            keep = f"Or keep their nodes, in the stack that declares them now: `{orphan.move}`"
            tables.say(f"Destroy them with: `{orphan.command}`\n{keep}", to_stderr=to_stderr)


def show_choices(stacks: Iterable[SynthesizedStack], *, as_json: bool = False, to_stderr: bool = False) -> None:
    """Prints the chosen machine and price of every pool."""
    stacks = list(stacks)
    if as_json:
        tables.print_document(
            {"stacks": [{"name": s.name, "folder": str(s.folder), "pools": list(s.pools)} for s in stacks]}
        )
        return
    made = tables.table(
        *("STACK", "POOL", "PROVIDER", "NODES", "MACHINE", "ACCELERATOR", "SLOTS/NODE", "PRICE"),
        leave_out=("STACK", "PROVIDER"),
        sentences=("MACHINE", "ACCELERATOR", "PRICE"),
    )
    for stack in stacks:
        for pool in stack.pools:
            accelerator = pool.get("accelerator") or "none (CPU)"
            made.add_row(
                stack.name,
                pool["name"],
                pool["provider"],
                tables.node_range(pool.get("min_nodes"), pool["nodes"], pool.get("scale")),
                ", ".join(pool["machine_types"]),
                escape(f"{accelerator}{tables.simulated_mark(pool['simulated'])}"),
                str(pool["slots_per_node"]),
                _price(pool),
            )
    tables.console(to_stderr=to_stderr).print(made)


def _price(pool: dict[str, Any]) -> str:
    """Returns the price per hour of all nodes and a separate head, with region and date."""
    if pool.get("hourly_cost") is None:
        return str(pool["price_note"])
    head = pool.get("head_price")
    amount = pool["hourly_cost"] * pool["nodes"] + (head["usd_per_hour"] if head else 0.0)
    about = f"; with{'' if head else 'out'} its head" if pool.get("head") else ""
    return f"${amount:.2f}/h ({pool['price_note']}{about})"


@app.command()
def plan(
    stack: StackName = None,
    replace: Replace = None,
    gone: Gone = False,
    as_json: Json = False,
    wide: Wide = False,
    detailed: Annotated[
        bool, typer.Option("--detailed-exitcode", help="As Terraform has it. 0: no changes; 2: changes; 1: an error.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Synthesize also where nothing has changed.")] = False,
) -> None:
    """Show what a deploy would change, and what the stack costs."""
    try:
        selected = synthesize(stack, fresh=fresh)
        with ExitStack() as inside:
            with working(f"plan {selected.name}: terraform"):
                _, made = inside.enter_context(planned(selected, replace=replace or (), gone=gone))
            show_plan(selected.name, made, as_json=as_json, cost=cost_of(selected.pools, selected.volumes))
            show_transitions(selected, made)
            show_endings(selected, made, to_stderr=True)
    except SkyinfraError as error:
        if detailed:
            error.exit_code = 1
        raise
    if detailed and not made.empty:
        raise typer.Exit(2)


@app.command()
def deploy(
    stack: StackName = None,
    auto_approve: Yes = False,
    replace: Replace = None,
    gone: Gone = False,
    wait: Annotated[bool, typer.Option(help="Until cloud nodes have booted and their slots are ready.")] = True,
    patience: Annotated[str, typer.Option(metavar="TIME", help="For how long to wait.")] = "15m",
    as_json: Annotated[bool, typer.Option("--json", help="Print the events as lines of JSON.")] = False,
    wide: Wide = False,
) -> None:
    """Create or change what is declared, and wait for the nodes."""
    deploy_stack(
        stack,
        auto_approve=auto_approve,
        replace=replace or (),
        gone=gone,
        wait=wait,
        patience=patience,
        as_json=as_json,
    )


def deploy_stack(
    stack: str | None,
    *,
    auto_approve: bool,
    wait: bool,
    patience: str = "15m",
    replace: Sequence[str] = (),
    gone: bool = False,
    as_json: bool = False,
    begun: Callable[[], object] = lambda: None,
) -> None:
    """Deploys a stack, as the command of that name does. begun: is called before anything is applied."""
    # As JSON, the events stand on stdout beside what a person reads on stderr.
    say = print_event if as_json else None
    try:
        patience_s = seconds("--patience", patience, bare=True)
        project = Project.find()
        selected = synthesize(stack, project)
        failover = failover_of(
            selected, project, auto_approve=auto_approve, replace=replace, gone=gone, say=say, begun=begun
        )
        done = failover.deploy()
        selected = failover.stack
        if done is None:
            raise typer.Exit(1)
        if done.empty and not as_json:
            typer.echo(f"{selected.name}: no changes, everything is as declared")
            for note in done.notes:
                tables.say(note, to_stderr=True)
        elif not as_json:
            show_fleets(selected)
        if wait and not done.empty:
            wait_for_nodes(selected, patience_s, say)
        if not as_json:
            show_steps(steps_of(selected), to_stderr=True)
        if say is not None:
            say(
                "deployed",
                stack=selected.name,
                changed=not done.empty,
                fleets=[*map(_fleet, selected.fleets().values())],
            )
    except SkyinfraError as error:
        if say is not None:
            say("error", error=type(error).__name__, message=str(error))
        raise


def failover_of(
    stack: SynthesizedStack,
    project: Project,
    *,
    auto_approve: bool,
    replace: Sequence[str] = (),
    gone: bool = False,
    say: Callable[..., None] | None = None,
    begun: Callable[[], object] = lambda: None,
) -> Failover:
    """Returns a deploy of *stack*. say: see `print_event`; without it, steps are shown as lines. begun: see
    `deploy_stack`."""

    made: set[str] = set()

    def listen(event: Event) -> None:
        if event.kind == "done" and event.action != "delete":
            made.add(event.address)
        if say is not None:
            print_step(event)

    def before(selected: SynthesizedStack, plan: Plan) -> None:
        keep_jobs(selected, project.folder, plan)
        begun()

    def attempt(selected: SynthesizedStack, again: bool = False) -> Plan | None:
        cost = cost_of(selected.pools, selected.volumes)
        return carry_out(
            selected,
            approve=Approval(selected, "deploy", auto_approve or again, cost, say),
            # What an attempt before this one has replaced stays.
            replace=[each for each in replace if made.isdisjoint(wherever([each]))],
            gone=gone,
            planning=working(f"plan {selected.name}: terraform"),
            before=partial(before, selected),
            on_event=listen,
        )

    return Failover(
        stack,
        Choices.read(project.folder),
        synthesize=partial(synthesize, stack.name, project),
        attempt=attempt,
        ask=partial(ask_to, "deploy", auto_approve),
        say=partial(tables.say, to_stderr=True),
        look=ask_clouds,
    )


@app.command()
def iam(stack: StackName = None) -> None:
    """Print the IAM policy that deploying a stack on AWS needs. As JSON; planning and destroying need no more."""
    from skyinfra.preflight.permissions import policy

    tables.print_json(policy(synthesize(stack)))


def keep_jobs(stack: SynthesizedStack, project: Path, plan: Plan, *, destroy: bool = False) -> None:
    """Keeps the jobs of the fleets that lose some by *plan*, and prints what became of them."""
    with working(f"keep the jobs of {stack.name}"):
        found = list(keep_before(stack, plan, project, destroy=destroy))
    for done in found:
        tables.say(str(done), to_stderr=True)


def ask_to(verb: str, auto_approve: bool, question: str) -> bool:
    """Asks a *question* on the terminal; with *auto_approve* it is said alone. Ends where nobody can be asked."""
    if auto_approve:
        tables.say(question.rstrip("?"), to_stderr=True)
        return True
    can_be_asked(verb)
    return typer.confirm(question, err=True)


def print_event(kind: str, **fields: object) -> None:
    """Prints an event of a deploy: a line of JSON on stdout."""
    sys.stdout.write(json.dumps({"schema_version": tables.SCHEMA_VERSION, "event": kind, **fields}) + "\n")
    sys.stdout.flush()


def print_step(event: Event) -> None:
    """Prints a step of Terraform as an event: the begin and the end of a change. What programs print is left out."""
    if event.kind in ("start", "done", "failed"):
        print_event(event.kind, address=event.address, action=event.action, seconds=round(event.seconds, 3))


def _fleet(manifest: Manifest) -> dict[str, object]:
    """Describes a fleet without its secret."""
    return {
        "fleet": manifest.fleet,
        "provider": manifest.provider,
        "simulated": manifest.simulated,
        "nodes": manifest.node_count,
        "slots": len(manifest.slots) * manifest.node_count,
        "head": str(manifest.head),
    }


@dataclass(frozen=True)
class Approval:
    """Shows a plan, its cost and what ends with it, and asks whether to apply it.

    A deploy that replaces, destroys or stops nodes is asked for by the name of the stack. on_event: see `print_event`.
    """

    stack: SynthesizedStack
    verb: str
    auto_approve: bool
    cost: Cost | None = None
    on_event: Callable[..., None] | None = None

    def __call__(self, plan: Plan) -> bool:
        name = self.stack.name
        if self.on_event is not None:
            self.on_event("planned", **plan_document(name, plan, self.cost))
        show_plan(name, plan, to_stderr=True, cost=self.cost)
        show_transitions(self.stack, plan)
        ending = show_endings(self.stack, plan, to_stderr=True)
        if self.auto_approve:
            return True
        can_be_asked(self.verb)
        if ending and self.verb == "deploy":
            given: str = typer.prompt(
                f"Nodes of {name} end or are stopped. Type {name} to go on", default="", show_default=False, err=True
            )
            return given == name
        return typer.confirm(f"{self.verb.capitalize()} {name}?", err=True)


def show_endings(stack: SynthesizedStack, plan: Plan, *, to_stderr: bool = False) -> bool:
    """Prints the nodes that have ended themselves, and those that *plan* replaces, destroys, or stops and starts, why,
    and what runs there.

    Returns whether there are any of these.
    """
    for line in (*ended_nodes(stack, plan), *plan.notes):
        tables.say((line, "yellow"), to_stderr=to_stderr)
    found = endings(stack, plan)
    for ending in found:
        tables.say((str(ending), "red"), to_stderr=to_stderr)
    return bool(found)


def show_transitions(stack: SynthesizedStack, plan: Plan) -> None:
    """Prints on stderr what *plan* changes of the layouts of fleets that run."""
    for found in transitions(stack, plan):
        show_transition(found, to_stderr=True)


def show_fleets(stack: SynthesizedStack) -> None:
    """Prints a line for each deployed fleet."""
    out = tables.console()
    for manifest in stack.fleets().values():
        nodes = counted(manifest.node_count, "node")
        slots = counted(len(manifest.slots) * manifest.node_count, "slot")
        mark = tables.simulated_mark(manifest.simulated)
        out.print(f"{manifest.fleet}: {nodes}, {slots}{mark}, head {escape(str(manifest.head))}")


def wait_for_nodes(stack: SynthesizedStack, patience: float, on_event: Callable[..., None] | None = None) -> None:
    """Waits until the fleets of cloud nodes are ready, and prints their progress on stderr. on_event: `print_event`.

    Local nodes are ready when Terraform is. Raises the errors of `wait_until_ready`.
    """
    from skyinfra.client.lookup import wait_until_ready

    for name, manifest in stack.fleets().items():
        if manifest.provider == "local":
            continue

        def say(text: str, name: str = name) -> None:
            tables.say(f"{name}: {text}", to_stderr=True)
            if on_event is not None:
                on_event("waiting", pool=name, text=text)

        wait_until_ready(manifest, patience=patience, on_change=say)


@app.command()
def preflight(stack: StackName = None, as_json: Json = False, wide: Wide = False) -> None:
    """Ask the providers whether this account gets what a stack needs. Creates nothing."""
    from skyinfra.preflight import preflight as check

    selected = synthesize(stack)
    with working(f"preflight {selected.name}: asking the providers"):
        report = check(selected)
    if as_json:
        tables.print_document(report.to_json())
    else:
        show_report(report)
    if report.failed:
        raise typer.Exit(1)
