"""``skyinfra run``: a script on a slot, or as a gang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyinfra.blobs.store import in_words
from skyinfra.cli.options import errors_name_options, exit_code
from skyinfra.engine.deaths import ended
from skyinfra.errors import (
    DeclarationError,
    GangFailed,
    InvalidField,
    InvalidInclude,
    JobCancelled,
    NotSupported,
    did_you_mean,
)
from skyinfra.protocol.jobs import KEEPING, WRITTEN, Written
from skyinfra.protocol.secrets import Secret

if TYPE_CHECKING:
    from skyinfra.client import Fetching, Job, Pool
    from skyinfra.engine.notifications import Notice

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
# For which a command that tells somebody may run.
_COMMAND_S = 60
# The last line of a traceback.
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


@dataclass(frozen=True)
class Goes:
    """The files and variables that go with a script, and the slots that it may run on.

    alone: nothing but the script and *includes*. env: variables, ``NAME=VALUE``, or ``NAME`` for that of this shell.
    env_file: a file of such lines. node, profile: of the slots that it may run on. secrets: ``NAME``, ``NAME=@FILE``.
    workdir: the folder that goes along, in a copy of which it runs. slots: of one node, for its one process. name: in
    lists. notify: who is told of its end, see `targets`. fetch: which files that it writes are brought here; fetch_to:
    the folder that they come to, in place of that of the script.
    """

    alone: bool = False
    includes: tuple[Path, ...] = ()
    env: tuple[str, ...] = ()
    env_file: Path | None = None
    node: str | None = None
    profile: str | None = None
    secrets: tuple[str, ...] = ()
    workdir: Path | None = None
    slots: int = 1
    name: str | None = None
    notify: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    fetch_to: Path | None = None

    def __post_init__(self) -> None:
        if self.fetch_to is not None and not self.fetch:
            raise InvalidField("goes with --fetch", field="--fetch-to", given=str(self.fetch_to))
        if self.workdir is not None and self.alone:
            raise InvalidField("is a folder that goes along, and --alone leaves all of them here", field="--workdir")
        if self.slots < 1:
            raise InvalidField("a number from 1", field="--slots", given=self.slots)

    def variables(self) -> dict[str, str]:
        """The variables. Raises `InvalidField`."""
        found: dict[str, str] = {}
        for line in [*self._lines(), *self.env]:
            name, given, value = line.partition("=")
            if not _NAME.fullmatch(name.strip()):
                raise InvalidField("expected NAME=VALUE, or NAME", field="--env", given=name)
            if not given and name.strip() not in os.environ:
                raise InvalidField("this shell has no such variable", field="--env", given=name)
            found[name.strip()] = value if given else os.environ[name.strip()]
        return found

    def named_secrets(self) -> list[Secret]:
        """The secrets. Raises `InvalidField`, and shows no value: one in a command line stands in the process list."""
        return [named_secret(text) for text in self.secrets]

    def targets(self, *, by_head: bool = False) -> list[str]:
        """The addresses and commands that are told of the end; none that the head cannot tell where it does so.

        Raises `InvalidField`, `SecretNotFound` and `NotSupported`.
        """
        if not self.notify:
            return []
        from skyinfra.client import jobs

        with errors_name_options():
            named = [named_target(text) for text in self.notify]
            return jobs.addresses(named) if by_head else jobs.targets(named)

    def _lines(self) -> list[str]:
        if self.env_file is None:
            return []
        try:
            lines = self.env_file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise InvalidField(f"cannot be read: {error}", field="--env-file", given=str(self.env_file)) from None
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]

    def bring(self, pool: Pool, script: Path) -> tuple[Pool, dict[str, str]]:
        """Sends what goes with *script*, and says how much; returns the slots that it may run on, and its variables."""
        from skyinfra.client import ship
        from skyinfra.sync.project import given_folder

        variables = self.variables()
        if not self.alone:
            try:
                workdir = None if self.workdir is None else given_folder(self.workdir, "--workdir")
                synced, beside = ship(pool, script, self.includes, workdir=workdir)
            except NotSupported as error:
                sys.stderr.write(f"{script.name} goes alone: {error.message}\n")
            except InvalidInclude as error:
                error.hint = (
                    f"{error.hint or ''}\n`--alone` sends the script alone; .skyinfraignore lists what stays here."
                )
                raise
            else:
                if synced.files > 1:
                    sizes = f"{in_words(synced.bytes)} with it, {in_words(synced.sent_bytes)} to send"
                    sys.stderr.write(f"{script.name} goes with {synced.files - 1} other files: {sizes}\n")
                variables |= beside
        elif self.includes:
            pool.sync(*self.includes)
        return pool.select(node=self.node, profile=self.profile), variables

    def fetching(self, pool: Pool, script: Path) -> Fetching:
        """Brings what *script* writes, which is about to be sent. Raises `InvalidField`."""
        from skyinfra.client import Fetching
        from skyinfra.sync.bringing import check_patterns

        folder = (self.fetch_to or self.workdir or script.parent).expanduser().absolute()
        return Fetching(pool, folder, script.name, check_patterns(self.fetch, "--fetch"))

    def remedy(self, module: str, script: Path) -> str:
        """Says what would have brought the *module*, which the node lacked, to *script*."""
        from skyinfra.sync.project import folder_of
        from skyinfra.tasks.missing import remedy

        script = script.absolute()
        folders = dict.fromkeys([script.parent, folder_of(script) or script.parent, (self.workdir or script.parent)])
        why = "--alone left it here" if self.alone else "Git, .skyinfraignore or its folder left it here"
        return remedy(module, [folder.absolute() for folder in folders], f"{why}; `--include {{}}` takes it along")


def check_script(fleet: str, script: Path, arguments: Sequence[str] = ()) -> None:
    """Raises `InvalidField`, with what would work, where *script* is no file."""
    if script.is_file():
        return
    hint = did_you_mean(script.name, [file.name for file in script.parent.glob("*.py")])
    if script.suffix != ".py":
        line = shlex.join([str(script), *arguments])
        hint = f"{hint}\n`skyinfra exec {fleet} -- {line}` runs a program on a node; this runs Python scripts.".strip()
    raise InvalidField("there is no such file", field="SCRIPT", given=str(script), hint=hint or None)


def named_secret(text: str, option: str = "--secret") -> Secret:
    """The secret of ``--secret``: ``NAME``, or ``NAME=@FILE``. Raises `InvalidField`."""
    name, given, file = text.partition("=")
    if given and not file.startswith("@"):
        raise InvalidField(
            "a value in a command line stands in the process list and in the history of the shell",
            field=option,
            given=name,
            hint=f"Set the variable {name} and say {option} {name}, or {option} {name}=@FILE.",
        )
    return Secret(name, file[1:] if given else None)


def named_target(text: str) -> str | Secret:
    """The target of ``--notify``: an address, ``command:CMD``, or ``NAME``, or ``NAME=@FILE``, that has one."""
    from skyinfra.client.jobs import is_target

    return text if is_target(text) else named_secret(text, "--notify")


@dataclass
class Ended:
    """The exit code of a script, as a shell gives it."""

    code: int = 0


@contextlib.contextmanager
def telling(targets: Sequence[str], pool: str, job: str) -> Iterator[Ended]:
    """Tells *targets* of the end of the script *job*, which runs in the block; mistakes in its options are not told."""
    ended, began, state, problem, code = Ended(), time.monotonic(), "failed", None, None
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
            from skyinfra.engine.notifications import Notice

            seconds = round(time.monotonic() - began, 3)
            tell(targets, Notice(pool, job, state, seconds, code, problem=problem))


def tell_of(targets: Sequence[str], pool: str, job: Job[Any], timeout: float | None) -> None:
    """Waits for the end of *job* of *pool* and tells *targets*. Raises TimeoutError."""
    from skyinfra.engine.notifications import Notice

    with contextlib.suppress(JobCancelled):
        job.outcome(timeout)
    tell(targets, Notice.of(job.info(), pool))


def tell(targets: Sequence[str], notice: Notice) -> None:
    """Tells *targets*. One that cannot be told is a line on stderr, and fails nothing."""
    for target in targets:
        if (said := _told(target, notice)) is not None:
            sys.stderr.write(f"warning: {notice.name}: {said}\n")


def _told(target: str, notice: Notice) -> str | None:
    """Returns why *target* was not told of *notice*."""
    from skyinfra.client.jobs import COMMAND
    from skyinfra.engine.notifications import post, webhooks

    if not target.startswith(COMMAND):
        (webhook,) = webhooks([target])
        problem = post(webhook, notice)
        return problem and f"{webhook.host} was not told of its end: {problem}"
    given = {name: "" if value is None else str(value) for name, value in asdict(notice).items()}
    # A variable holds no NUL, and no more than 128 KiB.
    variables = {f"SKYINFRA_JOB_{name.upper()}": text.replace("\0", "")[:4000] for name, text in given.items()}
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
    return f"the command of --notify ended with {exit_code(done.returncode)}" if done.returncode else None


def run_on_slot(fleet: str, script: Path, arguments: Sequence[str], goes: Goes) -> int:
    """Runs *script* on one slot of *fleet* (``STACK/POOL``) and streams its output.

    Returns its exit code; 128 and the signal's number where one ended it, as a shell does. Raises `InvalidField` where
    the file does not exist, and the errors of ``connect``.
    """
    check_script(fleet, script, arguments)
    from skyinfra.client import run_script
    from skyinfra.terminal.progress import connected

    last = ""

    def show(stream: str, line: str) -> None:
        nonlocal last
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(f"{line}\n")
        target.flush()
        if stream == "stderr" and line.strip():
            last = line

    def interrupted(slot: str) -> None:
        sys.stderr.write(f"interrupted {script.name} on slot {slot}: it may clean up; Ctrl-C again ends it at once\n")

    def waits() -> None:
        sys.stderr.write(f"{script.name} waits for a slot: `skyinfra top {fleet}` shows what runs on them\n")

    try:
        with connected(fleet, secrets=goes.named_secrets()) as pool, errors_name_options():
            files = goes.fetching(pool, script)
            slots, variables = goes.bring(pool, script)
            with said_of(files):
                code = run_script(
                    slots,
                    script,
                    list(arguments),
                    env=variables,
                    slots=goes.slots,
                    name=goes.name,
                    on_line=show,
                    on_interrupt=interrupted,
                    on_wait=waits,
                    waits_s=2.0 if sys.stderr.isatty() else 10.0,
                    fetch=files.fetch,
                    on_files=files.take,
                )
    except KeyboardInterrupt:
        sys.stderr.write(f"{script.name} was stopped\n")
        raise
    if code < 0:
        sys.stderr.write(f"{script.name} was {ended(code)}\n")
    if code and (missing := _MISSING.match(last)):
        sys.stderr.write(f"{goes.remedy(missing[1], script)}\n")
    return exit_code(code)


@contextlib.contextmanager
def said_of(files: Fetching) -> Iterator[None]:
    """Brings *files* in the end, however the script in the block ends, and says which others it wrote."""
    from skyinfra.terminal.progress import working

    whole = False
    try:
        yield
        whole = True
    finally:
        with working(f"fetch the files of {files.name}"):
            lines = list(files.bring(whole=whole))
        sys.stderr.writelines(f"{line}\n" for line in lines)


def check_options(*, torchrun: bool, nodes: int | None, per_node: int | None, max_restarts: int) -> None:
    """Raises `InvalidField` for options of a gang where there is none."""
    for option, given in (("--nodes", nodes), ("--per-node", per_node), ("--max-restarts", max_restarts or None)):
        if given is not None and not torchrun:
            raise InvalidField("goes with --torchrun", field=option, given=given)


def check_single(slots: int, name: str | None, *, torchrun: bool, detach: bool) -> None:
    """Raises `InvalidField` for options of one process where there are ranks, or a job."""
    if torchrun and slots != 1:
        hint = "Ranks have one slot each: --nodes and --per-node say how many."
        raise InvalidField("goes without --torchrun", field="--slots", given=slots, hint=hint)
    if detach and slots != 1:
        raise InvalidField("a job takes one slot", field="--slots", given=slots)
    if torchrun and name is not None:
        raise InvalidField("goes without --torchrun: ranks are listed by the script's name", field="--name", given=name)
    if name is not None:
        from skyinfra.protocol.jobs import check_name

        check_name(name)


def run_gang(
    fleet: str,
    script: Path,
    arguments: Sequence[str],
    goes: Goes,
    *,
    nodes: int | None,
    per_node: int | None,
    max_restarts: int,
) -> int:
    """Runs *script* as the ranks of a gang on *fleet* and streams their output, each line with its rank.

    0, or the exit code of the rank that failed first, as `run_on_slot` gives it. Raises the errors of `run_on_slot`.
    """
    check_script(fleet, script, arguments)
    from skyinfra.client import GangWarning
    from skyinfra.client.ranks import exit_code as gang_exit_code
    from skyinfra.terminal.progress import connected

    def show(rank: int, stream: str, line: str) -> None:
        if stream in (KEEPING, WRITTEN):
            files.take(stream, Written.read(json.loads(line)), rank)
            return
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(f"{rank}: {line}\n")
        target.flush()

    secrets = goes.named_secrets()
    with connected(fleet, secrets=secrets) as pool, errors_name_options(), warnings.catch_warnings():
        warnings.simplefilter("always", GangWarning)
        warnings.showwarning = _show_warning
        files = goes.fetching(pool, script)
        slots, env = goes.bring(pool, script)
        try:
            with said_of(files):
                slots.launch(
                    script,
                    *arguments,
                    nodes=nodes,
                    per_node=per_node,
                    max_restarts=max_restarts,
                    env=env | files.variables,
                    on_line=show,
                )
        except GangFailed as error:
            sys.stderr.write(f"error: {error}\n")
            if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name:
                sys.stderr.write(f"{goes.remedy(error.__cause__.name, script)}\n")
            return gang_exit_code(error)
        except KeyboardInterrupt:
            sys.stderr.write(f"interrupted: the ranks of {script.name} were stopped\n")
            raise
    return 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    sys.stderr.write(f"warning: {message}\n")
