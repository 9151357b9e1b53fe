"""``skyinfra watch``: keeps what the jobs of fleets need, and brings fleets back that have lost all of their nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from skyinfra.cli.jobs import resumed
from skyinfra.cli.options import (
    Notify,
    StackName,
    Yes,
    seconds,
    targets,
)
from skyinfra.cli.stacks import failover_of, synthesize, wait_for_nodes
from skyinfra.errors import DeployInterrupted, SkyinfraError
from skyinfra.failover.watching import Look, Loss, Seen, look, lost
from skyinfra.terminal import tables
from skyinfra.terraform.project import Project
from skyinfra.terraform.stores import Store, store_of
from skyinfra.terraform.synthesized import SynthesizedStack

app = typer.Typer()


@app.command()
def watch(
    stack: StackName = None,
    lost_after: Annotated[
        str, typer.Option("--lost-after", metavar="TIME", help="For how long a fleet must have had no slot.")
    ] = "15m",
    every: Annotated[str, typer.Option(metavar="TIME", help="Between two looks.")] = "1m",
    once: Annotated[bool, typer.Option("--once", help="Look once, as a schedule does.")] = False,
    auto_approve: Yes = False,
    patience: Annotated[str, typer.Option(metavar="TIME", help="For how long to wait for nodes.")] = "15m",
    notify: Notify = None,
) -> None:
    """Bring fleets back that have lost all of their nodes, at their next place, and their jobs with them. Until Ctrl-C,
    or once: exit code 1 where a fleet could not be looked at, or brought back.
    """
    limits = seconds("--lost-after", lost_after), seconds("--every", every)
    patience_s = seconds("--patience", patience, bare=True)
    recipients = targets(notify)
    project = Project.find()
    watching = _Watching(
        project, synthesize(stack, project, fresh=False), limits[0], auto_approve, patience_s, recipients
    )
    while True:
        done = watching.round()
        if once:
            raise typer.Exit(0 if done else 1)
        time.sleep(limits[1])


@dataclass
class _Watching:
    """Looks at the fleets of *stack*. lost_after: seconds without a slot, after which one has lost its nodes."""

    project: Project
    stack: SynthesizedStack
    lost_after: float
    auto_approve: bool
    patience: float
    recipients: Sequence[str]
    _said: dict[str, str] = field(default_factory=dict)

    def round(self) -> bool:
        """Looks at each fleet, and brings back those that have lost their nodes. Returns whether nothing went wrong."""
        done = True
        for pool in [each["name"] for each in self.stack.pools]:
            try:
                self._look(pool)
            except DeployInterrupted:
                raise
            except SkyinfraError as error:
                done = False
                self._say(pool, error.message, problem=True)
                self._notify(pool, "failed", error.message)
        return done

    def _look(self, pool: str) -> None:
        store = store_of(self.stack, self.project.base_of(self.stack))
        found = look(self.stack, pool, store)
        loss, why = lost(self.stack, found, self.lost_after)
        self._say(pool, f"{found.said}; {why}" if why else found.said)
        if loss is not None:
            self._bring_back(pool, store, found, loss, why)

    def _bring_back(self, pool: str, store: Store, found: Look, loss: Loss, why: str) -> None:
        failover = failover_of(self.stack, self.project, auto_approve=self.auto_approve)
        failover.refuse_elsewhere()
        # One that is cut off from then on goes on with a deploy, at the place that the file of places has then.
        begun = partial(Seen(since=0.0, waits=found.seen.waits, loss="again").write, store, pool)
        try:
            if loss == "again":
                begun()
            if (loss == "away" and not failover.leave(pool, why, begun)) or failover.deploy() is None:
                Seen(since=time.time(), waits=found.seen.waits).write(store, pool)
                return
        except SkyinfraError:
            with suppress(OSError, SkyinfraError):  # of the store: this error says what there is to do
                if Seen.read(store, pool).loss is not None:  # it is tried again, not at once
                    Seen(since=time.time(), waits=found.seen.waits, loss="again").write(store, pool)
            raise
        self.stack = failover.stack
        wait_for_nodes(self.stack, self.patience)
        words, _ = resumed(self.stack, pool, store)
        Seen().write(store, pool)
        where = next((each.get("place") for each in self.stack.pools if each["name"] == pool), None)
        text = f"is back{f' at {where}' if where else ''}; {words}"
        self._say(pool, text)
        self._notify(pool, "moved" if loss == "away" else "again", f"{why}; {text}")

    def _say(self, pool: str, text: str, *, problem: bool = False) -> None:
        """Prints what there is of a fleet, unless that was printed last."""
        if self._said.get(pool) != text:
            self._said[pool] = text
            line = f"{time.strftime('%H:%M:%S')} {self.stack.name}/{pool}: {text}"
            tables.say((line, "red") if problem else line)
            sys.stdout.flush()

    def _notify(self, pool: str, state: str, text: str) -> None:
        if self.recipients:
            from skyinfra.client.notifying import send
            from skyinfra.engine.notifications import Notice

            send(self.recipients, Notice(f"{self.stack.name}/{pool}", "fleet", state, problem=text))
