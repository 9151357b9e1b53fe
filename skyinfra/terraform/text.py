"""Reads Terraform's output: its lines, errors without their frames, and runs on HCP Terraform.

Such a run is shown as text, whatever is asked for: ``-json`` speaks only where Terraform itself does the work.
"""

from __future__ import annotations

import codecs
import os
import re
import select
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from skyinfra.errors import StateLocked


@dataclass(frozen=True)
class Event:
    """A step of a plan or apply.

    kind: ``planned``, ``start``, ``progress``, ``output``, ``done``, ``failed`` or ``text``. address: of the resource.
    action: create, update, delete, replace, read. seconds: since the resource's start. text: a line for a person.
    """

    kind: str
    address: str = ""
    action: str = ""
    seconds: float = 0.0
    text: str = ""


# "# ADDRESS will be created", and what else Terraform says it will do with a resource.
_PLANNED = re.compile(
    r"^  # (?P<address>\S.*?)(?: \(deposed object \w+\))? "
    r"(?:will be (?P<action>created|updated in-place|destroyed|replaced)"
    r"|(?:is tainted, so (?:it )?)?must be (?P<again>replaced))\b"
)
_ACTIONS = {"created": "create", "updated in-place": "update", "destroyed": "delete", "replaced": "replace"}
_STEP = re.compile(
    r"^(?P<address>[\w-]+\..*?): (?:(?P<begun>Creating|Modifying|Destroying|Reading)\.\.\."
    r"|(?P<done>Creation|Modifications|Destruction|Read) complete after )"
)
_STEPS = {
    "Creating": "create",
    "Creation": "create",
    "Modifying": "update",
    "Modifications": "update",
    "Destroying": "delete",
    "Destruction": "delete",
    "Reading": "read",
    "Read": "read",
}
_STILL = re.compile(r"^(?P<address>[\w-]+\..*?): Still (?:creating|modifying|destroying|reading)\.\.\. ")
_RUN = re.compile(r"^https://\S+/runs/run-[\w-]+$")


def event_of(line: str) -> Event:
    """Returns the step in a *line* of a remote run; for another line, ``text`` without colours."""
    line = bare(line, strip=False)
    if found := _PLANNED.match(line):
        return Event("planned", found["address"], _ACTIONS[found["action"] or found["again"]])
    if found := _STEP.match(line):
        return Event("start" if found["begun"] else "done", found["address"], _STEPS[found["begun"] or found["done"]])
    if found := _STILL.match(line):
        return Event("progress", found["address"])
    return Event("text", text=line)


def run_address(lines: Sequence[str]) -> str | None:
    """Returns the web address of the remote run that printed *lines*; None for another run."""
    return next((text for text in map(bare, lines) if _RUN.match(text)), None)


_LOCK = re.compile(r"^\s*(ID|Operation|Who|Created):\s+(?:OperationType)?(.+?)\s*$", re.MULTILINE)
_WORKSPACE = re.compile(r'workspace already locked\s+\(lock ID:\s+"([^"\s]+)"\)')


def locked(errors: Sequence[tuple[str, str]], terraform: Sequence[str]) -> StateLocked | None:
    """Returns the error for a state that another run holds; None where it is something else."""
    text = next((text for _, text in errors if text.startswith("Error acquiring the state lock")), "")
    lock = {name: value for name, value in _LOCK.findall(text) if value}
    if "ID" not in lock:
        return None
    if workspace := _WORKSPACE.search(text):
        # Terraform shows this run's own lock then, and says nothing of the other one.
        lock["ID"] = workspace[1]
        what = f"the workspace {workspace[1]} is locked in HCP Terraform"
    else:
        what = f"another {_holder(lock)} is at work on it"
    error = StateLocked(
        f"the state is locked: {what}",
        hint="Nothing was changed. Wait until it has ended, and run this again.\n"
        f"If it has died and the lock is left over: {shlex.join((*terraform, 'force-unlock', lock['ID']))}",
    )
    error.diagnostics = tuple(errors)
    return error


def _holder(lock: Mapping[str, str]) -> str:
    return " ".join(
        [
            f"{lock['Operation'].lower()} of Terraform" if "Operation" in lock else "run of Terraform",
            *([f"by {lock['Who']}"] if "Who" in lock else []),
            *([f"since {lock['Created'][:19]} UTC"] if lock.get("Created", "").endswith("UTC") else []),
        ]
    )


_TOKEN = re.compile(r"\bat host (\S+)\n.*\bunauthorized\b", re.DOTALL)


def login(errors: Sequence[tuple[str, str]]) -> str | None:
    """Returns what to do where HCP Terraform does not take the token; None where it is something else."""
    host = next((found[1] for _, text in errors if (found := _TOKEN.search(text))), None)
    return host and f"The token is not accepted, or has expired: terraform login {host}"


_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# The fleet secret, as the modules make it: two UUIDs. Terraform's debug log shows it.
_SECRET = re.compile(r"(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}){2}")


def masked(text: str) -> str:
    """Returns *text* with fleet secrets replaced by ``(secret)``."""
    return _SECRET.sub("(secret)", text)


_PROVISIONER = re.compile(
    r"local-exec provisioner error\nError running command '.*?': exit status \d+\. Output:\s", re.DOTALL
)


def without_provisioner(text: str) -> str:
    """Returns *text* without Terraform's words about a failed local node, which explains itself."""
    return _PROVISIONER.sub("", text)


def readable(text: str, command: str) -> str:
    """Terraform's words about a *command* that failed, without its frames."""
    return f"terraform {command} failed\n{without_provisioner(bare(text)).strip()}"


def bare(text: str, *, strip: bool = True) -> str:
    """*text* without colours and frames; *strip*: without space around it, too."""
    text = re.sub(r"^[╷│╵] ?", "", _COLOR.sub("", text), flags=re.MULTILINE)
    return text.strip() if strip else text


# The place of an error in a file: the lines between its first one and its reason.
_PLACE = re.compile(r"\n\n  (?:with (?P<address>\S.*?),\n  )?on \S+ line \d+.*?(?=\n\n|\Z)", re.DOTALL)


# Terraform breaks the lines of what it prints for a person there, or a little before.
_WIDTH = 75
# Within so many milliseconds a signal is handled, and so many bytes are read at once.
_SIGNALS_MS, _PIECE = 500, 65_536


def _unbroken(text: str) -> str:
    """*text* with the lines joined that were broken because the next word did not fit."""
    lines: list[str] = []
    for line in text.splitlines():
        word = line.partition(" ")[0]
        last = lines[-1].rpartition("\n")[2] if lines else ""
        if word and last and not last.startswith(" ") and len(last) + 1 + len(word) > _WIDTH:
            lines[-1] += f"\n{line}"
        else:
            lines.append(line)
    return "\n".join(line.replace("\n", " ") for line in lines)


def plain_errors(text: str) -> list[tuple[str, str]]:
    """Returns the errors of a command without JSON output: the address of each, where it has one, and its text."""
    found = []
    for part in re.split(r"^Error: ", _unbroken(bare(text)), flags=re.MULTILINE)[1:]:
        place = _PLACE.search(part)
        found.append(((place and place["address"]) or "", part.strip()))
    return found


def without_place(text: str) -> str:
    """Returns one of the `plain_errors` without the lines of its file, as ``-json`` prints it."""
    return re.sub(r"\n\n+", "\n", _PLACE.sub("", text, count=1)).strip()


def pieces(stream: IO[bytes]) -> Iterator[str]:
    """Yields what comes from *stream*; a signal interrupts it.

    Python handles one that comes just before a read, or to another thread, when the read is over. Where Terraform waits
    for that signal, this is never.
    """
    decoder, ready = codecs.getincrementaldecoder("utf-8")("replace"), select.poll()
    ready.register(stream, select.POLLIN)
    while True:
        while not ready.poll(_SIGNALS_MS):
            pass
        data = os.read(stream.fileno(), _PIECE)
        yield decoder.decode(data, final=not data)
        if not data:
            return


def lines(texts: Iterable[str]) -> Iterator[str]:
    """Yields the lines of *texts*, which come in pieces, without their ends."""
    rest = ""
    for text in texts:
        *whole, rest = (rest + text).split("\n")
        yield from whole
    if rest:
        yield rest
