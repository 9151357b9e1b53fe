"""A head that somebody has taken over: it has the credentials of the fleet, and answers as a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.core import Server
from distributed.versions import get_versions

from local_fleets.client_fixtures import SECRET
from skyinfra.engine.credentials import Credentials
from skyinfra.protocol.fleet import STATE_VERSION, FleetState
from skyinfra.protocol.instance import STARTUP_KEY
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot

THREAD = "the head's thread"


@dataclass
class Head:
    """A scheduler that has been taken over. It answers as *way* says, from the first question on or *later*.

    answers: the answers to other calls, in an envelope; a function gets what was asked. identity: its workers and the
    state of the fleet.
    """

    way: Callable[[str], Any]
    marker: Path
    later: bool = False
    answers: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] | None = None
    asked: list[str] = field(default_factory=list)

    def __getitem__(self, op: str) -> Callable[..., Any]:
        def answer(**request: Any) -> Any:
            self.asked.append(op)
            if self.later and op == "versions":
                return get_versions()
            if op == "identity" and (self.identity is not None or (self.later and request.get("n_workers") == 0)):
                return self.identity or {"workers": {}, STARTUP_KEY: FleetState(STATE_VERSION).to_json()}
            if op in self.answers:
                found = self.answers[op]
                return {"answer": found(request) if callable(found) else found}
            return self.way(str(self.marker))

        return answer

    async def serve(self, started: Callable[[int, Callable[[], None]], None]) -> None:
        server = Server({}, needs_workdir=False)
        server.handlers = self
        security = Credentials.derive(SECRET, role="scheduler", name="n0").security()
        await server.listen("tls://127.0.0.1:0", **security.get_listen_args("scheduler"))
        end = asyncio.Event()
        loop = asyncio.get_running_loop()
        started(server.port, lambda: loop.call_soon_threadsafe(end.set))
        await end.wait()
        await server.close()


def manifest_at(port: int) -> Manifest:
    """The manifest of a fleet of one node whose head listens at *port*."""
    return Manifest(
        version=1,
        stack="stack",
        pool="pool",
        provider="local",
        head=Endpoint("127.0.0.1", port),
        nodes=(ManifestNode("n0", "n0", "127.0.0.1", head=True),),
        slots=(ManifestSlot(0, "cpu"),),
        secret=SECRET,
    )


@contextmanager
def starting() -> Iterator[Callable[[Head], Manifest]]:
    """Gives a function that starts a head and returns the manifest of its fleet; they end with the block."""
    ends: list[Callable[[], None]] = []

    def start(head: Head) -> Manifest:
        ports: list[int] = []
        ready = threading.Event()

        def started(port: int, end: Callable[[], None]) -> None:
            ports.append(port)
            ready.set()
            ends.append(lambda: (end(), thread.join()))

        thread = threading.Thread(target=lambda: asyncio.run(head.serve(started)), name=THREAD)
        thread.start()
        assert ready.wait(60)
        return manifest_at(ports[0])

    try:
        yield start
    finally:
        for end in ends:
            end()
