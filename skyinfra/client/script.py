"""Running a file of this machine as a program on a slot, as a task or as a job."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from skyinfra.client import files, jobs
from skyinfra.client.fleet import Fleet
from skyinfra.client.launching import Gang
from skyinfra.client.pool import Pool
from skyinfra.client.ranks import Launch, Received
from skyinfra.client.snapshot import Target
from skyinfra.errors import GangFailed, SkyinfraError, SlotLost, did_you_mean
from skyinfra.protocol.gang import Work
from skyinfra.protocol.secrets import Secret
from skyinfra.protocol.shortage import STREAM
from skyinfra.sync import project
from skyinfra.sync.includes import Includes
from skyinfra.sync.sync import Synced
from skyinfra.tasks.task import Task
from skyinfra.worker import cancellation, scripts
from skyinfra.worker.surroundings import BESIDE, PLACE

OnLine = Callable[[str, str], object]
# Called with the slot of a program that was interrupted.
OnInterrupt = Callable[[str], object]
OnWait = Callable[[], object]
# For which an interrupted program may clean up.
_CLEANS_S = 10.0


def ship(
    pool: Pool, script: Path, includes: Sequence[Path] = (), *, workdir: Path | None = None
) -> tuple[Synced, dict[str, str]]:
    """Syncs the project of *script* and *includes*; returns what that was, and variables for `run_script`.

    The script finds there what stands beside it here: modules, packages, data. Left out is what Git ignores, what
    `.skyinfraignore` lists, `includes.EXCLUDED`, and a file that holds the fleet's secret, as a manifest does. workdir:
    the folder that goes along instead, in a copy of which the script runs; a script inside of it has its place there.
    Raises what `Pool.sync` raises, `InvalidInclude` also for a project of more than 2,000 files or 100 MiB, and
    `NotSupported` by a fleet that is too old.
    """
    script = Path(os.path.normpath(script.absolute()))
    folder = workdir or project.folder_of(script)
    fleet = pool._fleet
    more = [path.absolute() for path in includes]
    if folder is None:
        fleet.includes = Includes(script.parent, fleet.manifest.secret)
        return (files.send(fleet, more, ()) if more else Synced("", 0, 0, 0, 0)), {}
    synced = files.send_project(fleet, folder, more)
    if workdir is None:
        return synced, {BESIDE: script.parent.relative_to(folder).as_posix()}
    place = script.relative_to(folder).as_posix() if script.is_relative_to(folder) else script.name
    return synced, {BESIDE: ".", PLACE: place}


def run_script(
    pool: Pool,
    path: Path | str,
    args: Sequence[str] = (),
    *,
    node: str | None = None,
    env: Mapping[str, str] | None = None,
    slots: int = 1,
    name: str | None = None,
    on_line: OnLine,
    on_interrupt: OnInterrupt = lambda _: None,
    on_wait: OnWait = lambda: None,
    waits_s: float = 2.0,
) -> int:
    """Runs ``python -u FILE ARGS`` on a slot and waits for it; its exit code, negative for the signal that ended it.

    The file's text travels; it runs in a new, empty folder with the slot's environment and *env*. node: on a slot of
    that node. slots: one process that sees so many of one node. name: of the task, in lists; by default the file's.
    on_line: called in this thread, while the program runs, with ``stdout`` or ``stderr`` and the text of each line, and
    with every line before this returns; where the memory of its device ran out, also with what the slot had and what
    would carry it. Ctrl-C interrupts the program as at its terminal, so that it may clean up; after ten seconds, at a
    second one, or after an exception of *on_line*, it is ended. on_interrupt: called with its slot when it was
    interrupted. on_wait: called, in another thread, where no slot has begun it after *waits_s* seconds; what the head
    tells of them is a second old. Like any task it starts again when its slot dies. Raises OSError where the file
    cannot be read.
    """
    path = Path(path)
    received: queue.SimpleQueue[list[list[str]] | None] = queue.SimpleQueue()
    target, fleet = _target(pool, node), pool._fleet
    if slots > 1:
        return _run_on_several(pool, target, path, args, env or {}, slots, on_line)
    run_id = uuid.uuid4().hex
    task = Task(scripts.script, (path.read_bytes(), path.name, list(args), dict(env or {}), fleet.topic, run_id))
    with fleet.listening(run_id, received.put):
        future = pool.send(task, target, name=name or path.name)
        future.when_done(lambda _: received.put(None))
        waits = threading.Timer(waits_s, tell_that_it_waits, [fleet, future.key, on_wait])
        waits.daemon = True
        waits.start()
        try:
            _pass_on(pool, received, on_line)
            return future.result()
        except KeyboardInterrupt:
            slot = fleet.in_loop(fleet.dispatcher.executor.on_slot_of(future.key, cancellation.interrupt))
            if slot is not None:
                on_interrupt(slot)
                _pass_on(pool, received, on_line, within_s=_CLEANS_S)
            raise
        finally:
            waits.cancel()
            future.cancel()


def tell_that_it_waits(fleet: Fleet, key: str, on_wait: OnWait) -> None:
    """Calls *on_wait* where no slot of *fleet* runs the task *key*, as its head tells it: about a second old."""
    with contextlib.suppress(SkyinfraError, OSError, RuntimeError):  # the task itself will say what is wrong
        running = fleet.from_head(fleet.connection.running())
        if not any(each == key or each.startswith(f"{key}.") for tasks in running.values() for each, _, _ in tasks):
            on_wait()


def _pass_on(
    pool: Pool, received: queue.SimpleQueue[list[list[str]] | None], on_line: OnLine, *, within_s: float | None = None
) -> None:
    """Hands all lines to *on_line* until the program has ended; at most for *within_s* seconds."""
    deadline = None if within_s is None else time.monotonic() + within_s
    with contextlib.suppress(queue.Empty):
        while True:
            lines = received.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            if lines is None:
                return
            for stream, text in lines:
                if stream == STREAM:
                    for said in pool._fleet.dispatcher.snapshot.explained(json.loads(text)):
                        on_line("stderr", said)
                    continue
                on_line(stream, text)


def _run_on_several(
    pool: Pool, target: Target, path: Path, args: Sequence[str], env: Mapping[str, str], slots: int, on_line: OnLine
) -> int:
    """Runs the program in one process that sees *slots* slots of one node."""
    received: queue.SimpleQueue[Received] = queue.SimpleQueue()
    work = Work(path.name, source=path.read_bytes(), args=tuple(args))
    key, included = f"{path.name}-{uuid.uuid4().hex}", pool._fleet.included
    launch = Launch(work, target, 1, slots, env=pool._fleet.variables(env), key=key, included=included)
    gang = Gang(pool._fleet, launch, lambda _, stream, text: on_line(stream, text))
    future = gang.start(received.put)
    try:
        while (found := received.get()) is not None:
            if isinstance(found, tuple):
                gang.tell(found)
        future.result()
    except GangFailed as error:
        if error.code is None:
            raise
        return error.code
    finally:
        future.cancel()
    return 0


def detach_script(
    pool: Pool,
    path: Path | str,
    args: Sequence[str] = (),
    *,
    name: str | None = None,
    priority: int = 0,
    replace: bool = False,
    env: Mapping[str, str] | None = None,
    notify: Sequence[str | Secret] = (),
) -> jobs.Job[int]:
    """Leaves ``python -u FILE ARGS`` with the head of *pool* as a job; see `run_script` for where it runs.

    Its result is the exit code 0; another one is `ScriptFailed`. Raises OSError where the file cannot be read.
    """
    path = Path(path)
    task = Task(scripts.detached, (path.read_bytes(), path.name, list(args), dict(env or {})))
    return jobs.detach(
        pool._fleet,
        pool.target,
        task,
        name,
        priority=priority,
        replace=replace,
        kind="script",
        shown=path.name,
        notify=notify,
    )


def _target(pool: Pool, node: str | None) -> Target:
    if node is None:
        return pool.target
    names = pool.node_names()
    if node not in names:
        hint = did_you_mean(node, names) or f"Nodes: {', '.join(names)}."
        raise SlotLost(f"{pool.manifest.fleet} has no node of that name", given=node, hint=hint)
    return Target(node=node, profile=pool.target.profile)
