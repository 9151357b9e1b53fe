"""What stands for the dashboard's pages behind the head's tunnel: it writes down what arrives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\npages"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


class RecordedPages:
    """Answers each request with *answer*; a websocket gets back what it sends. heard: all bytes in their order."""

    def __init__(self, answer: bytes = PAGE) -> None:
        self.answer = answer
        self.heard: list[bytes] = []
        self.closed = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        self._serving.add(asyncio.create_task(self._serve(*await asyncio.open_connection(sock=theirs))))
        return await asyncio.open_connection(sock=ours)

    def close(self) -> None:
        self.closed += 1

    async def end(self) -> None:
        for each in self._serving:
            each.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        # Sockets that were closed are closed in the next round of the loop.
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            self.heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.answer)
            while b"101" in self.answer[:12] and (data := await reader.read(100)):
                self.heard.append(data)
                writer.write(data)
            # What more is said would be heard here, until the other side ends.
            if b"close" not in self.answer:
                while data := await reader.read(100):
                    self.heard.append(data)


class Head:
    """Makes calls of `skyinfra.protocol.services` to *handlers* of this process."""

    def __init__(self, handlers: Any) -> None:
        self._handlers = handlers

    def __getattr__(self, name: str) -> Any:
        return self._handlers[name]
