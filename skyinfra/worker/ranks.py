"""The node's part of a gang: a task that waits for the other ranks and then runs its own in a process of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from distributed import get_worker
from distributed.comm import get_address_host

from skyinfra.engine.waiting import interruptible
from skyinfra.errors import SlotFailed
from skyinfra.node import faults
from skyinfra.protocol import calls, failures, gang, services
from skyinfra.protocol.calls import PROGRAM_GRACE_S
from skyinfra.protocol.gang import GangState, Rank, RankEnd, Work
from skyinfra.worker import attempts, cancellation, rank, scripts, secrets, streaming, task_folder

# After a head that did not answer.
_PAUSE_S = 0.1
# The head answers after that long where nothing has changed.
_WAIT_S = 30.0
# The rank that failed first has that long to say with what; one that has given its result, to end.
_LAST_WORDS_S = 10.0
_SIOCGIFADDR = 0x8915
_NO_PYTHON = "the Python of the node does not start a rank: its process ended with exit code {code} before it had begun"
_NO_PYTHON_HINT = "`skyinfra logs` has what it printed. Variables such as PYTHONHOME in env= do that as well."


def run(place: Rank, work: Work) -> RankEnd:
    """Runs one rank of a gang, as a task, once all of its ranks have their slots. See `RankEnd`."""
    head = _Head(get_worker(), place)
    with _port(place) as port:
        state = head.join(port)
        if state["phase"] != "started":
            return RankEnd()
        if place.holds:
            head.wait(head.over())
            return RankEnd()
        address, shared = state["members"][0]
        variables = {**gang.environment(place, address, shared), **place.visible, **place.env}
        return _Process(head, place, work).run(
            {**_defaults(place, head.address), **os.environ, **_with_own_modules(variables)}
        )


class _Head:
    """Calls of the head from the thread of a task."""

    def __init__(self, worker: Any, place: Rank) -> None:
        self.worker = worker
        self.key = str(worker.get_current_task())
        self.address = get_address_host(worker.address).strip("[]")
        self._place = place

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Runs *coroutine* in the loop of the worker."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.worker.loop.asyncio_loop)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Returns its result; the thread can be stopped meanwhile."""
        return interruptible(self.start(coroutine))

    def join(self, port: int) -> GangState:
        """Tells the head that this rank has its slot, and waits for the others; the state of the gang then."""
        while True:
            call = services.gang_join(
                self.worker.scheduler,
                gang=self._place.gang,
                rank=self._place.rank,
                worker=self.worker.address,
                address=self.address,
                port=port,
                wait_s=_WAIT_S,
            )
            try:
                state: GangState = self.wait(call)
            except OSError:  # a worker whose head is gone for good ends, and this task with it
                time.sleep(_PAUSE_S)
            else:
                if state["phase"] != "granted":
                    return state

    async def over(self) -> int | None:
        """Waits until the gang is over; the rank that failed first. None where none did, or the head is gone."""
        scheduler = self.worker.scheduler
        with contextlib.suppress(OSError):
            while True:
                state = await services.gang_state(scheduler, gang=self._place.gang, seen="started", wait_s=_WAIT_S)
                if state["phase"] != "started":
                    return state["first"]
        return None

    async def report(self, *, age: float = 0.0, died: bool = False, ok: bool = False) -> None:
        """Reports how this rank ended, *age* seconds ago. A head that is gone has no gang any more."""
        gang, rank = self._place.gang, self._place.rank
        with contextlib.suppress(OSError):
            await services.gang_report(self.worker.scheduler, gang=gang, rank=rank, age=age, died=died, ok=ok)


class _Process:
    """The process of a rank."""

    def __init__(self, head: _Head, place: Rank, work: Work) -> None:
        self._head = head
        self._place = place
        self._work = work
        self._timers: list[threading.Timer] = []
        self._group = 0
        self._made: scripts.Place | None = None
        self._begun = False
        self._failed = False
        self._outcome: bytes | None = None
        self._over = False
        self._late = False

    def run(self, variables: dict[str, str]) -> RankEnd:
        with contextlib.ExitStack() as stack:
            process, pipe = self._start(variables, stack)
            stack.callback(self._forget_timers)
            over = self._head.start(self._head.over())
            stack.callback(over.cancel)
            over.add_done_callback(self._end)
            self._after(self._place.timeout, self._too_late)
            listener = threading.Thread(target=self._listen, args=(process, pipe), daemon=True)
            listener.start()
            scripts.stream(process, self._place.topic, self._place.run_id)
            code = process.wait()
            # What the rank started and left behind may hold its end of the pipe. What the node does now takes no time
            # of the task.
            self._forget_timers()
            self._kill()
            listener.join(_LAST_WORDS_S)
            if code > 0 and not (self._begun or self._over):
                raise SlotFailed(_NO_PYTHON.format(code=code), hint=_NO_PYTHON_HINT)
            if self._made is not None and self._place.topic:
                self._made.keep(scripts.reporter(self._place.topic, self._place.run_id))
        return self._ended(code)

    def _start(
        self, variables: dict[str, str], stack: contextlib.ExitStack
    ) -> tuple[subprocess.Popen[bytes], Connection]:
        # A script lies in a new folder, which is its own, as does a function with a working directory.
        folder: str | None
        if self._work.call is None:
            self._made = made = stack.enter_context(scripts.copied(self._work.source, self._work.name, variables))
            folder, variables = made.folder, made.env
            self._work = replace(self._work, name=str(made.path.relative_to(folder)))
        else:
            folder, variables = stack.enter_context(task_folder.copied(variables))
        with faults.raised_by_node():
            pipe, theirs = multiprocessing.Pipe()
        with theirs:
            number = theirs.fileno()
            # -P: what lies in the folder of the worker is no module of the rank.
            command = [sys.executable, "-P", "-u", "-m", "skyinfra.worker.rank", str(number)]
            started = scripts.program(
                self._head.key, command, cwd=folder, env=variables, piped=bool(self._place.topic), pass_fds=(number,)
            )
            process, self._group = stack.enter_context(started)
        return process, pipe

    def _listen(self, process: subprocess.Popen[bytes], pipe: Connection) -> None:
        """Hands the rank its work and hears how it ends, in a thread of its own."""
        # It ends with the process of the rank.
        with pipe, contextlib.suppress(EOFError, ConnectionError):
            pipe.send(self._work)
            while True:
                kind, content = pipe.recv()
                if kind in (rank.BEGUN, rank.UNABLE):
                    self._begun = kind == rank.BEGUN
                elif kind == rank.FAILED:
                    self._failed = True
                    self._head.wait(self._head.report(age=time.monotonic() - content))
                    pipe.send(None)
                elif kind == rank.PROGRESS:
                    streaming.relay_progress(*content)
                else:
                    self._outcome = content
                    self._after(_LAST_WORDS_S, self._kill)
        code = process.wait()
        if self._outcome is None and not self._failed and not self._is_end(code) and not self._over:
            if code > 0 and not self._begun:
                return
            self._failed = True
            self._head.wait(self._head.report(died=True))

    def _is_end(self, code: int) -> bool:
        """Returns whether a rank without an outcome has ended well with *code*: a function gives its result first."""
        return code == 0 and self._work.call is None

    def _ended(self, code: int) -> RankEnd:
        if self._late:
            error = failures.late(self._work.name, self._place.timeout or 0)
            self._outcome = pickle.dumps(calls.Outcome(failure=failures.of(error, below=__file__)))
        if self._outcome is None and self._over and not self._failed:
            return RankEnd()
        ok = not self._failed and not self._late and (self._outcome is not None or self._is_end(code))
        if ok:
            self._head.wait(self._head.report(ok=True))
        last: tuple[str, ...] = ()
        if not ok and self._outcome is None and not self._place.topic:
            # Where it has secrets, what it printed comes into its file, masked, that much later.
            time.sleep(2 * secrets.EVERY_S)
            masker = secrets.of_process()
            last = tuple(map(masker.text, attempts.last_lines(self._head.key)))
        return RankEnd(self._outcome, code if self._work.call is None or self._outcome is None else None, ok, last)

    # Ending it ------------------------------------------------------------------------------------------------------

    def _end(self, over: concurrent.futures.Future[int | None]) -> None:
        """The gang is over: what another rank's failure ends is killed, what its client ends is asked to end. The rank
        that failed first is to say with what."""
        if over.cancelled():
            return
        self._over = True
        first = over.result()
        if first is None:
            # A script cleans up as at its terminal: SIGTERM would end it at once.
            asked = signal.SIGINT if self._work.call is None else signal.SIGTERM
            cancellation.signal_group(self._group, asked)
            self._after(PROGRAM_GRACE_S, self._kill)
        elif first == self._place.rank:
            self._after(_LAST_WORDS_S, self._kill)
        elif not self._late:  # that one has a grace of its own
            self._kill()

    def _too_late(self) -> None:
        self._late = True
        self._head.start(self._head.report())
        cancellation.signal_group(self._group, signal.SIGTERM)
        self._after(PROGRAM_GRACE_S if self._work.call is None else cancellation.GRACE_S, self._kill)

    def _after(self, seconds: float | None, action: Callable[[], object]) -> None:
        if seconds is not None:
            self._timers.append(cancellation.later(seconds, action))

    def _kill(self) -> None:
        cancellation.signal_group(self._group, signal.SIGKILL)

    def _forget_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()


@contextlib.contextmanager
def _port(place: Rank) -> Iterator[int]:
    """A port of this node at which rank 0 may listen; 0 for any other rank.

    The socket that keeps it from others does not listen: with ``SO_REUSEADDR``, which torch and JAX set, another may.
    """
    if place.rank != 0 or place.framework is None:
        yield 0
        return
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", 0))
        yield int(kept.getsockname()[1])


def _defaults(place: Rank, address: str) -> dict[str, str]:
    """Returns the variables that the framework needs, unless the image sets them."""
    if place.framework is None:
        return {}
    # gloo asks for the address of the node's own name, which a node may not be able to resolve.
    name = _interface(address) if place.framework == "torch" else None
    return {**gang.DEFAULTS[place.framework], **({} if name is None else {"GLOO_SOCKET_IFNAME": name})}


def _with_own_modules(variables: dict[str, str]) -> dict[str, str]:
    """*variables*, whose import path comes after that of the client's modules."""
    own = os.environ.get("PYTHONPATH")
    if own and "PYTHONPATH" in variables:
        return {**variables, "PYTHONPATH": os.pathsep.join([own, variables["PYTHONPATH"]])}
    return variables


def _interface(address: str) -> str | None:
    """Returns the network interface that has the IPv4 *address*; None where none has."""
    import fcntl  # a client may run where there is none

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
