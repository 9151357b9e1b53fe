"""The other side of remote calls, without a network."""

from __future__ import annotations

from typing import Any

from distributed.protocol import dumps, loads

from skyinfra.protocol.rpc import Handlers


class LocalPeer:
    """Answers by *handlers* in the form in which messages travel; None for an unknown call, as Dask. calls: made."""

    def __init__(self, handlers: Handlers) -> None:
        self.calls: list[str] = []
        self._handlers = handlers

    def __getattr__(self, name: str) -> Any:
        async def call(**request: Any) -> Any:
            self.calls.append(name.removeprefix("skyinfra_"))
            handler = self._handlers.get(name)
            answer = None if handler is None else await handler(**loads(dumps(request), deserialize=False))
            return loads(dumps(answer))

        return call
