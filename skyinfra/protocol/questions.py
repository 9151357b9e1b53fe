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


def last_lines(ask: Callable[..., Any], lines: int) -> dict[str, Any] | None:
    """Returns the answer to `LOG` with all of the last *lines*, of which a node gives a part at once; None for None.

    ask: asks the node, with ``lines=`` for the first part, with ``offset=`` for another.
    """
    found = ask(lines=lines)
    return None if found is None else rest_of_lines(ask, lines, found)


def rest_of_lines(ask: Callable[..., Any], lines: int, first: dict[str, Any]) -> dict[str, Any]:
    """Returns *first*, the first part of an answer to `LOG`, with the others; see `last_lines`."""
    part: dict[str, Any] | None = first
    texts, offset, count = [], first["offset"], 0
    while part is not None and part["text"]:
        texts.append(str(part["text"]))
        offset, count = part["offset"], count + texts[-1].count("\n")
        # More is what came meanwhile, of a program that prints without end.
        if count >= lines:
            break
        part = ask(offset=offset)
    return {**first, "text": "".join(texts), "offset": offset}
