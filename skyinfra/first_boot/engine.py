"""Doing the steps, one after the other, and saying how they went.

Each attempt at a step is a process of its own in a process group of its own, so that one that hangs is ended with all
that it has started. Attempts and the pauses between them take no longer than the step may, together.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any, Iterator

from .operations import OPERATIONS
from .programs import Failed, no_space, read_json, replace

_LOG_LIMIT = 2**20
_LINES, _LINE = 15, 300
_PAUSES_S = (2.0, 5.0, 15.0, 30.0)
_POLL_S = 0.2
# A program that is asked to end has that long, so that a package is not left half installed.
_GRACE_S = 5.0
_SKIPPED = 10


class _Tail:
    """The last lines of what a step prints, none of them long."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._rest = b""

    def add(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-4 * _LINE :]
        for line in lines:
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()[:_LINE]
        if text:
            self._lines.append(text)

    def end(self) -> list[str]:
        self._keep(self._rest)
        self._rest = b""
        return list(self._lines)


def run(path: str) -> int:
    """Does the steps that the file *path* lists. 0: all are done. 1: one failed, which status.json says now."""
    with opened(path) as boot:
        for each in boot["steps"]:
            failure = step(boot, each)
            if failure is not None:
                _give_up(boot, failure)
                return 1
        with contextlib.suppress(FileNotFoundError):
            Path(boot["failure"]).unlink()
    return 0


@contextlib.contextmanager
def opened(path: str) -> Iterator[dict[str, Any]]:
    """Gives the content of the file *path* of steps, for this process alone, in the environment of the steps."""
    boot: dict[str, Any] = read_json(path)
    with Path(path).open(encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.environ.update(boot["environment"])
        os.umask(0o022)
        # Python looks for modules where it runs, and what stands here has the names of some.
        os.chdir("/")
        yield boot


def step(boot: dict[str, Any], step: dict[str, Any]) -> dict[str, Any] | None:
    """Does *step*. None where it is done; otherwise what is to be told of it."""
    started = time.monotonic()
    deadline = started + step["timeout_s"]
    _log(boot, step=step["name"], state="started")
    for attempt in range(1, step["attempts"] + 1):
        code, lines = _attempt(step, deadline)
        seconds = round(time.monotonic() - started, 3)
        if code in (0, _SKIPPED):
            _log(boot, step=step["name"], state="done" if code == 0 else "skipped", seconds=seconds)
            return None
        if code is None:
            error = f"it was not done within {step['timeout_s']:g} s and was ended"
        else:
            # Its own last line says why.
            error = lines.pop() if lines else f"it ended with exit code {code}"
        full = no_space(os.path.dirname(boot["status"]), "\n".join([error, *lines]))  # noqa: PTH120
        if full and full != error:
            error, lines = full, [*lines, error]
        pause = _PAUSES_S[min(attempt, len(_PAUSES_S)) - 1]
        last = attempt == step["attempts"] or time.monotonic() + pause >= deadline
        failed = {"step": step["name"], "error": error, "lines": lines}
        _log(boot, state="failed", attempt=attempt, seconds=seconds, again=not last, **failed)
        if last:
            return failed
        time.sleep(pause)
    return None


def _attempt(step: dict[str, Any], deadline: float) -> tuple[int | None, list[str]]:
    """The exit code, None where it took too long, and the last lines."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _operate(step, writer)
    os.close(writer)
    tail = _Tail()
    with os.fdopen(reader, "rb", buffering=0) as stream:
        code = _follow(child, stream, tail, deadline)
    return code, tail.end()


def _follow(child: int, stream: Any, tail: _Tail, deadline: float) -> int | None:
    """Reads what *child* prints until it ends. What it leaves running does not count."""
    open_ = True
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            _end(child)
            return None
        if open_:
            if select.select([stream], [], [], min(left, _POLL_S))[0]:
                data = stream.read(2**16)
                tail.add(data)
                open_ = bool(data)
                if data:
                    continue
        else:
            time.sleep(min(left, 0.01))
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            while open_ and select.select([stream], [], [], 0)[0]:
                data = stream.read(2**16)
                tail.add(data)
                open_ = bool(data)
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _end(child: int) -> None:
    """Ends *child* and its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until:
            if os.waitpid(child, os.WNOHANG)[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                return
            time.sleep(0.02)


def _operate(step: dict[str, Any], writer: int) -> None:
    """The child: does the operation, prints why it cannot, and never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        operation = OPERATIONS[step["operation"]](**step["arguments"])
        if operation.done():
            code = _SKIPPED
        else:
            operation.do()
            code = 0
    except Failed as error:
        print(error, flush=True)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error, flush=True)
    except BaseException as error:  # noqa: BLE001 - it must not return into its parent's code
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)


def _give_up(boot: dict[str, Any], failed: dict[str, Any]) -> None:
    """Says what failed: to the runner's readers, on the console, and to whoever asks; see `report`."""
    raw, config = _config(boot)
    fleet = f"{config.get('stack', '?')}/{config.get('pool', '?')}"
    failure = {"version": 1, "fleet": fleet, "node": str(config.get("node", "?")), "time": _now(), **failed}
    message = "\n".join([f"step {failed['step']}: {failed['error']}", *failed["lines"]])
    status = {
        "version": 1,
        "fleet": fleet,
        "node": failure["node"],
        "state": "failed",
        "pid": None,
        "scheduler": None,
        "config_sha256": hashlib.sha256(raw).hexdigest(),
        "generation": 0,
        "simulated": False,
        "error": {"class": "BootFailed", "message": message},
        "layout": {"from": "node.json", "gpus": []},
        "waits_for": [],
        "slots": [],
    }
    # On a full disk the first one, which is in memory, is there at least.
    for path, document in ((boot["failure"], failure), (boot["status"], status)):
        with _noting(path):
            replace(path, json.dumps(document) + "\n")
    with _noting("/dev/console"), open("/dev/console", "w", encoding="utf-8") as console:  # noqa: PTH123
        console.write(f"skyinfra: node {failure['node']}: step {failed['step']} failed: {failed['error']}\r\n")
    if boot["report_unit"]:
        subprocess.call(["systemctl", "start", "--no-block", boot["report_unit"]])


def _config(boot: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    try:
        raw = Path(boot["node"]).read_bytes()
        config = json.loads(raw)
    except (OSError, ValueError):
        return b"", {}
    return raw, config if isinstance(config, dict) else {}


def _log(boot: dict[str, Any], **fields: Any) -> None:
    """One line of JSON, in the log and on standard output. Of a log that has grown large, the last one is kept."""
    line = json.dumps({"time": _now(), **fields})
    print(line, flush=True)
    log = Path(boot["log"])
    with _noting(str(log)):
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > _LOG_LIMIT:
            log.replace(log.with_name(log.name + ".1"))
        with log.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


@contextlib.contextmanager
def _noting(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", flush=True)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
