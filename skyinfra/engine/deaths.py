"""How a process ended, in the words of every message about it; the record of a worker process that died."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from skyinfra.errors import NodeError
from skyinfra.protocol import _schema

# A process that dies again and again has these causes.
USUAL = "Usual causes: the machine ran out of memory, a crash in native code, or os._exit()."
_NO_MEMORY = "Usual cause: the machine ran out of memory."


@dataclass(frozen=True)
class Death(_schema.Document, error=NodeError, source="death"):
    """The end of a worker process while it ran a task.

    code: its exit code, negative for a signal. out_of_memory: whether the kernel ended it as memory ran out. shown:
    bytes of the output of the task that were sent to its client by then. sure: of these, before the last messages,
    which may have been lost with the process.
    """

    code: int
    out_of_memory: bool = False
    shown: int = 0
    sure: int = 0

    def __str__(self) -> str:
        return f"{ended(self.code)}{', as the memory of its machine ran out' if self.out_of_memory else ''}"


def ended(code: int) -> str:
    """Returns how a process ended with *code*: ``exit code 3``, ``killed by signal 11 (SIGSEGV)``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


def of_program(code: int) -> str:
    """Returns the same as what a sentence says of a program: ``ended with exit code 3``, ``was killed by ...``."""
    return f"ended with {ended(code)}" if code >= 0 else f"was {ended(code)}"


def causes(deaths: Sequence[Death]) -> str:
    """Returns the causes of *deaths*, once where all are the same; empty where none is known."""
    said = [str(death) for death in deaths]
    return said[0] if len(set(said)) == 1 else ", then ".join(said)


def printed(fleet: str, key: str, last: Sequence[str]) -> str:
    """Returns the *last* lines of the output of the task *key*, as far as they are known, and where all of it is."""
    logs = f"`skyinfra logs {fleet} --task {key}` has"
    if not last:
        return f"{logs} what it printed."
    return "\n".join(["Its last output:", *(f"  {line}" for line in last), f"{logs} all of it."])


def remedy(codes: Sequence[int]) -> str | None:
    """Returns the usual cause of deaths with *codes*, where they leave that open; of none of them, any cause."""
    if not codes:
        return USUAL
    return _NO_MEMORY if set(codes) == {-signal.SIGKILL} else None
