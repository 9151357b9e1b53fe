"""Times at which a task passes the places of its way, for `benchmarks.hops`.

Functions of client, head and worker are wrapped; nothing of this is in the product. A process writes
``PLACE KEY SECONDS`` a line into the folder that `FOLDER` names; the seconds are of CLOCK_MONOTONIC, which all
processes of a machine share.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "SKYINFRA_BENCHMARK_HOPS"
# Set: no file is passed, as between machines.
FAR = "SKYINFRA_BENCHMARK_FAR"
_EVERY_S = 0.2

_lines: list[str] = []
_writer: int | None = None
# Gives the key of the call of a wrapped function.
Key = Callable[..., object]


def note(place: str, key: object, seconds: float | None = None) -> None:
    """Notes that *key* passes *place* now, or that *place* took so many seconds."""
    global _writer
    value = time.monotonic() if seconds is None else seconds
    _lines.append(f"{place}\t{key}\t{value:.7f}\n")
    if _writer != os.getpid():
        _writer = os.getpid()
        threading.Thread(target=_write, daemon=True).start()


def _write() -> None:
    file = Path(os.environ[FOLDER], str(os.getpid()))
    while True:
        time.sleep(_EVERY_S)
        found, _lines[:] = _lines[:], []
        with file.open("a", encoding="utf-8") as open_file:
            open_file.writelines(found)


def read(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Yields place, key and seconds of all processes."""
    for file in folder.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            place, key, seconds = line.split("\t")
            yield place, key, float(seconds)


# Messages -----------------------------------------------------------------------------------------------------------


def _of_messages(where: str, messages: Any) -> None:
    for each in messages if isinstance(messages, list | tuple) else ():
        operation = each.get("op") if isinstance(each, dict) else None
        if operation in ("skyinfra-task", "compute-task"):
            note(f"{where} {operation}", each["key"])
        elif operation in ("log-event", "event"):
            said = each["msg"] if operation == "log-event" else each["event"][1]
            if isinstance(said, list | tuple) and said and said[0] == "outcome":
                note(f"{where} {operation}", said[1])


def _wrap_connections(kind: Any) -> None:
    read, write = kind.read, kind.__dict__.get("write")

    async def traced_read(self: Any, *arguments: Any, **keywords: Any) -> Any:
        message = await read(self, *arguments, **keywords)
        _of_messages("read", message)
        return message

    kind.read = traced_read
    if write is not None:

        async def traced_write(self: Any, message: Any, *arguments: Any, **keywords: Any) -> Any:
            _of_messages("write", message)
            return await write(self, message, *arguments, **keywords)

        kind.write = traced_write


# Functions ----------------------------------------------------------------------------------------------------------


def _passing(owner: Any, name: str, before: str = "", after: str = "", *, key: Key) -> None:
    """Notes when a call of *name* of *owner* begins, as the place *before*, and ends, as *after*."""
    plain = getattr(owner, name)

    def begins(arguments: Any, keywords: Any) -> None:
        if before:
            note(before, key(*arguments, **keywords))

    if inspect.iscoroutinefunction(plain):

        @functools.wraps(plain)
        async def traced(*arguments: Any, **keywords: Any) -> Any:
            begins(arguments, keywords)
            return await plain(*arguments, **keywords)
    else:

        @functools.wraps(plain)
        def traced(*arguments: Any, **keywords: Any) -> Any:
            begins(arguments, keywords)
            found = plain(*arguments, **keywords)
            if after:
                note(after, key(*arguments, **keywords))
            return found

    setattr(owner, name, traced)


def _taking(owner: Any, name: str, place: str) -> None:
    """Notes how long each call of *name* of *owner* takes."""
    plain = getattr(owner, name)
    if inspect.iscoroutinefunction(plain):

        @functools.wraps(plain)
        async def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.monotonic()
            try:
                return await plain(*arguments, **keywords)
            finally:
                note(place, "-", time.monotonic() - start)
    else:

        @functools.wraps(plain)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.monotonic()
            try:
                return plain(*arguments, **keywords)
            finally:
                note(place, "-", time.monotonic() - start)

    setattr(owner, name, timed)


def _of_header(header: bytes, *_: object) -> object:
    from skyinfra.protocol.calls import Header

    return Header.loads(header).key


def _patch(module: ModuleType) -> None:
    match module.__name__:
        case "distributed.comm.tcp":
            _wrap_connections(module.TCP)
        case "skyinfra.engine.dask_comms":
            _wrap_connections(module._Answers)
        case "skyinfra.tasks.pickling":
            _passing(module.Shipment, "__init__", after="pickled", key=lambda self, *_, **__: self.key)
        case "skyinfra.engine.executor":
            _passing(module.Executor, "attempt", "attempt", key=lambda self, name, key, *_, **__: key)
        case "skyinfra.submission.futures":
            _passing(module.Future, "_ended", "ended", key=lambda self, _: self.key)
        case "skyinfra.head.scheduler":
            _passing(module.FleetScheduler, "take_task", "take", "placed", key=lambda *_, key, **__: key)
        case "skyinfra.worker.process":
            _passing(module.SlotWorker, "execute", "execute", key=lambda self, key, **_: key)
        case "skyinfra.worker.execute":
            _passing(module, "run", "run", key=_of_header)
            _passing(module, "_call", "call", "called", key=lambda task, *_: task.key)
        case "skyinfra.blobs.payload":
            _taking(module, "_sha256", "sha256")
            _taking(module, "pack", "pickle")
        case "skyinfra.blobs.transfer":
            _taking(module, "send", "send")
            _taking(module, "fetch", "fetch")
            _taking(module, "send_unnamed", "send unnamed")
            if FAR in os.environ:
                module.store_near = _nowhere
        case "skyinfra.worker.inputs":
            _taking(module, "load", "load")
            _taking(module, "keep", "keep")
        case "skyinfra.sync.sync":
            _taking(module, "fetched", "fetched")
        case "skyinfra.tasks.outcomes":
            _taking(module, "result", "unpickle")


async def _nowhere(_: object) -> None:
    """Stands for `transfer.store_near` where the head is on another machine."""


_MODULES = frozenset(
    (
        "distributed.comm.tcp",
        "skyinfra.engine.dask_comms",
        "skyinfra.tasks.pickling",
        "skyinfra.engine.executor",
        "skyinfra.submission.futures",
        "skyinfra.head.scheduler",
        "skyinfra.worker.process",
        "skyinfra.worker.execute",
        "skyinfra.blobs.payload",
        "skyinfra.blobs.transfer",
        "skyinfra.worker.inputs",
        "skyinfra.sync.sync",
        "skyinfra.tasks.outcomes",
    )
)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps functions of a module after it was imported."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def traced(module: ModuleType) -> None:
                execute(module)
                _patch(module)

            spec.loader.exec_module = traced  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Wraps the functions of modules that this process has imported, and will import."""
    for name in sorted(_MODULES & sys.modules.keys()):
        _patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
