"""``skyinfra run``: a script on a slot, or as a gang."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from skyinfra.cli.options import errors_name_options, exit_code
from skyinfra.errors import GangFailed, InvalidField


def run_on_slot(fleet: str, script: Path, arguments: Sequence[str]) -> int:
    """Runs *script* on one slot of *fleet* (``STACK/POOL``) and streams its output.

    Returns its exit code; 128 and the signal's number where one ended it, as a shell does. Raises `InvalidField` where
    the file does not exist, and the errors of ``connect``.
    """
    if not script.is_file():
        raise InvalidField("there is no such file", field="SCRIPT", given=str(script))
    from skyinfra.client import connect, run_script

    def show(stream: str, line: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(f"{line}\n")
        target.flush()

    with connect(fleet) as pool:
        code = run_script(pool, script, list(arguments), on_line=show)
    return exit_code(code)


def check_options(*, torchrun: bool, nodes: int | None, per_node: int | None, max_restarts: int) -> None:
    """Raises `InvalidField` for options of a gang where there is none."""
    for option, given in (("--nodes", nodes), ("--per-node", per_node), ("--max-restarts", max_restarts or None)):
        if given is not None and not torchrun:
            raise InvalidField("goes with --torchrun", field=option, given=given)


def run_gang(
    fleet: str,
    script: Path,
    arguments: Sequence[str],
    *,
    nodes: int | None,
    per_node: int | None,
    max_restarts: int,
) -> int:
    """Runs *script* as the ranks of a gang on *fleet* and streams their output, each line with its rank.

    0, or the exit code of the rank that failed first, as `run_on_slot` gives it. Raises the errors of `run_on_slot`.
    """
    if not script.is_file():
        raise InvalidField("there is no such file", field="SCRIPT", given=str(script))
    from skyinfra.client import GangWarning, connect
    from skyinfra.client.ranks import exit_code as gang_exit_code

    def show(rank: int, stream: str, line: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(f"{rank}: {line}\n")
        target.flush()

    with connect(fleet) as pool, errors_name_options(), warnings.catch_warnings():
        warnings.simplefilter("always", GangWarning)
        warnings.showwarning = _show_warning
        try:
            pool.launch(script, *arguments, nodes=nodes, per_node=per_node, max_restarts=max_restarts, on_line=show)
        except GangFailed as error:
            sys.stderr.write(f"error: {error}\n")
            return gang_exit_code(error)
    return 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    sys.stderr.write(f"warning: {message}\n")
