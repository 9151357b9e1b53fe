"""Running a file of this machine as a program on a slot, as a task or as a job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from skyinfra.blobs import copies
from skyinfra.blobs.trees import Entry
from skyinfra.client import files, jobs
from skyinfra.client.launching import Gang
from skyinfra.client.pool import Pool
from skyinfra.client.ranks import Launch, Received
from skyinfra.errors import GangFailed, SkyinfraError, SlotLost, TaskTimeout, counted, did_you_mean
from skyinfra.protocol.calls import BESIDE, FETCH, LIMIT, PLACE
from skyinfra.protocol.gang import Work
from skyinfra.protocol.jobs import KEEPING, WRITTEN, Written
from skyinfra.protocol.secrets import Secret
from skyinfra.protocol.shortage import STREAM
from skyinfra.submission.fleet import Fleet
from skyinfra.submission.snapshot import Target
from skyinfra.sync import bringing, project
from skyinfra.sync.bringing import Here
from skyinfra.sync.includes import Includes
from skyinfra.sync.sync import Synced
from skyinfra.tasks.task import Options, Task
from skyinfra.worker import cancellation, scripts

OnLine = Callable[[str, str], object]
# Called with the slot of a program that was interrupted.
OnInterrupt = Callable[[str], object]
OnWait = Callable[[], object]
# Called with the files that a program wrote: first, where some are on their way, with those, then with all.
OnFiles = Callable[[str, Written], object]
# For which an interrupted program may clean up.
_CLEANS_S = 10.0


def ship(
    pool: Pool, script: Path, includes: Sequence[Path] = (), *, workdir: Path | None = None
) -> tuple[Synced, dict[str, str]]:
    """Syncs the project of *script* and *includes*; returns what that was, and variables for `run_script`.

    The script finds there what stands beside it here: modules, packages, data. Left out is what Git ignores and what
    `.skyinfraignore` lists, but not of *includes*; `includes.EXCLUDED`; and a file that holds the fleet's secret, as a
    manifest does. workdir: the folder that goes along instead, in a copy of which the script runs; a script inside of
    it has its place there.
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
    fetch: Sequence[str] = (),
    on_files: OnFiles | None = None,
    settings: Options | None = None,
) -> int:
    """Runs ``python -u FILE ARGS`` on a slot and waits for it; its exit code, negative for the signal that ended it.

    The file's text travels; it runs in a new, empty folder with the slot's environment and *env*. node: on a slot of
    that node. slots: one process that sees so many of one node. name: of the task, in lists; by default the file's.
    on_line: called in this thread, while the program runs, with ``stdout`` or ``stderr`` and the text of each line, and
    with every line before this returns; where the memory of its device ran out, also with what the slot had and what
    would carry it. Ctrl-C interrupts the program as at its terminal, so that it may clean up; after ten seconds (two on
    several slots), at a second one, or after an exception of *on_line*, it is ended. on_interrupt: called with its slot
    when it was interrupted on one. on_wait: called, in another thread, where no slot has begun it after *waits_s*
    seconds; what the head tells of them is a second old. fetch: lines as in a .gitignore for the files that it writes
    in its folder: when it has ended, however that is, they are at the head. on_files: called with `jobs.KEEPING` while
    they are on their way, then with `jobs.WRITTEN`. settings: of its task, of which timeout, profile and
    gpu_memory_gb hold here; an exit code is no exception, and uses no retry. Like any task it starts again when its
    slot dies. Raises `TaskTimeout`, and OSError where the file cannot be read.
    """
    path = Path(path)
    if on_files is not None:
        env = {**(env or {}), FETCH: json.dumps(list(fetch))}
    show = _Shown(pool, on_line, on_files)
    received: queue.SimpleQueue[list[list[str]] | None] = queue.SimpleQueue()
    settings = settings or Options()
    target, fleet = _target(pool, node).of(settings), pool._fleet
    if slots > 1:
        return _run_on_several(pool, target, path, args, env or {}, slots, name or path.name, show, settings)
    run_id = uuid.uuid4().hex
    env, settings = _limited(env or {}, settings)
    call = path.read_bytes(), path.name, list(args), env, fleet.topic, run_id
    task = Task(scripts.script, call, settings=settings)
    with fleet.listening(run_id, received.put):
        future = pool.send(task, target, name=name or path.name)
        future.when_done(lambda _: received.put(None))
        waits = threading.Timer(waits_s, say_that_it_waits, [fleet, future.key, on_wait])
        waits.daemon = True
        waits.start()
        try:
            _pass_on(received, show)
            return future.result()
        except KeyboardInterrupt:
            slot = fleet.in_loop(fleet.dispatcher.executor.on_slot_of(future.key, cancellation.interrupt))
            if slot is not None:
                on_interrupt(slot)
                _pass_on(received, show, within_s=_CLEANS_S)
            raise
        finally:
            waits.cancel()
            future.cancel()


def say_that_it_waits(fleet: Fleet, key: str, on_wait: OnWait) -> None:
    """Calls *on_wait* where no slot of *fleet* runs the task *key*, as its head tells it: about a second old."""
    with contextlib.suppress(SkyinfraError, OSError, RuntimeError):  # the task itself will say what is wrong
        running = fleet.from_head(fleet.connection.running())
        if not any(each == key or each.startswith(f"{key}.") for tasks in running.values() for each, _, _ in tasks):
            on_wait()


@dataclass
class _Shown:
    """Takes the lines of a program. keeping: whether files that it wrote are on their way to the head."""

    pool: Pool
    on_line: OnLine
    on_files: OnFiles | None
    keeping: bool = False

    def __call__(self, stream: str, text: str) -> None:
        if stream in (KEEPING, WRITTEN):
            self.keeping = stream == KEEPING
            if self.on_files is not None:
                self.on_files(stream, Written.read(json.loads(text)))
        elif stream == STREAM:
            for said in self.pool._fleet.dispatcher.snapshot.explained(json.loads(text)):
                self.on_line("stderr", said)
        else:
            self.on_line(stream, text)


def _pass_on(
    received: queue.SimpleQueue[list[list[str]] | None], show: _Shown, *, within_s: float | None = None
) -> None:
    """Shows all lines until the program has ended; at most for *within_s* seconds, and while it sends its files."""
    deadline = None if within_s is None else time.monotonic() + within_s
    with contextlib.suppress(queue.Empty):
        while True:
            waits = deadline is not None and not show.keeping
            lines = received.get(timeout=max(0.0, cast(float, deadline) - time.monotonic()) if waits else None)
            if lines is None:
                return
            for stream, text in lines:
                show(stream, text)


def _run_on_several(
    pool: Pool,
    target: Target,
    path: Path,
    args: Sequence[str],
    env: Mapping[str, str],
    slots: int,
    name: str,
    show: _Shown,
    settings: Options,
) -> int:
    """Runs the program in one process that sees *slots* slots of one node."""
    received: queue.SimpleQueue[Received] = queue.SimpleQueue()
    work = Work(path.name, source=path.read_bytes(), args=tuple(args))
    key, included = f"{name}-{uuid.uuid4().hex}", pool._fleet.included
    variables = pool._fleet.variables(env)
    launch = Launch(work, target, 1, slots, env=variables, key=key, name=name, included=included, settings=settings)
    gang = Gang(pool._fleet, launch, lambda _, stream, text: show(stream, text))
    future = gang.start(received.put)
    try:
        while (found := received.get()) is not None:
            if isinstance(found, tuple):
                gang.update(found)
        future.result()
    except GangFailed as error:
        if error.code is None:
            raise
        if isinstance(error.__cause__, TaskTimeout):
            raise error.__cause__ from None
        return error.code
    except KeyboardInterrupt:
        gang.end(future, received)
        raise
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
    fetch: Sequence[str] = (),
    settings: Options | None = None,
) -> jobs.Job[int]:
    """Leaves ``python -u FILE ARGS`` with the head of *pool* as a job; see `run_script` for where it runs.

    Its result is the exit code 0; another one is `ScriptFailed`. fetch: which of the files that it writes the head
    keeps, for `Job.fetch`. settings: of its task. Raises OSError where the file cannot be read.
    """
    path = Path(path)
    env, settings = _limited({**(env or {}), FETCH: json.dumps(list(fetch))}, settings or Options())
    task = Task(scripts.detached, (path.read_bytes(), path.name, list(args), env), settings=settings)
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


def _limited(env: Mapping[str, str], settings: Options) -> tuple[dict[str, str], Options]:
    """Returns the variables of a script, with its timeout, and the options of its task, without."""
    if settings.timeout is None:
        return dict(env), settings
    return {**env, LIMIT: str(settings.timeout)}, dataclasses.replace(settings, timeout=None)


def _target(pool: Pool, node: str | None) -> Target:
    if node is None:
        return pool.target
    names = pool.node_names()
    if node not in names:
        hint = did_you_mean(node, names) or f"Nodes: {', '.join(names)}."
        raise SlotLost(f"{pool.manifest.fleet} has no node of that name", given=node, hint=hint)
    return Target(node=node, profile=pool.target.profile)


@dataclass
class Fetching:
    """Takes what the ranks of the script *name* wrote, and brings what *fetch* names to *folder*.

    since: when its files were sent, in UNIX seconds. variables: for the script, so that it is told.
    """

    pool: Pool
    folder: Path
    name: str
    fetch: tuple[str, ...] = ()
    since: float = field(default_factory=time.time)
    _written: dict[int, Written] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a script that tells what it wrote."""
        return {FETCH: json.dumps(list(self.fetch))}

    def take(self, kind: str, written: Written, rank: int = 0) -> None:
        """Takes what a rank wrote."""
        if kind == WRITTEN:
            self._written[rank] = written

    def bring(self, *, whole: bool = True) -> Iterator[str]:
        """Brings the files, and yields what is to be said of all, a line each, of what the fleet does not give too.

        whole: whether the script has ended by itself, and has told what it wrote.
        """
        for rank, written in sorted(self._written.items()):
            if written.tree is not None:
                here = Here(self.folder, self.since, self._sent(), f"rank-{rank}/" if rank else "")
                try:
                    yield from bringing.sentences(files.bring(self.pool._fleet, written.tree, here), self.folder)
                except (SkyinfraError, OSError) as error:
                    yield f"{copies.in_all(written.kept_count, written.kept_bytes)} not fetched: {error}"
            if written.problem:
                yield f"not fetched: {written.problem}"
        if self.fetch and not self._written and not whole:
            yield f"what {self.name} wrote was not fetched: it was ended before that had been sent"
        elif self.fetch and not any(each.tree or each.problem for each in self._written.values()):
            yield f"{self.name} wrote no file that --fetch names ({' '.join(self.fetch)})"
        yield from self._left()

    def _left(self) -> Iterator[str]:
        first, others = self._written.get(0), [each for rank, each in self._written.items() if rank and each.left_count]
        how = "" if self.fetch else "; `--fetch PATTERN` brings such files here"
        if first is not None and first.left_count:
            which = copies.said(first.left, first.left_count, first.left_bytes)
            yield f"{self.name} wrote {which} in its copy of the folder, which is removed{how}"
            how = ""
        if others:
            count, size = sum(each.left_count for each in others), sum(each.left_bytes for each in others)
            ranks = counted(len(others), "other rank")
            yield f"{ranks} wrote {copies.in_all(count, size)} in copies of their own{how}"

    def _sent(self) -> dict[Path, Entry]:
        included = self.pool._fleet.included
        return {} if included is None else {included.places[path]: each for path, each in included.tree.files.items()}
