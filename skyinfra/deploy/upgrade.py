"""Bringing the runner of a deployed fleet to this version of skyinfra.

The new runner is installed beside the old one on every node first. Then all nodes are drained and go over to it
together, so that the new head meets new nodes. Jobs wait in the head's journal and go on; a node on which the new
runner does not serve goes back to the old one.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from skyinfra.deploy.apply import carry_out
from skyinfra.errors import FleetError, NodeError, NotSupported, UpgradeFailed, counted
from skyinfra.node import code
from skyinfra.protocol import questions
from skyinfra.protocol.manifest import Manifest
from skyinfra.providers import kinds, read
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client import Questions

_POLL_S = 1.0
_ANSWER_S = 30.0
# Root fetches and installs a Python and packages; it gives each step a limit of its own.
_PREPARE_S = 1800.0
# After the tasks' time their workers end.
_SLACK_S = 60.0
# Root's patience with a runner that does not serve, twice: for the new one and for the old one.
_SWITCH_S = 480.0

Answer = dict[str, Any]


@dataclass(frozen=True)
class Running:
    """The runner of a node: its ``version``, None where it is of a skyinfra that knows no upgrade; ``problem``: why it
    did not answer."""

    version: str | None
    problem: str | None = None


def running(pool: Questions, names: Iterable[str]) -> dict[str, Running]:
    """Returns which runner each of the nodes *names* has."""
    return {name: _running(answer) for name, answer in _ask(pool, names, "look").items()}


def _running(answer: Answer | NodeError) -> Running:
    if isinstance(answer, NodeError):
        older = answer.message.startswith(NotSupported.__name__)
        return Running(None, None if older else answer.message)
    return Running(str(answer.get("version")))


def check_kind(manifest: Manifest) -> None:
    """Raises `NotSupported` where the nodes of the fleet cannot be upgraded as they are."""
    kind, pool = manifest.provider, manifest.pool
    if kind == "gcp" and manifest.max_nodes:
        hint = "Replace the nodes, as docs/upgrading.md says; the jobs go on."
        raise NotSupported("its machines that have stopped cannot be upgraded", field=manifest.fleet, hint=hint)
    if kind == "local" or _carrying(kind):
        return
    again = f"`skyinfra deploy {manifest.stack} --replace module.{pool}.terraform_data.delivered` makes them anew with "
    raise NotSupported(
        f"nodes of {kind} cannot be upgraded",
        field=manifest.fleet,
        hint=f"{again}the runner of this skyinfra; the jobs go on." if kind == "container" else None,
    )


def _carrying(kind: str) -> list[str]:
    """The resources of a module that carry the runner to its nodes: those of the runner and of its versions, and what
    hands them over. Empty where there are none.
    """
    carrying: list[str] = read(kind).terraform.get("runner", []) if kind in kinds() else []
    return carrying


def wanted(stack: SynthesizedStack, manifest: Manifest) -> str | None:
    """Returns the version of the runner that *stack* has for the fleet; None where the pool's image names another."""
    if manifest.provider == "local":
        return code.version()
    file = str(stack.modules[manifest.pool].get("runner_file", ""))
    found = re.match(r"skyinfra-([^-]+)-", PurePosixPath(file).name)
    return found.group(1) if found else None


@dataclass
class Upgrade:
    """Upgrades the fleet of *manifest*, whose nodes are *names*, to what *stack* carries.

    pool: asks it, in whichever version it is. drain_s: for how long tasks may go on. say: hears, in words, how far it
    is.
    """

    stack: SynthesizedStack
    manifest: Manifest
    pool: Questions
    names: list[str]
    drain_s: float
    say: Callable[[str], object]
    _id: str = field(default_factory=lambda: secrets.token_hex(8))

    def run(self) -> dict[str, str]:
        """Upgrades every node. Returns, by node, why it has gone back to its runner; empty where all are upgraded.

        Raises `UpgradeFailed` where nothing was changed, `NotSupported`, and what `carry_out` raises.
        """
        local = self.manifest.provider == "local"
        if not local:
            self._publish()
            self._prepare()
        with self._drained():
            return self._restart_here() if local else self._switch()

    # Before anything ends --------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Puts the runner and its versions where nodes take them from, those too that come later."""
        name = self.manifest.pool
        module = self.stack.module_of(name)
        runner, versions, *named = (f"module.{module}.{part}" for part in _carrying(self.manifest.provider))
        carried = PurePosixPath(str(self.stack.modules[name].get("runner_file", ""))).name
        self._name(versions)
        there = {r.attributes.get("key") for r in self.stack.resources() if (r.module, r.name) == (name, "runner")}
        # Made anew under the same key it would be removed again with the old one.
        again = [versions, runner] if carried and carried not in there else [versions]
        kept = {runner, versions, *named}

        def approve(plan: Plan) -> bool:
            others = [address for action, address in plan.changes if action != "update" and address not in kept]
            if others:
                raise UpgradeFailed(
                    f"more than the runner would change: {', '.join(others)}",
                    hint=f"Deploy the stack first, with `skyinfra deploy {self.stack.name}`, and look at its plan.",
                )
            return True

        carry_out(self.stack, approve=approve, replace=again, target=[*named, versions, runner])

    def _name(self, versions: str) -> None:
        """Gives the resources of a fleet of a version before the names that they have now, which a target needs.

        versions: the address of one.
        """
        pool, _, ending = self.manifest.pool, *versions.rpartition(".terraform_data.")[1:]
        existing = [r for r in self.stack.resources() if (r.module, r.type) == (pool, "terraform_data")]
        if all(r.address == versions for r in existing if f"{r.name}[{r.key}]" == ending):
            return
        if carry_out(self.stack, approve=lambda plan: False) is None:
            raise UpgradeFailed(
                "the modules of this skyinfra change more of the stack than the runner",
                hint=f"Deploy the stack first, with `skyinfra deploy {self.stack.name}`, and look at its plan.",
            )

    def _prepare(self) -> None:
        self.say("installing the new runner beside the old one")
        answers = self._until(
            "prepare", lambda a: _record(a).get("state") in ("prepared", "current", "failed"), _PREPARE_S
        )
        failed = {name: _record(answer).get("error", "") for name, answer in answers.items() if _failed(answer)}
        if failed:
            raise UpgradeFailed(
                "; ".join(f"{name}: {error}" for name, error in failed.items()),
                hint="Nothing was changed on the nodes: they serve with the runner that they had. Later nodes "
                "take the new one. Mend the cause and upgrade again.",
            )

    @contextlib.contextmanager
    def _drained(self) -> Iterator[None]:
        """Takes all nodes out of service for the block; takes those back afterwards whose runner was not replaced."""
        try:
            if self.manifest.provider == "local":
                for name in self.names:
                    if problem := self._run_here(name, "--drain", str(self.drain_s)):
                        raise UpgradeFailed(f"{name} cannot be drained: {problem}", hint="Nothing was changed.")
            else:
                _all(_ask(self.pool, self.names, "drain", seconds=self.drain_s))
            self._wait_for_tasks()
            yield
        finally:
            with contextlib.suppress(FleetError):
                if self.manifest.provider == "local":
                    for name in self.names:
                        self._run_here(name, "--cancel")
                else:
                    _ask(self.pool, self.names, "cancel")

    def _wait_for_tasks(self) -> None:
        until = time.monotonic() + self.drain_s + _SLACK_S
        said = ""
        while True:
            now = self.pool.look()
            tasks = sum(map(len, self.pool.running().values()))
            text = f"{counted(tasks, 'task')} still running" if tasks else "the workers end"
            if not now.slots and not now.draining:
                return
            if text != said:
                self.say(text)
                said = text
            if time.monotonic() > until:
                raise UpgradeFailed(f"the nodes are not drained within {self.drain_s:g} s", hint="Nothing was changed.")
            time.sleep(_POLL_S)

    # The change ------------------------------------------------------------------------------------------------------

    def _switch(self) -> dict[str, str]:
        self.say("the nodes go over to the new runner")
        ended = ("done", "back", "failed", "current")
        answers = self._until("switch", lambda a: _record(a).get("state") in ended and bool(a.get("state")), _SWITCH_S)
        return {name: _record(answer).get("error", "") for name, answer in answers.items() if _failed(answer)}

    def _restart_here(self) -> dict[str, str]:
        """Returns the head first: the others find it then."""
        heads = {node.name for node in self.manifest.nodes if node.head}
        for name in sorted(self.names, key=lambda each: each not in heads):
            self.say(f"{name} moves to the new runner")
            wait_s = self.stack.modules[self.manifest.pool]["wait_seconds"]
            problem = self._run_here(name, "--wait", str(wait_s))
            if problem:
                # The others would meet an old head, or an old node a new head.
                return {name: problem}
        return {}

    def _run_here(self, name: str, *options: str) -> str:
        """Runs `skyinfra-runner upgrade` for a node of this machine; returns what went wrong."""
        root = self.stack.modules[self.manifest.pool]["root"]
        file = Path(self.stack.folder, root, self.manifest.stack, self.manifest.pool, name, "node.json").resolve()
        command = [sys.executable, "-P", "-m", "skyinfra.runner", "upgrade", "--config", str(file), *options]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        return done.stderr.strip() if done.returncode else ""

    # Asking ----------------------------------------------------------------------------------------------------------

    def _until(self, step: str, ended: Callable[[Answer], bool], seconds: float) -> dict[str, Answer]:
        """Asks every node for *step*, and how far it is, until the step has *ended* on each.

        A node that is not heard of within *seconds* counts as failed.
        """
        until = time.monotonic() + seconds
        left, found = dict.fromkeys(self.names, step), dict[str, Answer]()
        request_id = f"{self._id}{'0' if step == 'prepare' else '1'}"
        problem = ""
        while left and time.monotonic() < until:
            # A request that root's part did not notice is made again: root does it once.
            for name, answer in self._asked(left, request_id).items():
                if isinstance(answer, NodeError):
                    problem = answer.message
                    if not problem.startswith(NotSupported.__name__):
                        continue
                    answer = {"record": {"request": request_id, "state": "failed", "error": problem}}
                mine = _record(answer).get("request") == request_id
                left[name] = "look" if mine else step
                if mine and ended(answer):
                    found[name] = answer
                    del left[name]
            time.sleep(_POLL_S)
        late = f"nothing was heard of it within {seconds:g} s: {problem}"
        return {**found, **{name: {"record": {"state": "failed", "error": late}} for name in left}}

    def _asked(self, left: dict[str, str], request_id: str) -> dict[str, Answer | NodeError]:
        answers: dict[str, Answer | NodeError] = {}
        for step in sorted(set(left.values())):
            names = [name for name, each in left.items() if each == step]
            extra = {} if step == "look" else {"request_id": request_id}
            try:
                answers |= _ask(self.pool, names, step, **extra)
            except FleetError as error:  # the head restarts
                answers |= {name: NodeError(error.message) for name in names}
        return answers


def _record(answer: Answer) -> dict[str, str]:
    record = answer.get("record")
    return record if isinstance(record, dict) else {}


def _failed(answer: Answer) -> bool:
    return _record(answer).get("state") in ("failed", "back")


def _ask(pool: Questions, names: Iterable[str], step: str, **arguments: Any) -> dict[str, Answer | NodeError]:
    return pool.ask_all(list(names), questions.UPGRADE, wait_s=_ANSWER_S, step=step, **arguments)


def _all(answers: dict[str, Answer | NodeError]) -> None:
    """Raises the error of the first node that answers with one."""
    for name, answer in answers.items():
        if isinstance(answer, NodeError):
            raise UpgradeFailed(f"{name}: {answer.message}", hint="Nothing was changed.") from None
