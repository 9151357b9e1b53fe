"""How TLS connections between nodes and clients are opened.

Where the peer hangs up, or speaks, before the handshake, Tornado raises a ValueError, which `distributed` takes for a
malformed address: what was to connect again once the head is back ends with it. It is a closed connection; one that
is told at once, since what speaks there may be no fleet at all.
"""

from __future__ import annotations

from typing import Any

from distributed.comm import registry
from distributed.comm.core import FatalCommClosedError
from distributed.comm.tcp import TLSBackend, TLSConnector


class _Connector(TLSConnector):  # type: ignore[misc]
    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
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
