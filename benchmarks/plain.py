"""A fleet of plain `distributed`, to compare with: a scheduler, and a Nanny for each slot, as Dask has them, with TLS.

``python -m benchmarks.plain SLOTS`` reads the fleet secret from its input, prints the process ids of the workers as
JSON once all are there, and ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from distributed import Client, Nanny, Scheduler

from skyinfra.protocol.credentials import Credentials


async def serve(slots: int, secret: str) -> None:
    security = Credentials.derive(secret, role="scheduler", name="plain").security()
    async with Scheduler(host="127.0.0.1", port=0, security=security, dashboard_address="127.0.0.1:0") as scheduler:
        nannies = [
            Nanny(scheduler.address, nthreads=1, security=security, dashboard_address="127.0.0.1:0")
            for _ in range(slots)
        ]
        await asyncio.gather(*nannies)
        async with Client(scheduler.address, security=security, asynchronous=True) as client:
            pids = await client.run(os.getpid)
        print(json.dumps(list(pids.values())), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await asyncio.gather(*(nanny.close() for nanny in nannies))


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.stdin.readline().strip()))
