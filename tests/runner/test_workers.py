"""Ending workers: a stop that is cancelled half way ends them all the same, and is taken up by the next one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from distributed import Nanny

from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Endpoint
from skyinfra.runner.state import NodeDirectory
from skyinfra.runner.supervisor import SlotSupervisor
from skyinfra.runner.workers import Wanted, Workers

SLOT = InstanceInfo("n1", 0, "n1/0", "cpu", "s/p")


def never() -> Nanny:
    raise OSError("no address")


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_cancelled_stop_is_taken_up(tmp_path: Path, cancelled: bool) -> None:
    async def main() -> None:
        workers = Workers(NodeDirectory(tmp_path))
        wanted = Wanted(SLOT, None, (), (), (), Endpoint("127.0.0.1", 1), "secret")
        supervisor = SlotSupervisor(SLOT, never)
        workers._running[wanted] = supervisor
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(workers.stop([wanted]))
        await asyncio.sleep(0)
        if cancelled:
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            assert list(workers) == [wanted], "somebody has to wait for it"
        await workers.stop(workers)
        assert supervisor.ended
        assert list(workers) == []
        await asyncio.gather(stopping, return_exceptions=True)

    asyncio.run(main())
