"""How TLS connections between nodes and clients are opened.

Where the peer hangs up, or speaks, before the handshake, Tornado raises a ValueError, which `distributed` takes for a
malformed address: what was to connect again once the head is back ends with it. It is a closed connection; one that
is told at once, since what speaks there may be no fleet at all. Nor does it close the socket then: that would be open
until somebody collects garbage.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from distributed.comm import registry
from distributed.comm.core import FatalCommClosedError
from distributed.comm.tcp import BaseTCPConnector, TLSBackend, TLSConnector
from tornado.tcpclient import TCPClient

# The streams that the present call of `_Connector.connect` has made.
_made: ContextVar[list[Any]] = ContextVar("skyinfra_streams")


class _Client(TCPClient):
    """Tornado's, which notes the streams that it makes."""

    def _create_stream(self, *arguments: Any, **keywords: Any) -> Any:
        stream, connected = super()._create_stream(*arguments, **keywords)
        _made.get([]).append(stream)
        return stream, connected


class _Connector(TLSConnector):  # type: ignore[misc]
    client = _Client(resolver=BaseTCPConnector.client.resolver)

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        made: list[Any] = []
        _made.set(made)
        try:
            return await self._connect(address, deserialize, connection_args)
        except BaseException:
            for stream in made:
                # One that TLS has taken over has no socket any more.
                if stream.socket is not None:
                    stream.close()
            raise

    async def _connect(self, address: str, deserialize: bool, connection_args: dict[str, Any]) -> Any:
        try:
            return await super().connect(address, deserialize=deserialize, **connection_args)
        except ValueError as error:
            if "convert to SSL" not in str(error):
                raise
            raise FatalCommClosedError(f"{address} speaks or hangs up before the handshake") from error


class _Backend(TLSBackend):  # type: ignore[misc]
    _connector_class = _Connector


def install() -> None:
    """Makes every ``tls://`` connection of this process so, from now on."""
    if not isinstance(registry.backends.get("tls"), _Backend):
        registry.backends["tls"] = _Backend()
