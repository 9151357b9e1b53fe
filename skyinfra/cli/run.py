"""``skyinfra run``: a script on a slot, as a gang, or as a job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyinfra.blobs.store import in_words
from skyinfra.cli.options import (
    Notify,
    OnNode,
    OnProfile,
    ScriptCommand,
    Secrets,
    errors_name_options,
    exit_code,
    named_secret,
    names_of,
    takes_records,
    targets,
    write,
)
from skyinfra.console import unread
from skyinfra.engine.deaths import ended
from skyinfra.errors import (
    GangFailed,
    InvalidField,
    InvalidInclude,
    NotSupported,
    check_mapping,
    did_you_mean,
)
from skyinfra.protocol.jobs import KEEPING, WRITTEN, Written, check_name
from skyinfra.protocol.secrets import Secret
from skyinfra.sync.bringing import check_patterns
from skyinfra.sync.project import folder_of, given_folder
from skyinfra.tasks.missing import remedy
from skyinfra.terminal import names, tables
from skyinfra.terminal.progress import connected, working

if TYPE_CHECKING:
    from skyinfra.client import Fetching, Pool
    from skyinfra.client.notifying import Ended
    from skyinfra.tasks.task import Options

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
# Options of ours that a script hardly has.
_OURS = {"--detach", "--torchrun", "--per-node", "--max-restarts", "--fetch", "--fetch-to", "--notify", "--secret"}
# The last line of a traceback.
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


app = typer.Typer()


@dataclass(frozen=True)
class ScriptOptions:
    """The options of a script: what goes with it, on which slots it may run, what is brought back, who is told."""

    include: Annotated[list[Path] | None, typer.Option(help="A file or folder that is sent along.")] = None
    alone: Annotated[bool, typer.Option("--alone", help="Leave the other files of its folder here.")] = False
    workdir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder that is sent along instead; it runs in a copy of it.")
    ] = None
    env: Annotated[list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="A variable for it.")] = None
    env_file: Annotated[Path | None, typer.Option(help="A file of such lines.")] = None
    node: OnNode = None
    profile: OnProfile = None
    secret: Secrets = None
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="For which it may run.")] = None
    retries: Annotated[int, typer.Option(metavar="N", help="With --detach: starts again where it fails.")] = 0
    gpu_memory_gb: Annotated[
        float | None, typer.Option(metavar="GB", help="On a slot with at least that memory of its GPU.")
    ] = None
    slots: Annotated[int, typer.Option(metavar="N", help="One process that sees N whole GPUs of one node.")] = 1
    name: Annotated[str | None, typer.Option(metavar="NAME", help="In lists, and of the job.")] = None
    notify: Notify = None
    fetch: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Files that it writes, as in a .gitignore: they are brought here."),
    ] = None
    fetch_to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to, instead of to the script's folder.")
    ] = None

    def __post_init__(self) -> None:
        if self.fetch_to is not None and not self.fetch:
            raise InvalidField("needs --fetch", field="--fetch-to", given=str(self.fetch_to))
        if self.workdir is not None and self.alone:
            raise InvalidField("is a folder that is sent along, and --alone leaves all of them here", field="--workdir")
        if self.slots < 1:
            raise InvalidField("a number from 1", field="--slots", given=self.slots)
        with errors_name_options():
            self.settings()
        if self.name is not None:
            check_name(self.name)

    def settings(self) -> Options:
        """The options of its task. Raises `InvalidField`."""
        from skyinfra.tasks.task import Options

        return Options(timeout=self.timeout, retries=self.retries, gpu_memory_gb=self.gpu_memory_gb)

    def variables(self) -> dict[str, str]:
        """Returns the variables. Raises `InvalidField`."""
        found: dict[str, str] = {}
        for line in [*self._lines(), *(self.env or ())]:
            name, given, value = line.partition("=")
            if not _NAME.fullmatch(name.strip()):
                raise InvalidField("expected NAME=VALUE, or NAME", field="--env", given=name)
            if not given and name.strip() not in os.environ:
                raise InvalidField("this shell has no such variable", field="--env", given=name)
            found[name.strip()] = value if given else os.environ[name.strip()]
        check_mapping("--env", found)
        return found

    def named_secrets(self) -> list[Secret]:
        """The secrets. Raises `InvalidField`, and shows no value: one in a command line stands in the process list."""
        return [named_secret(text) for text in self.secret or ()]

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

        variables = self.variables()
        if not self.alone:
            try:
                workdir = None if self.workdir is None else given_folder(self.workdir, "--workdir")
                synced, beside = ship(pool, script, self.include or (), workdir=workdir)
            except NotSupported as error:
                tables.say(f"{script.name} is sent alone: {error.message}", to_stderr=True)
            except InvalidInclude as error:
                error.hint = (
                    f"{error.hint or ''}\n`--alone` sends the script alone; .skyinfraignore lists what stays here."
                )
                raise
            else:
                if synced.files > 1:
                    sizes = f"{in_words(synced.bytes)} with it, {in_words(synced.sent_bytes)} to send"
                    tables.say(f"{script.name} is sent with {synced.files - 1} other files: {sizes}", to_stderr=True)
                variables |= beside
        elif self.include:
            pool.sync(*self.include)
        return pool.select(node=self.node, profile=self.profile), variables

    def fetching(self, pool: Pool, script: Path) -> Fetching:
        """Brings what *script* writes, which is about to be sent. Raises `InvalidField`."""
        from skyinfra.client import Fetching

        folder = (self.fetch_to or self.workdir or script.parent).expanduser().absolute()
        return Fetching(pool, Path(os.path.normpath(folder)), script.name, check_patterns(self.fetch or (), "--fetch"))

    def remedy(self, module: str, script: Path) -> str:
        """Says what would have brought the *module*, which the node lacked, to *script*."""
        script = script.absolute()
        folders = dict.fromkeys([script.parent, folder_of(script) or script.parent, (self.workdir or script.parent)])
        why = "--alone left it here" if self.alone else "Git, .skyinfraignore or its folder left it here"
        return remedy(module, [folder.absolute() for folder in folders], f"{why}; `--include {{}}` takes it along")


@dataclass(frozen=True)
class GangOptions:
    """The options of a script that runs as ranks."""

    torchrun: Annotated[bool, typer.Option("--torchrun", help="As ranks of torch.distributed, on many slots.")] = False
    nodes: Annotated[int | None, typer.Option(metavar="N", help="On how many nodes; on all, if not given.")] = None
    per_node: Annotated[int | None, typer.Option(metavar="N", help="Ranks on each node; one on each slot.")] = None
    max_restarts: Annotated[int, typer.Option(metavar="N", help="How often all ranks start again when one failed.")] = 0

    def check(self, options: ScriptOptions, *, detach: bool) -> None:
        """Raises `InvalidField` for options of a gang where there is none, and of one process where there are ranks."""
        for option, given in (
            ("--nodes", self.nodes),
            ("--per-node", self.per_node),
            ("--max-restarts", self.max_restarts or None),
        ):
            if given is not None and not self.torchrun:
                raise InvalidField("needs --torchrun", field=option, given=given)
        if self.torchrun and options.slots != 1:
            hint = "Ranks have one slot each: --nodes and --per-node say how many."
            raise InvalidField("cannot be used with --torchrun", field="--slots", given=options.slots, hint=hint)
        for option, value in (("--timeout", options.timeout), ("--gpu-memory-gb", options.gpu_memory_gb)):
            if value is not None and self.torchrun:
                raise InvalidField("cannot be used with --torchrun", field=option, given=value)
        if options.retries and not detach:
            hint = "--max-restarts is for ranks." if self.torchrun else ""
            text = "needs --detach: else its exit code is that of this command"
            raise InvalidField(text, field="--retries", given=options.retries, hint=hint or None)
        if detach and options.slots != 1:
            raise InvalidField("a job takes one slot", field="--slots", given=options.slots)
        if self.torchrun and options.name is not None:
            text = "cannot be used with --torchrun: ranks are listed by the script's name"
            raise InvalidField(text, field="--name", given=options.name)
        if self.torchrun and detach:
            raise typer.BadParameter("--torchrun runs many ranks, and --detach leaves one script with the fleet")


@app.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False})
@takes_records
def run(
    fleet: Annotated[
        str, typer.Argument(metavar="STACK/POOL", help="Where to run.", autocompletion=names_of("fleets"))
    ],
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python script.")],
    gang: GangOptions,
    options: ScriptOptions,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it with the fleet as a job; see `jobs`.")] = False,
    priority: Annotated[int, typer.Option(metavar="N", help="Of the job: higher ones run first.")] = 0,
    replace: Annotated[bool, typer.Option("--replace", help="Forget an ended job of that name.")] = False,
) -> None:
    """Run a Python script on one slot. With --torchrun as ranks on many slots, all or none.

    The files of its folder go with it, or of the folder above its package, without what Git ignores and what
    .skyinfraignore lists. Its output is streamed and its exit code is ours. What stands behind the script is handed to
    it.
    """
    gang.check(options, detach=detach)
    given = arguments or []
    if given[:1] == ["--"]:
        given = given[1:]
    elif ours := [name for name in (each.partition("=")[0] for each in given) if name in _OURS]:
        tables.say(
            f"{', '.join(ours)}: handed to {script.name}, as everything behind it. For skyinfra write it before "
            f"{script.name}; `--` behind {script.name} leaves this line out.",
            to_stderr=True,
        )
    if unread():
        tables.say(
            f"{script.name} does not get the standard input: give it as a file beside the script, or with --include.",
            to_stderr=True,
        )
    if detach:
        submit(fleet, script, given, options, priority=priority, replace=replace)
        return
    if priority != 0 or replace:
        raise typer.BadParameter("--priority and --replace are those of a job: give --detach as well")
    from skyinfra.client.notifying import notifying

    with notifying(targets(options.notify), fleet, options.name or script.name) as ended:
        if gang.torchrun:
            ended.code = run_gang(fleet, script, given, options, gang, ended)
        else:
            ended.code = run_on_slot(fleet, script, given, options, ended)
    raise typer.Exit(ended.code)


def check_script(fleet: str, script: Path, arguments: Sequence[str] = ()) -> None:
    """Raises `InvalidField`, with what would work, where *script* is no file."""
    if script.is_file():
        return
    hint = did_you_mean(script.name, [file.name for file in script.parent.glob("*.py")])
    if script.suffix != ".py":
        line = shlex.join([str(script), *arguments])
        hint = f"{hint}\n`skyinfra exec {fleet} -- {line}` runs a program on a node; this runs Python scripts.".strip()
    raise InvalidField("there is no such file", field="SCRIPT", given=str(script), hint=hint or None)


def run_on_slot(
    fleet: str, script: Path, arguments: Sequence[str], options: ScriptOptions, notified: Ended | None = None
) -> int:
    """Runs *script* on one slot of *fleet* (``STACK/POOL``) and streams its output. *notified*: of sick nodes.

    Returns its exit code; 128 and the signal's number where one ended it, as a shell does. Raises `InvalidField` where
    the file does not exist, and the errors of ``connect``.
    """
    check_script(fleet, script, arguments)
    from skyinfra.client import run_script
    from skyinfra.client.notifying import Ended

    last = ""

    def show(stream: str, line: str) -> None:
        nonlocal last
        write(stream, f"{line}\n")
        if stream == "stderr" and line.strip():
            last = line

    def interrupted(slot: str) -> None:
        tables.say(
            f"interrupted {script.name} on slot {slot}: it may clean up; Ctrl-C again ends it at once", to_stderr=True
        )

    def waits() -> None:
        tables.say(f"{script.name} waits for a slot: `skyinfra top {fleet}` shows what runs on them", to_stderr=True)

    try:
        with connected(fleet, secrets=options.named_secrets()) as pool, errors_name_options():
            files = options.fetching(pool, script)
            slots, variables = options.bring(pool, script)
            with said_of(files), (notified or Ended()).watching(pool):
                code = run_script(
                    slots,
                    script,
                    list(arguments),
                    env=variables,
                    slots=options.slots,
                    name=options.name,
                    on_line=show,
                    on_interrupt=interrupted,
                    on_wait=waits,
                    waits_s=2.0 if sys.stderr.isatty() else 10.0,
                    fetch=files.fetch,
                    on_files=files.take,
                    settings=options.settings(),
                )
    except KeyboardInterrupt:
        tables.say(f"{script.name} was stopped", to_stderr=True)
        raise
    if code < 0:
        tables.say(f"{script.name} was {ended(code)}", to_stderr=True)
    if code and (missing := _MISSING.match(last)):
        tables.say(options.remedy(missing[1], script), to_stderr=True)
    return exit_code(code)


@contextlib.contextmanager
def said_of(files: Fetching) -> Iterator[None]:
    """Brings *files* in the end, however the script in the block ends, and says which others it wrote."""
    whole = False
    try:
        yield
        whole = True
    finally:
        with working(f"fetch the files of {files.name}"):
            lines = list(files.bring(whole=whole))
        for line in lines:
            tables.say(line, to_stderr=True)


def run_gang(
    fleet: str,
    script: Path,
    arguments: Sequence[str],
    options: ScriptOptions,
    gang: GangOptions,
    notified: Ended | None = None,
) -> int:
    """Runs *script* as the ranks of a gang on *fleet* and streams their output, each line with its rank.
    *notified*: of sick nodes.

    0, or the exit code of the rank that failed first, as `run_on_slot` gives it. Raises the errors of `run_on_slot`.
    """
    check_script(fleet, script, arguments)
    from skyinfra.client import GangWarning
    from skyinfra.client.notifying import Ended
    from skyinfra.client.ranks import exit_code as gang_exit_code

    def show(rank: int, stream: str, line: str) -> None:
        if stream in (KEEPING, WRITTEN):
            files.take(stream, Written.read(json.loads(line)), rank)
            return
        write(stream, f"{rank}: {line}\n")

    secrets = options.named_secrets()
    with connected(fleet, secrets=secrets) as pool, errors_name_options(), warnings.catch_warnings():
        warnings.simplefilter("always", GangWarning)
        warnings.showwarning = _show_warning
        files = options.fetching(pool, script)
        slots, env = options.bring(pool, script)
        try:
            with said_of(files), (notified or Ended()).watching(pool):
                slots.launch(
                    script,
                    *arguments,
                    nodes=gang.nodes,
                    per_node=gang.per_node,
                    max_restarts=gang.max_restarts,
                    env=env | files.variables,
                    on_line=show,
                )
        except GangFailed as error:
            tables.say(f"error: {error}", to_stderr=True)
            if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name:
                tables.say(options.remedy(error.__cause__.name, script), to_stderr=True)
            return gang_exit_code(error)
        except KeyboardInterrupt:
            tables.say(f"interrupted: the ranks of {script.name} were stopped", to_stderr=True)
            raise
    return 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    tables.say(f"warning: {message}", to_stderr=True)


def submit(
    fleet: str, script: Path, arguments: Sequence[str], options: ScriptOptions, *, priority: int, replace: bool
) -> None:
    """Submits *script* as a job of the head, and prints its name."""
    check_script(fleet, script, arguments)
    from skyinfra.client import detach_script

    notify, fetch = targets(options.notify, by_head=True), check_patterns(options.fetch or (), "--fetch")
    if options.fetch_to is not None:
        hint = f"`skyinfra jobs fetch {fleet} JOB DIR` brings what the head keeps of a job."
        raise InvalidField("a job keeps its files", field="--fetch-to", given=str(options.fetch_to), hint=hint)
    with connected(fleet, secrets=options.named_secrets()) as pool:
        slots, variables = options.bring(pool, script)
        job = detach_script(
            slots,
            script,
            list(arguments),
            env=variables,
            name=options.name,
            priority=priority,
            replace=replace,
            notify=notify,
            fetch=fetch,
            settings=options.settings(),
        )
    names.remember_jobs(fleet, [job.name], more=True)
    sys.stdout.write(f"{job.name}\n")
    tables.say(f"`skyinfra jobs logs {fleet} {job.name} --follow` shows what it prints.", to_stderr=True)
