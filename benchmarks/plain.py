"""A fleet of plain `distributed`, to compare with: a scheduler, and a Nanny for each slot, as Dask has them, with TLS.

``python -m benchmarks.plain SLOTS [MODULE]`` reads the fleet secret from its input, prints its address and the process
ids of the workers as JSON once all are there, each with the module imported, and ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from distributed import Client, Nanny, Scheduler

from skyinfra.engine.credentials import Credentials


async def serve(slots: int, secret: str, preload: list[str]) -> None:
    security = Credentials.derive(secret, role="scheduler", name="plain").security()
    async with Scheduler(host="127.0.0.1", port=0, security=security, dashboard_address="127.0.0.1:0") as scheduler:
        nannies = [
            Nanny(
                scheduler.address,
                nthreads=1,
                security=security,
                dashboard_address="127.0.0.1:0",
                preload=preload,
                resources={"slot": 1},
            )
            for _ in range(slots)
        ]
        await asyncio.gather(*nannies)
        async with Client(scheduler.address, security=security, asynchronous=True) as client:
            pids = await client.run(os.getpid)
            imported = await client.run(lambda: [name in sys.modules for name in preload])
            assert all(map(all, imported.values())), preload
        print(json.dumps({"address": scheduler.address, "workers": list(pids.values())}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await asyncio.gather(*(nanny.close() for nanny in nannies))


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.stdin.readline().strip(), sys.argv[2:]))
