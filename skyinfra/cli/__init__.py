"""``skyinfra``: the command line. No command ends in a traceback; SKYINFRA_DEBUG=1 brings it back."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyinfra.errors.signals import catch, is_first

if TYPE_CHECKING:
    from skyinfra.errors import SkyinfraError


def main() -> None:
    """The console script. Exit codes: 0 done, 1 failed, 2 wrong usage, 129 its terminal closed, 130 interrupted, 143
    terminated."""
    import typer

    from skyinfra.cli.app import app
    from skyinfra.errors import SkyinfraError
    from skyinfra.errors.streams import guarded
    from skyinfra.terminal import screen

    # As an exception, so that what a command has begun, such as a script on a slot, is ended with it.
    catch(_leave)
    # What Dask warns of is for who uses Dask: what concerns a person is said by the errors of skyinfra. Here, as
    # `engine.settings.quiet_client`, which decides for all clients, imports Dask, and that may warn by itself.
    warnings.filterwarnings("ignore", module=r"(dask|distributed|tornado)(\.|$)")
    screen.print_on(sys.stdout)
    screen.print_on(sys.stderr)
    with guarded():
        try:
            sys.exit(app(standalone_mode=False))
        except SkyinfraError as error:
            _explain(error)
            sys.exit(error.exit_code)
        except (KeyboardInterrupt, typer.Abort) as error:
            # A question takes Ctrl-C as it takes the end of its input, and says that it was aborted.
            by_hand = any(isinstance(each, KeyboardInterrupt) for each in (error, error.__context__))
            sys.stderr.write("interrupted\n" if by_hand else "Aborted!\n")
            sys.exit(130 if by_hand else 1)
        except Exception as error:  # noqa: BLE001 - the boundary to a person
            if hasattr(error, "format_message"):  # of typer, or of the click that older ones use
                _misused(error)
                sys.exit(getattr(error, "exit_code", 2))
            if isinstance(error, OSError) and (refused := _of_disk(error)) is not None:
                _explain(refused)
                sys.exit(refused.exit_code)
            from skyinfra.terminal.tables import say

            _explain(error)
            say("This is a defect of skyinfra. SKYINFRA_DEBUG=1 shows where it happened.", to_stderr=True)
            sys.exit(1)


def _leave(number: int, _frame: object) -> None:
    if is_first(number):
        raise SystemExit(128 + number)


def _of_disk(error: OSError) -> SkyinfraError | None:
    """Returns what to say where a person's own disk refuses something; None for what skyinfra has to answer for."""
    from skyinfra.errors import ProjectError

    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else None
    # Without a name, processes and sockets refuse such things as well.
    if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT) or (
        name and error.errno in (errno.EACCES, errno.EPERM)
    ):
        return ProjectError(str(error.strerror), field=name)
    if name is None and error.errno == errno.ENOENT:
        try:
            Path.cwd()
        except FileNotFoundError:
            return ProjectError(str(error.strerror), field="the current folder", hint="Change into one that exists.")
    return None


def _misused(error: Any) -> None:
    """Says what is wrong with a command line, in our look, and folded as all sentences are."""
    from skyinfra.errors.peers import meant
    from skyinfra.terminal.tables import say

    message = str(error.format_message())
    if (context := getattr(error, "ctx", None)) is not None:
        say(context.get_usage(), to_stderr=True)
        say(f"Try `{context.command_path} --help` for help.\n", to_stderr=True)
        option = getattr(error, "option_name", None)
        if option and context.parent is None and (said := meant(option, "skyinfra", None)):
            message = f"{message}. {said}"
    say(("Error:", "bold red"), f" {message}", to_stderr=True)


def _explain(error: Exception) -> None:
    if os.environ.get("SKYINFRA_DEBUG"):
        raise error
    from skyinfra.errors.printable import printable
    from skyinfra.terminal.tables import say

    name = "error" if hasattr(error, "exit_code") else f"unexpected {type(error).__name__}"
    say((f"{name}:", "bold red"), f" {printable(str(error))}", to_stderr=True)
