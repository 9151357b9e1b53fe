"""``skyinfra``: the command line. No command ends in a traceback; SKYINFRA_DEBUG=1 brings it back."""

from __future__ import annotations

import os
import signal
import sys
import warnings


def main() -> None:
    """The console script. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated."""
    from skyinfra.cli.app import app
    from skyinfra.console import guarded
    from skyinfra.errors import SkyinfraError
    from skyinfra.terminal import screen

    # As an exception, so that what a command has begun, such as a script on a slot, is ended with it.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)
    # What Dask warns of is for who uses Dask: what concerns a person is said by the errors of skyinfra.
    warnings.filterwarnings("ignore", module=r"(dask|distributed|tornado)(\.|$)")
    screen.print_on(sys.stdout)
    screen.print_on(sys.stderr)
    with guarded():
        try:
            app()
        except SkyinfraError as error:
            _explain(error)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            sys.exit(130)
        except Exception as error:  # noqa: BLE001 - the boundary to a person
            _explain(error)
            sys.stderr.write("This is a defect of skyinfra. SKYINFRA_DEBUG=1 shows where it happened.\n")
            sys.exit(1)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _explain(error: Exception) -> None:
    if os.environ.get("SKYINFRA_DEBUG"):
        raise error
    from skyinfra.errors.printable import printable
    from skyinfra.terminal.tables import say

    name = "error" if hasattr(error, "exit_code") else f"unexpected {type(error).__name__}"
    say((f"{name}:", "bold red"), f" {printable(str(error))}", to_stderr=True)
