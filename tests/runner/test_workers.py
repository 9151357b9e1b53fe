"""Ending workers: what is drained together, and a stop that is cancelled half way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from distributed import Nanny

from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Endpoint
from skyinfra.runner.supervisor import SlotSupervisor, Unfinished
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


class Busy(SlotSupervisor):
    """Takes *seconds* to go out of service, and has a task that does not end. *said*: what was done, in order."""

    def __init__(self, slot: InstanceInfo, seconds: float, said: list[str]) -> None:
        super().__init__(slot, never)
        self._seconds = seconds
        self._said = said

    async def drain(self) -> Unfinished:
        self.draining_since = 0.0
        await asyncio.sleep(self._seconds)
        self._said.append(f"{self.slot.slot} is out of service")
        return Unfinished(("task-1",))

    def kill(self) -> None:
        self._said.append(f"{self.slot.slot} is ended")
        super().kill()


def test_none_is_ended_before_all_are_out_of_service(tmp_path: Path) -> None:
    """What ran on the first would start again on the second, which is to be ended as well."""

    async def main() -> list[str]:
        said: list[str] = []
        workers = Workers(NodeDirectory(tmp_path))
        for index, seconds in enumerate((0.0, 0.2)):
            slot = replace(SLOT, worker=index, slot=f"n1/{index}")
            wanted = Wanted(slot, None, (), (), (), Endpoint("127.0.0.1", 1), "secret")
            workers._running[wanted] = Busy(slot, seconds, said)
        assert await workers.drain(workers, 0.0, since=0.0) == set()
        return said

    said = asyncio.run(main())
    assert said[:2] == ["n1/0 is out of service", "n1/1 is out of service"]
    assert sorted(said[2:]) == ["n1/0 is ended", "n1/1 is ended"]
