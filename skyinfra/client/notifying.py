"""Notifies people from here of the end of a script or a job, and of nodes that become sick before it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyinfra.client.jobs import COMMAND, Job
from skyinfra.client.questions import Questions
from skyinfra.engine.notifications import STARTS_NONE, Notice, node_notice, post, webhooks
from skyinfra.errors import DeclarationError, JobCancelled, SkyinfraError

# Between two looks at the nodes of a fleet.
_LOOK_S = 2.0
# For which a command that tells somebody may run.
_COMMAND_S = 60


@dataclass
class Ended:
    """The exit code of a script, as a shell gives it, and the targets that are notified of its end."""

    code: int = 0
    targets: Sequence[str] = ()

    def watching(self, pool: Questions) -> contextlib.AbstractContextManager[None]:
        """Notifies the targets of nodes that are sick within the block, see `notifying_of_sick`."""
        return notifying_of_sick(self.targets, pool)


@contextlib.contextmanager
def notifying_of_sick(targets: Sequence[str], pool: Questions) -> Iterator[None]:
    """Notifies *targets* of each node of *pool* that is sick within the block, as the head does for its jobs.

    A head that does not answer is asked again. What is being sent at the end of the block is sent before it ends.
    """
    if not targets:
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(targets, pool, over), name="skyinfra-sick", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(targets: Sequence[str], pool: Questions, over: threading.Event) -> None:
    known: set[str] = set()
    stopping: set[str] = set()
    lack = ""
    while True:
        # The task itself will say what is wrong.
        with contextlib.suppress(SkyinfraError, OSError, RuntimeError):
            state = pool.look().state
            sick = state.sick_nodes() if state is not None else {}
            for node, why in sorted(sick.items()):
                if node not in known:
                    send(targets, Notice(pool.manifest.fleet, f"node {node}", "sick", problem=why))
            known = set(sick)
            for node, text in sorted(state.stops.items()) if state is not None else ():
                if node not in stopping:
                    send(targets, node_notice(pool.manifest.fleet, node, text))
                    stopping.add(node)
            size = state.size if state is not None else None
            before, lack = lack, size.lack if size is not None else ""
            if size is not None and lack == "stopped" != before:
                head = next((node.name for node in pool.manifest.nodes if node.head), "")
                send(targets, node_notice(pool.manifest.fleet, head, f"{STARTS_NONE}: {size.problem}"))
        if over.wait(_LOOK_S):
            return


@contextlib.contextmanager
def notifying(targets: Sequence[str], pool: str, job: str) -> Iterator[Ended]:
    """Notifies *targets* of the end of the script *job*, which runs in the block; not of mistakes in its options."""
    ended, began, state, problem, code = Ended(targets=targets), time.monotonic(), "failed", None, None
    try:
        yield ended
        code = ended.code
        state = "failed" if code else "done"
    except (KeyboardInterrupt, SystemExit):
        state = "cancelled"
        raise
    except DeclarationError:
        targets = ()
        raise
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        raise
    finally:
        if targets:
            seconds = round(time.monotonic() - began, 3)
            send(targets, Notice(pool, job, state, seconds, code, problem=problem))


def notify_of_job(targets: Sequence[str], pool: Questions, job: Job[Any], timeout: float | None) -> None:
    """Waits for the end of *job* of *pool* and notifies *targets*, also of nodes that become sick before that.

    Raises TimeoutError.
    """
    with notifying_of_sick(targets, pool), contextlib.suppress(JobCancelled):
        job.outcome(timeout)
    send(targets, Notice.of(job.info(), pool.manifest.fleet))


def send(targets: Sequence[str], notice: Notice) -> None:
    """Sends *notice* to *targets*. One that cannot be reached is a line on stderr, and fails nothing."""
    for target in targets:
        if (said := _undelivered(target, notice)) is not None:
            sys.stderr.write(f"warning: {notice.name}: {said}\n")


def _undelivered(target: str, notice: Notice) -> str | None:
    """Returns why *target* did not get *notice*."""
    if not target.startswith(COMMAND):
        (webhook,) = webhooks([target])
        problem = post(webhook, notice)
        return problem and f"{webhook.host} was not notified: {problem}"
    given = {name: "" if value is None else str(value) for name, value in asdict(notice).items()}
    # A variable holds no more than 128 KiB.
    variables = {f"SKYINFRA_JOB_{name.upper()}": text[:4000] for name, text in given.items()}
    variables["SKYINFRA_SUBJECT"] = notice.subject
    try:
        command = ["/bin/sh", "-c", target.removeprefix(COMMAND)]
        done = subprocess.run(
            command,
            input=f"{notice.text}\n",
            stdout=2,  # stdout is for results
            env=os.environ | variables,
            encoding="utf-8",
            errors="replace",
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the command of --notify was ended after {_COMMAND_S} s"
    return (
        f"the command of --notify ended with {done.returncode if done.returncode >= 0 else 128 - done.returncode}"
        if done.returncode
        else None
    )
