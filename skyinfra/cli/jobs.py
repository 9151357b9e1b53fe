"""``skyinfra jobs``: the jobs that the head of a fleet keeps and runs."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from skyinfra.blobs import copies
from skyinfra.cli.options import (
    Fleet,
    JobName,
    Json,
    Lines,
    Notify,
    Wide,
    errors_name_options,
    exit_code,
    named_secret,
    named_target,
    seconds,
    targets,
    write,
)
from skyinfra.deploy.kept import GONE, keep_now, kept_jobs, why_gone
from skyinfra.errors import (
    CredentialsRefused,
    FleetNotDeployed,
    FleetUnreachable,
    InvalidField,
    JobCancelled,
    JobNotFound,
    NodeError,
    ScriptFailed,
    SkyinfraError,
    TaskError,
    TaskFailed,
    written,
)
from skyinfra.protocol import questions
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.readings import Progress
from skyinfra.terminal import names, tables
from skyinfra.terminal.progress import asked, working
from skyinfra.terraform.project import Project
from skyinfra.terraform.stores import Store, store_of
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client import Job, Questions

_POLL_S = 1.0
# A node that answers takes no longer; one that an attempt of a job has left may be gone.
_ANSWER_S = 30.0
_REST_S = 10.0
# Between two looks for a fleet that is gone.
_AGAIN_S = 5.0
_KEEP_S = 3600.0
_STYLES = {"running": "green", "failed": "red", "cancelled": "yellow"}

app = typer.Typer()


@app.command("list")
def list_jobs(fleet: Fleet, as_json: Json = False, wide: Wide = False) -> None:
    """List the jobs that the head keeps. `skyinfra jobs STACK/POOL` does the same."""
    kept: dict[str, object] | None = None
    progress: dict[str, Progress] = {}
    try:
        with asked(fleet) as pool:
            found, simulated, work = pool.jobs(), pool.manifest.simulated, pool.work()
        slots = work.progress if work is not None else {}
        running = {each.id: each.slot or "" for each in found if each.state == "running"}
        progress = {job: slots[slot] for job, slot in running.items() if slot in slots}
        names.remember_jobs(fleet, (job.name for job in found))
    except GONE as error:
        found, kept, simulated = _kept(fleet, error)
    if as_json:
        documents = {name: each.to_json() for name, each in progress.items()}
        document: dict[str, object] = {"jobs": [{**job.to_json(), "progress": documents.get(job.id)} for job in found]}
        tables.print_document(document | ({"kept": kept} if kept else {}))
        return
    if not found:
        tables.say(f"{fleet} has no jobs")
        return
    made = tables.table(
        *("NAME", "STATE", "TASK", "SUBMITTER", "PRIORITY", "SUBMITTED", "RAN", "USED", "SLOT", "ID", "PROBLEM"),
        leave_out=("ID", "PRIORITY", "SUBMITTER", "USED", "TASK", "SLOT", "SUBMITTED"),
        sentences=("NAME", "TASK", "USED", "PROBLEM"),
    )
    now = time.time()
    for job in found:
        style, used = _STYLES.get(job.state), tables.used(job.figures)
        state = job.state if kept is None or job.over else f"{job.state} when kept"
        state += f", {tables.steps(progress[job.id])}" if job.id in progress else ""
        made.add_row(
            escape(job.name),
            f"[{style}]{state}[/]" if style else state,
            escape(job.task),
            escape(job.submitter),
            str(job.priority),
            f"{tables.span(now - job.submitted)} ago",
            _ran(job, now),
            used and f"{used}{tables.simulated_mark(simulated)}",
            escape(job.slot or ""),
            job.id[:8],
            escape("; ".join(filter(None, (job.problem, _unreported(job)))) or job.repeated or _wrote(job)),
        )
    tables.console().print(made)


def _unreported(job: JobInfo) -> str:
    """Returns which webhooks were not told of the end of *job*, and why."""
    return "; ".join(f"{each.host} not notified: {each.problem}" for each in job.notifications if each.problem)


def _wrote(job: JobInfo) -> str:
    """Returns which files the script of *job* wrote."""
    return copies.summary(job.written) if job.written is not None else ""


def _kept(fleet: str, error: SkyinfraError) -> tuple[list[JobInfo], dict[str, object], bool]:
    """Returns the jobs that are kept of a fleet that is not there for *error*, what `--json` says of them, and whether
    the fleet was simulated.

    Says so on stderr. Raises *error* where none is kept.
    """
    found = kept_jobs(fleet)
    if not found:
        raise error
    last = max(each.kept for each in found)
    gone = not isinstance(error, FleetUnreachable)
    tables.say(f"kept {_date(last)} in {found[-1].where}, {why_gone(error)}", to_stderr=True)
    said = {"at": last, "where": found[-1].where, "fleet": "gone" if gone else "unreachable"}
    return [each.info for each in found], said, any(each.simulated for each in found)


def _kept_log(fleet: str, job: str, lines: int, error: SkyinfraError) -> None:
    """Prints the end of the kept log of a job, in place of *error*, which is raised where it is not kept."""
    # The last one of that name.
    named = (each for each in reversed(kept_jobs(fleet)) if job == each.info.name or each.info.id.startswith(job))
    if (found := next(named, None)) is None:
        raise error
    text = found.logs(lines)
    why = why_gone(error)
    note = f"; {found.note}" if found.note else "" if text else "; it has printed nothing"
    tables.say(f"job {found.info.name}: {found.info.state}, kept {_date(found.kept)}, {why}{note}", to_stderr=True)
    write("stdout", text)


def _date(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))


def _ran(job: JobInfo, now: float) -> str:
    if job.started is None:
        return ""
    return tables.span((job.ended or now) - job.started) + (f", attempt {job.attempts}" if job.attempts > 1 else "")


@app.command()
def logs(
    fleet: Fleet,
    job: JobName,
    lines: Lines = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print what a job has printed; of a fleet that is gone, what was kept of it."""
    try:
        pool = asked(fleet)
    except GONE as error:
        _kept_log(fleet, job, lines, error)
        return
    with pool:
        found = pool.job(job)
        info = found.info()
        if info.slot is None and not follow:
            tables.say(f"job {info.name} is {info.state} and has printed nothing", to_stderr=True)
            return
        _Printer(pool, found, lines).run(follow=follow)


@app.command()
def keep(fleet: Fleet) -> None:
    """Copy records and logs of jobs to where the state of the stack is, for after the fleet. Again: only what changed.

    `skyinfra destroy` does it too. Exit code 1 where a job is not kept.
    """
    with working(f"keep the jobs of {fleet}"):
        done = keep_now(fleet, patience=_KEEP_S)
    if not done.whole:
        tables.say(str(done), to_stderr=True)
        raise typer.Exit(1)
    tables.say(str(done))


@app.command()
def resume(
    fleet: Fleet,
    selected: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Only these, by name or id.")] = None,
) -> None:
    """Run the jobs that had not ended when the fleet before did, as they were kept. From their begin.

    `skyinfra destroy`, `jobs keep` and `watch` keep them. Exit code 1 where one does not go on.
    """
    project = Project.find()
    stack = project.stack(fleet.partition("/")[0])
    pool = fleet.partition("/")[2] or stack.only_pool
    store = store_of(stack, project.base_of(stack))
    words, whole = resumed(stack, pool, store, selected or ())
    tables.say(f"{stack.name}/{pool}: {words}", to_stderr=not whole)
    if not whole:
        raise typer.Exit(1)


def resumed(stack: SynthesizedStack, pool: str, store: Store, selected: Sequence[str] = ()) -> tuple[str, bool]:
    """Leaves kept jobs that had not ended, or those *selected*, with the fleet of *pool*. Returns what became of them,
    in words, and whether all go on. Raises what `client.unfinished.resume` does."""
    from skyinfra.client import open_questions
    from skyinfra.client.unfinished import resume

    with open_questions(stack.fleet(pool)) as fleet:
        kept = resume(fleet, store, selected)
    words = [f"jobs that go on: {', '.join(kept.done) or 'none'}"]
    words += [f"{kept.already} there already"] if kept.already else []
    words += [f"{job} does not: {why}" for job, why in kept.problems.items()]
    return "; ".join(words), not kept.problems


@app.command()
def cancel(fleet: Fleet, job: JobName) -> None:
    """Take a job back; one that runs is ended on its slot. Exit code 1 where it has ended already."""
    with asked(fleet) as pool:
        found = pool.job(job)
        if found.cancel():
            tables.say(f"{found.name}: cancelled")
            return
        tables.say(f"job {found.name} has ended already: {found.state}", to_stderr=True)
    raise typer.Exit(1)


@app.command()
def give(
    fleet: Fleet,
    job: JobName,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=@FILE]", help="In place of those that it waits for: from FILE, for instance."),
    ] = None,
    notify: Notify = None,
) -> None:
    """Give a job the secrets and webhooks again that it had: a head that starts anew has forgotten them."""
    with asked(fleet) as pool, errors_name_options():
        found = pool.job(job)
        info = found.give(*map(named_secret, secret or ()), notify=[named_target(each) for each in notify or ()])
    tables.say(f"{info.name}: {'waits for ' + ', '.join(info.lacks) if info.lacks else info.state}")


@app.command()
def result(
    fleet: Fleet,
    job: JobName,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Wait for so long; for ever, where it is left out.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the result there, as `pickle.load` reads it. It is not read here, and runs no code.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    patience: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wait so long for a fleet that is gone, and for one in its place."),
    ] = None,
    notify: Notify = None,
) -> None:
    """Wait for a job and print its result. The exit code of a script is ours; 1 where a task raised an exception."""
    if output is not None and as_json:
        raise typer.BadParameter("--output writes a file, and --json prints")
    recipients, patience_s = targets(notify), seconds("--patience", patience, bare=True) if patience else 0.0
    with ExitStack() as inside:
        try:
            if patience_s:
                pool, found = _waited(inside, fleet, job, timeout, patience_s)
            else:
                pool = inside.enter_context(asked(fleet))
                found = pool.job(job)
            if recipients:
                from skyinfra.client.notifying import notify_of_job

                notify_of_job(recipients, pool, found, timeout)
            if output is not None:
                _write(found, output, timeout)
                return
            error = found.exception(timeout)
            if said := _wrote(info := found.info()):
                tables.say(said, to_stderr=True)
                if info.written and info.written.tree:
                    tables.say(f"`skyinfra jobs fetch {fleet} {found.name}` brings what is kept.", to_stderr=True)
            if error is not None:
                raise _explained(found, error)
            _print_result(found, timeout, as_json=as_json)
        except ScriptFailed as failed:
            tables.say(str(failed), to_stderr=True)
            raise typer.Exit(exit_code(failed.code)) from None
        except TimeoutError as late:
            raise TaskError(str(late), hint="It is still running; ask again later.") from None


def _waited(
    inside: ExitStack, fleet: str, job: str, timeout: float | None, patience: float
) -> tuple[Questions, Job[Any]]:
    """Waits for the end of a *job*, also on a fleet that comes in the place of its own. Returns both as they are then.

    Raises TimeoutError, and what asking raises once a fleet was gone for *patience* seconds.
    """
    deadline, lost, known = None if timeout is None else time.monotonic() + timeout, 0.0, False
    while True:
        try:
            pool = inside.enter_context(asked(fleet))
            found = pool.job(job)
            job, known, lost = found.id, True, 0.0
            with suppress(JobCancelled):
                found.outcome(None if deadline is None else max(0.0, deadline - time.monotonic()))
            return pool, found
        except (*GONE, CredentialsRefused, JobNotFound) as error:
            # Another fleet may be at the address of one that was there. Where none was, a name may be a mistake.
            if not (known or lost or isinstance(error, FleetUnreachable | FleetNotDeployed)):
                raise
            if not lost:
                lost = time.monotonic()
                tables.say(f"{why_gone(error)}: waiting for it, or for one in its place", to_stderr=True)
            if time.monotonic() - lost > patience or (deadline is not None and time.monotonic() > deadline):
                raise
            time.sleep(_AGAIN_S)


def _explained(job: Job[Any], error: BaseException) -> SkyinfraError:
    """Returns the error of the task; for an exception of other code, `TaskFailed` with its traceback and causes."""
    raised = error.__cause__ if isinstance(error, TaskFailed) else None
    if raised is None or isinstance(raised, SystemExit):
        raised = error
    if isinstance(raised, SkyinfraError):
        return raised
    return _failed(job, "".join(traceback.format_exception(raised)))


def _failed(job: Job[Any], text: str) -> TaskFailed:
    return TaskFailed(f"job {job.name} raised an exception:\n{text.rstrip()}")


def _print_result(job: Job[Any], timeout: float | None, *, as_json: bool) -> None:
    value = job.result(timeout)
    if not as_json:
        if value is not None:
            write("stdout", f"{value if isinstance(value, str) else repr(value)}\n")
        return
    try:
        tables.print_json(value)
    except (TypeError, ValueError) as reason:
        raise InvalidField(
            f"the result of {job.name} is no JSON: {reason}", field="--json", hint="--output writes it to a file."
        ) from None


def _write(job: Job[Any], output: Path, timeout: float | None) -> None:
    """Writes the result as it came. Neither it nor an exception of the task is unpickled: both may run code."""
    outcome = job.outcome(timeout)
    if outcome.failure is not None:
        raise _failed(job, outcome.failure.text)
    with written(InvalidField, "--output", str(output)):
        output.write_bytes(outcome.result or b"")


class _Printer:
    """Prints the output of a job, from every slot that it runs on."""

    def __init__(self, pool: Questions, job: Job[Any], lines: int) -> None:
        self._pool = pool
        self._job = job
        self._lines = lines
        # The attempt that is being printed, its node, and how far it is.
        self._attempt: int | None = None
        self._node = ""
        self._offset: int | None = None

    def run(self, *, follow: bool) -> None:
        """Prints until there is no more, or with *follow* until the job has ended."""
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
            # The last lines of the first attempt that is seen, then all lines of later attempts.
            if self._attempt is not None:
                self._rest(info)
            self._attempt = info.attempts
        self._node = info.slot.rpartition("/")[0]
        try:
            return self._more(self._node, info, info.attempts)
        except NodeError:
            if info.over:
                raise
            return False  # it goes on elsewhere, or its node comes back

    def _rest(self, info: JobInfo) -> None:
        """Prints what earlier attempts have printed since the last look; a node that is gone has nothing any more."""
        for attempt in range(self._attempt or 0, info.attempts):
            # Of one between two looks it is not known where it ran.
            for node in [self._node] if attempt == self._attempt else self._pool.node_names():
                with suppress(NodeError):
                    while self._more(node, info, attempt, wait_s=_REST_S):
                        pass
                if self._offset:
                    break
            self._offset = 0

    def _more(self, node: str, info: JobInfo, attempt: int, wait_s: float = _ANSWER_S) -> bool:
        """Prints a part of what the *attempt* has printed on *node*; whether there may be another one."""
        found = self._pool.ask(
            node,
            questions.LOG,
            wait_s=wait_s,
            source="task",
            # The whole name of the file: the keys of other attempts may begin as this one's.
            task=f"{info.key}.{attempt}.log",
            offset=self._offset,
            lines=self._lines,
        )
        if found is None:
            return False
        self._offset = found["offset"]
        write("stdout", found["text"])
        return bool(found["text"])
