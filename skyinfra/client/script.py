"""Running a file of this machine as a program on a slot, as a task or as a job."""

from __future__ import annotations

import json
import queue
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from skyinfra.client import files, jobs
from skyinfra.client.pool import Pool
from skyinfra.client.snapshot import Target
from skyinfra.errors import SlotLost, did_you_mean
from skyinfra.protocol.shortage import STREAM
from skyinfra.sync import project
from skyinfra.sync.includes import Includes
from skyinfra.sync.sync import Synced
from skyinfra.tasks.task import Task
from skyinfra.worker import scripts

OnLine = Callable[[str, str], object]


def ship(pool: Pool, script: Path, includes: Sequence[Path] = ()) -> tuple[Synced, dict[str, str]]:
    """Syncs the project of *script* and *includes*; returns what that was, and variables for `run_script`.

    The script finds there what stands beside it here: modules, packages, data. Left out is what Git ignores, what
    `.skyinfraignore` lists, `includes.EXCLUDED`, and a file that holds the fleet's secret, as a manifest does. Raises
    what `Pool.sync` raises, `InvalidInclude` also for a project of more than 2,000 files or 100 MiB, and `NotSupported`
    by a fleet that is too old.
    """
    script = script.absolute()
    folder = project.folder_of(script)
    fleet = pool._fleet
    if folder is None:
        fleet.includes = Includes(script.parent, fleet.manifest.secret)
        return (files.send(fleet, includes, ()) if includes else Synced("", 0, 0, 0, 0)), {}
    fleet.includes = Includes(folder, fleet.manifest.secret, most=(project.MOST_FILES, project.MOST_BYTES), skips=True)
    synced = files.send(fleet, [folder, *(path.absolute() for path in includes)], project.excludes_of(folder))
    return synced, {scripts.BESIDE: script.parent.relative_to(folder).as_posix()}


def run_script(
    pool: Pool,
    path: Path | str,
    args: Sequence[str] = (),
    *,
    node: str | None = None,
    env: Mapping[str, str] | None = None,
    on_line: OnLine,
) -> int:
    """Runs ``python -u FILE ARGS`` on a slot and waits for it; its exit code, negative for the signal that ended it.

    The file's text travels; it runs in a new, empty folder with the slot's environment and *env*. node: on a slot of
    that node. on_line: called in this thread, while the program runs, with ``stdout`` or ``stderr`` and the text of
    each line, and with every line before this returns; where the memory of its device ran out, also with what the slot
    had and what would carry it. Ctrl-C, or an exception of *on_line*, ends the program. Like
    any task it starts again when its slot dies. Raises OSError where the file cannot be read.
    """
    path = Path(path)
    run_id = uuid.uuid4().hex
    task = Task(scripts.script, (path.read_bytes(), path.name, list(args), dict(env or {}), pool._fleet.topic, run_id))
    received: queue.SimpleQueue[list[list[str]] | None] = queue.SimpleQueue()
    with pool._fleet.listening(run_id, received.put):
        future = pool.send(task, _target(pool, node))
        future.when_done(lambda _: received.put(None))
        try:
            while (lines := received.get()) is not None:
                for stream, text in lines:
                    if stream == STREAM:
                        for said in pool._fleet.dispatcher.snapshot.explained(json.loads(text)):
                            on_line("stderr", said)
                        continue
                    on_line(stream, text)
            return future.result()
        finally:
            future.cancel()


def detach_script(
    pool: Pool,
    path: Path | str,
    args: Sequence[str] = (),
    *,
    name: str | None = None,
    priority: int = 0,
    replace: bool = False,
    env: Mapping[str, str] | None = None,
) -> jobs.Job[int]:
    """Leaves ``python -u FILE ARGS`` with the head of *pool* as a job; see `run_script` for where it runs.

    Its result is the exit code 0; another one is `ScriptFailed`. Raises OSError where the file cannot be read.
    """
    path = Path(path)
    task = Task(scripts.detached, (path.read_bytes(), path.name, list(args), dict(env or {})))
    return jobs.detach(
        pool._fleet, pool.target, task, name, priority=priority, replace=replace, kind="script", shown=path.name
    )


def _target(pool: Pool, node: str | None) -> Target:
    if node is None:
        return pool.target
    names = pool.node_names()
    if node not in names:
        hint = did_you_mean(node, names) or f"Nodes: {', '.join(names)}."
        raise SlotLost(f"{pool.manifest.fleet} has no node of that name", given=node, hint=hint)
    return Target(node=node, profile=pool.target.profile)
