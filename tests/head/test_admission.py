"""The head's scheduler runs nothing that a member of the fleet sends, and refuses the calls of Dask's that would."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed
import pytest
from distributed import Client, Scheduler, SchedulerPlugin, WorkerPlugin
from distributed.core import Server
from distributed.diagnostics.plugin import NannyPlugin
from distributed.protocol import pickle, to_serialize
from distributed.protocol.serialize import ToPickle
from local_fleets.client_fixtures import SECRET, Fleet

import skyinfra as sky
from skyinfra.client import Pool, open_pool
from skyinfra.engine.credentials import Credentials
from skyinfra.head import admission
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.tasks import Task

REFUSED = "explicitly disallowed"


@dataclass(frozen=True)
class Touches:
    """Makes the folder *path* where it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def security(role: Any) -> distributed.Security:
    return Credentials.derive(SECRET, role=role, name="test").security()


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    """A plain client of Dask, with the credentials of the fleet."""
    with Client(str(fleet.manifest.head), security=security("client"), set_as_default=False) as client:
        yield client


def on_head(client: Client, call: str, **request: Any) -> Any:
    return client.sync(getattr(client.scheduler, call), **request)


def own(work: Callable[[FleetScheduler], Coroutine[Any, Any, Any]]) -> Any:
    """What *work* gives with a scheduler of this process."""

    async def run() -> Any:
        keywords = {"dashboard": False, "dashboard_address": "127.0.0.1:0", "security": security("scheduler")}
        scheduler = await FleetScheduler(layout=FleetLayout(1), host="127.0.0.1", port=0, **keywords)
        try:
            return await work(scheduler)
        finally:
            await scheduler.close()

    return asyncio.run(run())


async def blocked(scheduler: FleetScheduler) -> list[str]:
    return list(scheduler.blocked_handlers)


def test_every_other_call_of_dask_is_refused(client: Client) -> None:
    names = own(blocked)
    assert {"run_function", "feed", "register_scheduler_plugin", "register_worker_plugin", "terminate"} < set(names)
    for name in names:
        with pytest.raises(ValueError, match=REFUSED):
            on_head(client, name)
    # Those that were left out by mistake, or have another name in this version of Dask.
    program = (
        "import asyncio; from distributed import Scheduler\n"
        "async def run():\n"
        "    made = Scheduler(dashboard=False, dashboard_address='127.0.0.1:0')\n"
        "    print(*made.handlers); print(*made.stream_handlers); await made.close()\n"
        "asyncio.run(run())"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    calls, messages = (set(line.split()) for line in printed.splitlines())
    assert calls - set(names) == admission._CALLS
    assert messages > admission._MESSAGES


RUNNING: dict[str, Callable[[Client, Any], object]] = {
    "run_on_scheduler": lambda client, evil: client.run_on_scheduler(lambda: evil),
    "feed": lambda client, evil: on_head(client, "feed", function=pickle.dumps(evil), setup=None, teardown=None),
    "scheduler plugin": lambda client, evil: client.register_plugin(_with(SchedulerPlugin(), evil)),
    "worker plugin": lambda client, evil: client.register_plugin(_with(WorkerPlugin(), evil)),
    "nanny plugin": lambda client, evil: client.register_plugin(_with(NannyPlugin(), evil)),
    "cluster dump": lambda client, evil: on_head(
        client, "dump_cluster_state_to_url", url=f"file://{evil.path}", exclude=(), format="msgpack"
    ),
}


def _with(plugin: Any, evil: Any) -> Any:
    plugin.evil = evil
    plugin.name = "evil"
    return plugin


@pytest.mark.parametrize("name", RUNNING)
def test_what_runs_code_in_a_scheduler_is_refused(client: Client, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(ValueError, match=REFUSED):
        RUNNING[name](client, Touches(str(marker)))
    assert not list(tmp_path.iterdir())


def test_a_graph_of_dask_is_not_unpickled(fleet: Fleet, client: Client, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(CancelledError):
        client.submit(len, Touches(str(marker)), pure=False).result(timeout=60)
    assert not marker.exists()
    with open_pool(fleet.manifest) as pool:
        assert Task(abs, (-1,)) >> pool == 1


def test_a_message_with_a_pickle_ends_its_connection_alone(
    fleet: Fleet, pool: Pool, client: Client, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(OSError):
        on_head(client, "identity", n_workers=ToPickle(Touches(str(marker))))
    # What is serialized is carried and not read: the call does not know what to do with it.
    with pytest.raises((TypeError, ValueError)):
        on_head(client, "identity", n_workers=to_serialize(Touches(str(marker))))
    assert not marker.exists()
    assert len(pool.slots()) == 4


def test_an_answer_of_a_worker_runs_nothing_in_the_scheduler(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    async def ask(scheduler: FleetScheduler) -> None:
        answers = {"run": lambda: ToPickle(Touches(str(marker))), "get": lambda: to_serialize(Scheduler)}
        server = Server(answers, needs_workdir=False)
        await server.listen("tls://127.0.0.1:0", **security("worker").get_listen_args("worker"))
        try:
            with pytest.raises(sky.UnsafeAnswer):
                await scheduler.rpc(server.address).run()
            carried = await scheduler.rpc(server.address).get()
            assert type(carried).__name__ == "Serialized"
        finally:
            await server.close()

    own(ask)
    assert not marker.exists()


def test_a_large_call_arrives(pool: Pool) -> None:
    data = os.urandom(3_000_000)
    assert Task(bytes.__len__, (data,)) >> pool == len(data)
