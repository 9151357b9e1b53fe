"""Clients of Dask that are given up before they are connected, or while they close."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable, Iterator

import distributed
import pytest

from skyinfra.engine import dask_client


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a head that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def client_of(address: str) -> distributed.Client:
    return distributed.Client(address, asynchronous=True, set_as_default=False, timeout=60)


def said(run: Callable[[], Awaitable[None]]) -> list[str]:
    """What Python says of *run* and of what it leaves behind."""

    async def run_it() -> None:
        await run()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(run_it())
        gc.collect()
        texts = [str(each.message) for each in found]
        # They hold what they are about, of which Python says more when it goes.
        found.clear()
    return [text for text in texts if "never awaited" in text]


async def given_up(connecting: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await connecting


def test_dask_begins_to_close_one_when_python_collects_it(silent: str) -> None:
    async def run() -> None:
        await given_up(client_of(silent))

    assert said(run), "this version of Dask needs no help"


def test_one_that_is_given_up_while_it_connects_leaves_nothing(silent: str) -> None:
    async def run() -> None:
        client = client_of(silent)
        await given_up(dask_client.connected(client))
        assert client.status == "closed" and client._started.cancelled()

    assert said(run) == []


def test_one_that_does_not_close_in_time_leaves_nothing(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: object, fast: bool = False) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        client = client_of(silent)
        await asyncio.sleep(0.1)
        monkeypatch.setattr(distributed.Client, "_close", never)
        await dask_client.end_client(client, 0.1)
        client._started.cancel()
        assert client.status == "closed"

    assert said(run) == []
