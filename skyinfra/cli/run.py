"""``skyinfra run``: a script on a slot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from skyinfra._errors import InvalidField


def run_on_slot(fleet: str, script: Path, arguments: Sequence[str]) -> int:
    """Runs *script* on one slot of *fleet* (``STACK/POOL``) and streams what it prints.

    Returns its exit code, as a shell gives it: 128 and the number of the signal where one ended it.
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
    return 128 - code if code < 0 else code
