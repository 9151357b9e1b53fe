"""What a worker does at Dask's inside: here, how it comes to the next head."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from distributed import Worker

from skyinfra.engine import dask_worker
from skyinfra.engine.credentials import Credentials
from skyinfra.head import queue

# Of Dask between two attempts to connect, each twice as long as the one before: the last of them is as long as may be.
PAUSES = 14


def test_a_worker_whose_head_is_away_never_waits_long_before_it_tries_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dask's pauses double up to 30 s, more than the next head waits for what the worker carries."""
    pauses: list[float] = []

    def uniform(_: float, most: float) -> float:
        pauses.append(most)
        return 0.0

    monkeypatch.setattr("distributed.comm.core.random.uniform", uniform)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nowhere = f"tls://127.0.0.1:{server.getsockname()[1]}"
    security = Credentials.derive("0123456789abcdef" * 4, role="worker", name="test").security()

    async def run() -> None:
        worker = Worker(nowhere, security=security, dashboard=False, local_directory=str(tmp_path))
        worker.contact_address = nowhere
        before = worker.connection_args
        registering = asyncio.create_task(dask_worker.register_again(worker))
        while len(pauses) < PAUSES and not registering.done():
            await asyncio.sleep(0.01)
        registering.cancel()
        await asyncio.gather(registering, return_exceptions=True)
        await worker.close()
        assert worker.connection_args == before
        assert len(pauses) >= PAUSES
        assert max(pauses) <= queue._BACK_S / 4

    asyncio.run(run())
