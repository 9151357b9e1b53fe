"""What the commands about jobs print; see `skyinfra.cli.jobs`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from skyinfra.cli import tables
from skyinfra.errors import InvalidField, NodeError, ScriptFailed, SkyinfraError, TaskError, TaskFailed
from skyinfra.protocol import questions

if TYPE_CHECKING:
    from skyinfra.client import Job, Pool
    from skyinfra.protocol.jobs import JobInfo

_POLL_S = 1.0
_STYLES = {"running": "green", "failed": "red", "cancelled": "yellow"}


def show_jobs(fleet: str, *, as_json: bool) -> None:
    """Prints the jobs that the head of *fleet* keeps."""
    from skyinfra.client import connect

    with connect(fleet) as pool:
        found = pool.jobs()
    if as_json:
        tables.print_json({"jobs": [job.to_json() for job in found]})
        return
    made = tables.table("NAME", "STATE", "TASK", "SUBMITTER", "PRIORITY", "SUBMITTED", "RAN", "SLOT", "ID", "PROBLEM")
    now = time.time()
    for job in found:
        made.add_row(
            escape(job.name),
            _state(job),
            escape(job.task),
            escape(job.submitter),
            str(job.priority),
            f"{tables.span(now - job.submitted)} ago",
            _ran(job, now),
            escape(job.slot or ""),
            job.id[:8],
            escape(job.problem or ""),
        )
    tables.console().print(made)


def show_logs(fleet: str, job: str, *, lines: int, follow: bool) -> None:
    """Prints what *job* has printed. *follow*: until it has ended."""
    from skyinfra.client import connect

    with connect(fleet) as pool:
        found = pool.job(job)
        info = found.info()
        if info.slot is None and not follow:
            sys.stderr.write(f"job {info.name} is {info.state} and has printed nothing\n")
            return
        _Printer(pool, found, lines).run(follow=follow)


def cancel_job(fleet: str, job: str) -> bool:
    """Takes *job* back; whether it had not ended."""
    from skyinfra.client import connect

    with connect(fleet) as pool:
        found = pool.job(job)
        cancelled = found.cancel()
        if cancelled:
            sys.stdout.write(f"{found.name}: cancelled\n")
        else:
            sys.stderr.write(f"job {found.name} has ended already: {found.state}\n")
    return cancelled


def show_result(fleet: str, job: str, *, timeout: float | None, output: Path | None, as_json: bool) -> int:
    """Waits for *job* and prints its result, or writes it to *output*; the exit code of a script, 0 of others.

    Raises the `SkyinfraError` that the task raised, and `TaskFailed` with the traceback for another exception.
    """
    from skyinfra.client import connect

    with connect(fleet) as pool:
        found = pool.job(job)
        try:
            if output is not None:
                _write(found, output, timeout)
            else:
                _print_result(found, timeout, as_json=as_json)
        except ScriptFailed as failed:
            sys.stderr.write(f"{failed}\n")
            return failed.code if failed.code >= 0 else 128 - failed.code
        except TimeoutError as late:
            raise TaskError(str(late), hint="It goes on; ask again later.") from None
    return 0


def submit_script(
    fleet: str, script: Path, arguments: Sequence[str], *, name: str | None, priority: int, replace: bool
) -> None:
    """``skyinfra run --detach``: leaves *script* with the head, and prints the job's name."""
    if not script.is_file():
        raise InvalidField("there is no such file", field="SCRIPT", given=str(script))
    from skyinfra.client import connect, detach_script

    with connect(fleet) as pool:
        job = detach_script(pool, script, list(arguments), name=name, priority=priority, replace=replace)
    sys.stdout.write(f"{job.name}\n")
    sys.stderr.write(f"`skyinfra jobs logs {fleet} {job.name} --follow` shows what it prints.\n")


class _Printer:
    """Prints what a job prints, on every slot that it runs on."""

    def __init__(self, pool: Pool, job: Job[Any], lines: int) -> None:
        self._pool = pool
        self._job = job
        self._lines = lines
        # The attempt that is being printed, and how far it is.
        self._attempt: int | None = None
        self._offset: int | None = None

    def run(self, *, follow: bool) -> None:
        """Until there is no more, or with *follow* until the job has ended."""
        while True:
            # Nothing is printed after the end, so that what is read now is the whole.
            info = self._job.info()
            while self._part(info):
                pass
            if info.over or not follow:
                return
            time.sleep(_POLL_S)

    def _part(self, info: JobInfo) -> bool:
        """Prints a part; whether there may be another one."""
        if info.slot is None:
            return False
        if info.attempts != self._attempt:
            # Of the first one that is seen, the last lines; of those after it, everything.
            self._offset = None if self._attempt is None else 0
            self._attempt = info.attempts
        try:
            found = self._pool.ask(
                info.slot.rpartition("/")[0],
                questions.LOG,
                source="task",
                # The whole name of the file: the keys of other attempts may begin as this one's.
                task=f"{info.key}.{info.attempts}.log",
                offset=self._offset,
                lines=self._lines,
            )
        except NodeError:
            if info.over:
                raise
            return False  # it goes on elsewhere, or its node comes back
        if found is None:
            return False
        self._offset = found["offset"]
        sys.stdout.write(found["text"])
        sys.stdout.flush()
        return bool(found["text"])


def _print_result(job: Job[Any], timeout: float | None, *, as_json: bool) -> None:
    error = job.exception(timeout)
    if error is not None:
        raise _for_a_person(job, error)
    value = job.result(timeout)
    if not as_json:
        if value is not None:
            sys.stdout.write(f"{value if isinstance(value, str) else repr(value)}\n")
        return
    try:
        tables.print_json(value)
    except (TypeError, ValueError) as reason:
        raise InvalidField(
            f"the result of {job.name} is no JSON: {reason}", field="--json", hint="--output writes it to a file."
        ) from None


def _write(job: Job[Any], output: Path, timeout: float | None) -> None:
    error = job.exception(timeout)
    if error is not None:
        raise _for_a_person(job, error)
    try:
        output.write_bytes(job.outcome(timeout).result or b"")
    except OSError as reason:
        raise InvalidField(f"cannot be written: {reason.strerror}", field="--output", given=str(output)) from None


def _for_a_person(job: Job[Any], error: BaseException) -> SkyinfraError:
    """What the task raised; with its traceback, where the message does not say enough."""
    if isinstance(error, SkyinfraError):
        return error
    text = job.outcome(0).failure
    return TaskFailed(f"job {job.name} raised an exception:\n{text.text.rstrip() if text is not None else error}")


def _ran(job: JobInfo, now: float) -> str:
    if job.started is None:
        return ""
    return tables.span((job.ended or now) - job.started) + (f", attempt {job.attempts}" if job.attempts > 1 else "")


def _state(job: JobInfo) -> str:
    style = _STYLES.get(job.state)
    return f"[{style}]{job.state}[/]" if style else job.state
