"""A fleet for tests, in a process of its own: one scheduler and one Nanny per slot, as the runner starts them.

Reads its configuration as JSON from stdin (one line), writes ``{"port": ...}`` to stdout, ends when stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import NoReturn
from unittest import mock

from distributed import Nanny

from skyinfra.blobs.store import BlobStore
from skyinfra.engine import settings
from skyinfra.engine.credentials import Credentials
from skyinfra.head import sick, start
from skyinfra.head.blobs import HeadBlobs
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.protocol import rpc
from skyinfra.protocol.fleet import FleetLayout, SizeState
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.runner import slots
from skyinfra.worker import process


class OtherScheduler(FleetScheduler):
    """A scheduler that claims to run other versions."""

    claims: dict[str, str] = {}  # noqa: RUF012
    # When it saw that a client left, with its tasks, and when it ended a task; the call ``test_ends``.
    ends: list[tuple[list[str], float]] = []  # noqa: RUF012

    def _end_later(self, client):
        self.ends.append(([str(task.key) for task in self.clients[client].wants_what], time.monotonic()))
        super()._end_later(client)

    def abandon(self, worker, key, *, cancelled=False):
        self.ends.append(([key], time.monotonic()))
        super().abandon(worker, key, cancelled=cancelled)

    def identity(self, n_workers=-1):
        found = super().identity(n_workers)
        found["skyinfra"]["version"] = self.claims.get("skyinfra", found["skyinfra"]["version"])
        return found

    def kept(self):
        """What it keeps of clients, tasks and messages; the call ``test_kept``."""
        streams = (*self.stream_comms.values(), *self.client_comms.values())
        return {
            "topics": [name for name in self._broker._topics if name.startswith("skyinfra-")],
            "spans": len(self.extensions["spans"].spans),
            "sent": sum(len(stream.recent_message_log) for stream in streams),
        }

    def sized(self, size):
        """Gives the fleet a number of nodes that follows the work; the call ``test_size``."""
        self.size_state = SizeState.read(rpc.lists(size))

    def versions(self):
        found = super().versions()
        found["host"]["python"] = self.claims.get("python", found["host"]["python"])
        found["packages"]["distributed"] = self.claims.get("distributed", found["packages"]["distributed"])
        return found


def start_nanny(
    address: str, node: str, index: int, secret: str, root: Path, *, whole: bool, memory: list, uuids: list
) -> Nanny:
    """*whole*: the slot is a GPU of its own, and not a partition of GPU 0. *memory*: GB of each slot, if known.
    *uuids*: of the devices of a driver, where there is one."""
    name = f"GPU-{node}-{index}" if whole else f"MIG-{node}-{index}"
    name = uuids[index] if uuids else name
    slot = InstanceInfo(
        node=node,
        worker=index,
        slot=f"{node}/{index}",
        kind="gpu" if whole else "partition",
        fleet="stack/pool",
        profile=None if whole else "3g.40gb",
        accelerator="H100",
        gpu=index if whole else 0,
        uuid=name,
        visible=("CUDA_VISIBLE_DEVICES", name),
        start=None if whole else 4 * index,
        size=None if whole else 4,
        units=None if whole else 8,
        simulated=not uuids,
        memory_gb=memory[index] if memory else None,
    )
    directory = root / node
    directory.mkdir(exist_ok=True)
    packages, scratch = directory / "packages", root / "scratch"
    return process.nanny(
        slot,
        scheduler=address,
        host="127.0.0.1",
        security=Credentials.derive(secret, role="worker", name=slot.slot).security(),
        env=process.environment(
            slot,
            directory=directory,
            packages=packages,
            variables={},
            confine=slots.environment(slot, "nvidia"),
            threads=1,
        ),
        packages=packages,
        scratch=scratch,
    )


async def serve(config: dict) -> None:
    secret, root = config["secret"], Path(config["root"])
    OtherScheduler.claims = config.get("claims", {})
    sick.TIMES = config.get("deaths", sick.TIMES)
    scheduler = await OtherScheduler(
        layout=FleetLayout(1),
        handlers=HeadBlobs(BlobStore(root / "n0" / "blobs", **config.get("blobs", {}))).handlers,
        host="127.0.0.1",
        port=config.get("port") or start.free_port("127.0.0.1"),
        security=Credentials.derive(secret, role="scheduler", name="n0").security(),
        dashboard=False,
        dashboard_address="127.0.0.1:0",
    )
    scheduler.handlers["test_kept"] = scheduler.kept
    scheduler.handlers["test_secrets"] = lambda: sum(map(len, scheduler._secrets._values.values()))
    scheduler.handlers["test_forget_secrets"] = lambda: scheduler._secrets._values.clear()
    scheduler.handlers["test_ends"] = lambda: scheduler.ends
    scheduler.handlers["test_size"] = scheduler.sized
    scheduler.declared_secrets = config.get("secrets", {})
    nannies = [
        start_nanny(
            scheduler.address,
            node,
            index,
            secret,
            root,
            whole=config.get("whole", False),
            memory=config.get("memory", []),
            uuids=config.get("uuids", []),
        )
        for node in config["nodes"]
        for index in range(config["slots"])
    ]
    for node in config["nodes"]:
        scheduler.promise(node, [f"{node}/{index}" for index in range(config.get("promised", config["slots"]))])
    await asyncio.gather(*nannies)
    print(json.dumps({"port": scheduler.port}), flush=True)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    await asyncio.gather(*(nanny.close(timeout=2) for nanny in nannies))
    await scheduler.close()


def main() -> None:
    """Is a fleet until its stdin ends."""
    config = json.loads(sys.stdin.readline())
    settings.configure(scratch=Path(config["root"]) / "scratch")
    # While this process has one thread.
    with mock.patch("multiprocessing.util.spawnv_passfds", _fork_server):
        forkserver.ensure_running()
    asyncio.run(serve(config))


def _fork_server(_path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """Forks what `multiprocessing` would start as its fork server, which has all modules then; returns its id."""
    pid = os.fork()
    if not pid:
        _be_fork_server(arguments[-1], {0, 1, 2, *kept})
    return pid


def _be_fork_server(source: str, kept: set[int]) -> NoReturn:
    try:
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept:  # noqa: PTH208
            with contextlib.suppress(OSError):
                os.close(number)
        # As in a new process: it has neither of its own.
        forkserver._forkserver.__init__()  # type: ignore[misc]
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        exec(source, {})
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001 - what ends a process is printed
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)
