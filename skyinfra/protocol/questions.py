"""Names of the questions that nodes answer, see `skyinfra.runner.answers`; they travel with the call `ask_node`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DOCTOR = "doctor"
METRICS = "metrics"
FIGURES = "figures"
MEASURED = "measured"
LOG = "log"
START = "start"
OUTPUT = "output"
END = "end"
STOP = "stop"
PUT = "put"
GET = "get"
UPGRADE = "upgrade"
FORWARD = "forward"
# For how long a node knows of no use of its fleet (idle_s), and it is kept (keep_s), in seconds.
USE = "use"


# Of a log, whatever a node answers: 64 MiB, in the parts that a node gives.
_MOST_PARTS = 256


def last_lines(ask: Callable[..., Any], lines: int) -> dict[str, Any] | None:
    """Returns the answer to `LOG` with all of the last *lines*, of which a node gives a part at once; None for None.

    ask: asks the node, with ``lines=`` for the first part, with ``offset=`` for another.
    """
    found = ask(lines=lines)
    return None if found is None else rest_of_lines(ask, lines, found)


def rest_of_lines(ask: Callable[..., Any], lines: int, first: dict[str, Any]) -> dict[str, Any]:
    """Returns *first*, the first part of an answer to `LOG`, with the others; see `last_lines`."""
    part: dict[str, Any] | None = first
    text, offset = "", first["offset"]
    for _ in range(_MOST_PARTS):
        if part is None or not part["text"]:
            break
        text, offset = text + str(part["text"]), part["offset"]
        # More is what came meanwhile, of a program that prints without end. Carriage returns end lines too, as on the
        # node; one at the end may be half of a line's end.
        if text.count("\n") + text[:-1].count("\r") - text.count("\r\n") >= lines:
            break
        part = ask(offset=offset)
    return {**first, "text": text, "offset": offset}
