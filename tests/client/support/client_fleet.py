"""A fleet for tests, in a process of its own: one scheduler and one Nanny per slot, as the runner starts them.

Reads its configuration as JSON from stdin (one line), writes ``{"port": ...}`` to stdout, ends when stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import dask
from distributed import Nanny, Scheduler, Worker

from skyinfra.protocol.credentials import Credentials
from skyinfra.protocol.instance import STARTUP_KEY, VARIABLE, InstanceInfo


class SlotWorker(Worker):
    def __init__(self, *arguments, slot, **keywords):
        self.slot = slot
        super().__init__(*arguments, **keywords)

    async def get_startup_information(self):
        return {**await super().get_startup_information(), STARTUP_KEY: self.slot.to_json()}


class OtherScheduler(Scheduler):
    """A scheduler that claims to run other versions."""

    claims: dict[str, str] = {}  # noqa: RUF012

    def versions(self):
        found = super().versions()
        found["host"]["python"] = self.claims.get("python", found["host"]["python"])
        found["packages"]["distributed"] = self.claims.get("distributed", found["packages"]["distributed"])
        return found


def start_nanny(address: str, node: str, index: int, secret: str, root: Path) -> Nanny:
    slot = InstanceInfo(
        node=node,
        worker=index,
        slot=f"{node}/{index}",
        kind="partition",
        fleet="stack/pool",
        profile="3g.40gb",
        accelerator="H100",
        gpu=0,
        uuid=f"MIG-{node}-{index}",
        visible=("CUDA_VISIBLE_DEVICES", f"MIG-{node}-{index}"),
        simulated=True,
    )
    directory = root / node
    directory.mkdir(exist_ok=True)
    return Nanny(
        address,
        name=slot.slot,
        nthreads=1,
        host="127.0.0.1",
        security=Credentials.derive(secret, role="worker", name=slot.slot).security(),
        resources={"slot": 1, f"slot:{slot.slot}": 1, f"node:{node}": 1, "profile:3g.40gb": 1, "accel:H100": 1},
        memory_limit=0,
        dashboard=False,
        dashboard_address="127.0.0.1:0",
        death_timeout=60,
        local_directory=str(root / "scratch"),
        worker_class=SlotWorker,
        env={
            "CUDA_VISIBLE_DEVICES": f"MIG-{node}-{index}",
            VARIABLE: json.dumps(slot.to_json()),
            "SKYINFRA_NODE_DIR": str(directory),
        },
        slot=slot,
    )


async def serve(config: dict) -> None:
    secret, root = config["secret"], Path(config["root"])
    OtherScheduler.claims = config.get("claims", {})
    scheduler = await OtherScheduler(
        host="127.0.0.1",
        port=config.get("port", 0),
        security=Credentials.derive(secret, role="scheduler", name="n0").security(),
        dashboard=False,
        dashboard_address="127.0.0.1:0",
    )
    nannies = [
        start_nanny(scheduler.address, node, index, secret, root)
        for node in config["nodes"]
        for index in range(config["slots"])
    ]
    await asyncio.gather(*nannies)
    print(json.dumps({"port": scheduler.port}), flush=True)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    await asyncio.gather(*(nanny.close(timeout=2) for nanny in nannies))
    await scheduler.close()


if __name__ == "__main__":
    dask.config.set(
        {
            "distributed.scheduler.allowed-failures": 60,
            "distributed.comm.timeouts.tcp": "15s",
            "distributed.comm.timeouts.connect": "10s",
            "distributed.worker.multiprocessing-method": "forkserver",
            "distributed.worker.daemon": False,
        }
    )
    from client_fleet import serve as importable_serve

    asyncio.run(importable_serve(json.loads(sys.stdin.readline())))
