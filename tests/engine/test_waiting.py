"""Waiting for some time at most."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from skyinfra.engine.waiting import within


def test_what_comes_in_time_is_given_and_what_does_not_is_ended() -> None:
    async def main() -> None:
        assert await within(asyncio.sleep(0, "x"), 5) == "x"
        assert await within(asyncio.sleep(0, "x"), None) == "x"
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await within(never, 0.01)
        assert never.cancelled()

    asyncio.run(main())


def test_a_loop_that_is_cancelled_while_it_is_woken_ends() -> None:
    async def main() -> None:
        event = asyncio.Event()

        async def loop() -> None:
            while True:
                event.clear()
                with contextlib.suppress(TimeoutError):
                    await within(event.wait(), 60)

        task = asyncio.create_task(loop())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        event.set()
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()

    asyncio.run(main())
