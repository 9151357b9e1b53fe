"""The tunnel to the dashboard ends what nobody uses any more."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from front_ends.recorded_pages import RecordedPages

from skyinfra.head import tunnel
from skyinfra.head.tunnel import Tunnel


async def ended(pages: RecordedPages) -> None:
    async with asyncio.timeout(30):
        while not pages.closed:
            await asyncio.sleep(0.01)


def test_the_dashboard_ends_when_its_client_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_LOOK_S", 0.01)
    monkeypatch.setattr(tunnel, "_GONE_S", 10_000.0)
    made: list[RecordedPages] = []

    def begin(_: object) -> Any:
        made.append(RecordedPages())
        return made[-1]

    monkeypatch.setattr(tunnel, "Pages", begin)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    async def test() -> None:
        passage = Tunnel(cast(Any, None))
        number = await passage.open()
        waiting = asyncio.create_task(passage.receive(number, 20))
        for _ in range(10):
            await asyncio.sleep(0.02)
        # It is in use, however often somebody looks.
        assert [each.closed for each in made] == [0]
        assert await passage.send(number, b"GET / HTTP/1.1\r\n")
        # Its client is not heard of any more.
        monkeypatch.setattr(tunnel, "_GONE_S", -1.0)
        await ended(made[0])
        assert await waiting is None
        assert not await passage.send(number, b"more")
        # Another one begins it anew.
        monkeypatch.setattr(tunnel, "_GONE_S", 10_000.0)
        another = await passage.open()
        assert another != number
        assert [each.closed for each in made] == [1, 0]
        passage.close(another)
        for each in made:
            await each.end()

    asyncio.run(test())
