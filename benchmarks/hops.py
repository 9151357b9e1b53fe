"""Where the time of a task goes: its way from the client to the result hop by hop, and the floor in the same run.

The floor is what the same machine needs for the same bytes without skyinfra and Dask: an echo over TLS through the
same three processes, a bare stream, a copy in memory, a hash, a file. docs/performance.md reads the figures.
``python -m benchmarks.hops`` prints them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import traced
from benchmarks.measure import Result, seconds_of, show

ROOT = Path(__file__).resolve().parent.parent
SLOTS = 2
LARGE = 100_000_000
# Of a message about an empty task, on each of its hops.
_ECHO = 700
_CHUNK = 2**20
# The places of a task in their order, each with what happened since the one before.
PLACES = {
    "submit": "",
    "pickled": "client: the task and its header as bytes",
    "attempt": "client: to the thread of the connection, a place in the window",
    "write skyinfra-task": "client: the message is batched",
    "read skyinfra-task": "client to head: msgpack, TLS, the other process wakes up",
    "take": "head: to the handler",
    "placed": "head: Dask's scheduler chooses a slot",
    "write compute-task": "head: the message is batched",
    "read compute-task": "head to worker: msgpack, TLS, the other process wakes up",
    "execute": "worker: Dask's state of the task",
    "run": "worker: unpickles the call, to the main thread",
    "call": "worker: attempts, output, what surrounds a task",
    "called": "worker: the function within its fence",
    "write log-event": "worker: puts back what surrounds it; to the loop; batched",
    "read log-event": "worker to head: msgpack, TLS, the other process wakes up",
    "write event": "head: on to the client; batched",
    "read event": "head to client: msgpack, TLS, the other process wakes up",
    "ended": "client: the outcome is read, the future is done",
    "result": "client: to the thread that waits, the result unpickled",
}


def run(*, quick: bool = False) -> Iterator[Result]:
    runs = 200 if quick else 500
    with tempfile.TemporaryDirectory() as folder:
        near = _traced(Path(folder, "near"), runs)
        far = _traced(Path(folder, "far"), 0, {traced.FAR: "1"})
        floor = _floor(Path(folder), runs)
    whole = near["hops"]["round trip"]
    yield Result("round trip of an empty task", "TLS echo, same hops", whole, whole / floor["echo"], "", _micro(whole))
    yield Result("TLS echo through the same three processes", "the task", floor["echo"], floor["echo"] / whole)
    for place, seconds in near["hops"].items():
        if place != "round trip":
            yield Result(PLACES[place], "the task", seconds, seconds / whole, "", _micro(seconds))
    for name, found in (("files passed", near), ("sent", far)):
        for way in ("to", "from"):
            total = found[way]["all"]
            what, stream = f"100 MB {way} a task, {name}", floor["stream"]
            yield Result(what, "bare TLS, same hops", total, total / stream, "", _milli(total))
            for step, seconds in found[way].items():
                if step != "all":
                    yield Result(f"  of it: {step}", "the task", seconds, seconds / total, "", _milli(seconds))
    for what in ("stream", "one hop", "sha256", "file", "copy"):
        base, seconds = floor["copy"], floor[what]
        yield Result(f"100 MB, {_FLOOR[what]}", "a copy in memory", seconds, seconds / base, "", _milli(seconds))


_FLOOR = {
    "stream": "bare TLS through the same hops",
    "one hop": "bare TLS, one hop",
    "sha256": "SHA-256",
    "file": "written to a file",
    "copy": "copied in memory",
}


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# A task -------------------------------------------------------------------------------------------------------------


def _traced(folder: Path, runs: int, more: Mapping[str, str] | None = None) -> dict[str, dict[str, float]]:
    """Runs tasks on a fleet of this machine whose processes, and whose client, note where they are."""
    folder.mkdir()
    path = os.pathsep.join([str(ROOT / "benchmarks" / "traced_site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, traced.FOLDER: str(folder), **(more or {})}
    command = [sys.executable, "-m", "benchmarks.hops", "measure", str(runs)]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(runs: int) -> dict[str, dict[str, float]]:
    from benchmarks import engine, tasks

    folder = Path(os.environ[traced.FOLDER])
    data = [os.urandom(LARGE) for _ in range(4)]
    numbers = itertools.count(1)
    way: dict[str, list[dict[str, float]]] = {"to": [], "from": []}
    with (
        tempfile.TemporaryDirectory() as root,
        engine.serving(Path(root, "fleet"), SLOTS) as (node, _),
        node.pool() as pool,
    ):
        for _ in range(runs + 50):
            start = time.monotonic()
            future = pool.submit(int)
            future.result()
            end = time.monotonic()
            traced.note("submit", future.key, start)
            traced.note("result", future.key, end)
        for each in data:
            way["to"].append(_steps(folder, lambda each=each: pool.submit(len, each).result()))
            way["from"].append(_steps(folder, lambda: pool.submit(tasks.zeros, next(numbers)).result()))
    median = statistics.median
    large = {
        name: {step: median(each.get(step, 0.0) for each in found[1:]) for step in found[-1]}
        for name, found in way.items()
    }
    return {"hops": _hops(folder) if runs else {}, **large}


def _hops(folder: Path) -> dict[str, float]:
    """Returns the medians of the times between two places, by the later one, and of the whole."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for place, key, seconds in traced.read(folder):
        if place in PLACES:
            times[key].setdefault(place, seconds)
    passed = [found for found in times.values() if len(found) == len(PLACES)][50:]
    pairs = list(itertools.pairwise(PLACES))
    whole = statistics.median(found["result"] - found["submit"] for found in passed)
    return {
        "round trip": whole,
        **{later: statistics.median(found[later] - found[one] for found in passed) for one, later in pairs},
    }


def _steps(folder: Path, call: object) -> dict[str, float]:
    """Returns how long *call* takes, and the steps of it that are noted, in seconds."""
    assert callable(call)
    time.sleep(0.5)
    before = {(file.name, file.stat().st_size) for file in folder.iterdir()}
    sizes = dict(before)
    start = time.perf_counter()
    call()
    found: dict[str, float] = {"all": time.perf_counter() - start}
    time.sleep(0.5)
    for file in folder.iterdir():
        for line in file.read_text(encoding="utf-8")[sizes.get(file.name, 0) :].splitlines():
            place, key, seconds = line.split("\t")
            if key == "-":
                found[place] = found.get(place, 0.0) + float(seconds)
    return found


# The floor ----------------------------------------------------------------------------------------------------------


def _floor(folder: Path, runs: int) -> dict[str, float]:
    data, file = os.urandom(LARGE), folder / "written"
    found = asyncio.run(_echoes(runs))
    return {
        **found,
        "sha256": seconds_of(lambda: hashlib.sha256(data).digest(), runs=3),
        "file": seconds_of(lambda: file.write_bytes(data), runs=3),
        "copy": seconds_of(lambda: bytearray(data), runs=3),
    }


async def _echoes(runs: int) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        worker = await _started(stack, "0")
        head = await _started(stack, worker)
        near, through = await _connected(worker), await _connected(head)
        times = [await _ask(through, _ECHO) for _ in range(runs + 50)][50:]
        large = [await _ask(through, LARGE) for _ in range(3)]
        one = [await _ask(near, LARGE) for _ in range(3)]
        for _, writer in (near, through):
            writer.close()
    return {name: statistics.median(each) for name, each in (("echo", times), ("stream", large), ("one hop", one))}


async def _started(stack: contextlib.AsyncExitStack, behind: str) -> str:
    """Starts a process that answers, itself or by asking that at the port *behind*; returns its port."""
    command = [sys.executable, "-m", "benchmarks.hops", "answer", behind]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert process.stdout is not None
    stack.push_async_callback(process.communicate, b"")  # which closes its input
    return (await process.stdout.readline()).decode().strip()


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connected(port: str) -> _Streams:
    arguments = _security("client").get_connection_args("client")
    found = await asyncio.open_connection("127.0.0.1", int(port), ssl=arguments["ssl_context"], limit=4 * _CHUNK)
    return found


def _security(role: str) -> object:
    from skyinfra.engine.credentials import Credentials

    return Credentials.derive("0123456789abcdef" * 4, role=role, name="hops").security()


async def _ask(streams: _Streams, size: int) -> float:
    """Asks for *size* bytes, with a message as long as that about an empty task; how long the answer took."""
    reader, writer = streams
    start = time.perf_counter()
    writer.write(size.to_bytes(_ECHO, "big"))
    left = size
    while left:
        left -= len(await reader.read(min(left, _CHUNK)))
    return time.perf_counter() - start


async def _answer(behind: str) -> None:
    further = await _connected(behind) if behind != "0" else None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                asked = await reader.readexactly(_ECHO)
                left = int.from_bytes(asked, "big")
                if further is not None:
                    further[1].write(asked)
                while left:
                    part = bytes(min(left, _CHUNK)) if further is None else await further[0].read(min(left, _CHUNK))
                    writer.write(part)
                    left -= len(part)
                    await writer.drain()
        writer.close()

    context = _security("scheduler").get_listen_args("scheduler")["ssl_context"]
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context, limit=4 * _CHUNK)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(_measure(int(sys.argv[2]))))
    elif sys.argv[1:2] == ["answer"]:
        asyncio.run(_answer(sys.argv[2]))
    else:
        show(run(quick="--quick" in sys.argv))
