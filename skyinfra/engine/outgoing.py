"""Requests to addresses that somebody else has named, such as webhooks: none reaches the metadata service of a machine.

That service gives credentials of the machine to whoever asks from it. An address is looked at as it is connected to,
not as it is written: names that resolve there, decimal and octal forms, and IPv4 within IPv6 are all the same then.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from typing import Any

# Link-local ones, which those of most clouds are, are refused by their kind. Others: AWS and its pods (fd00:ec2::254,
# ::23), Google Cloud (fd20:ce::254), Scaleway (fd00:42::42), Alibaba Cloud (100.100.100.200), Oracle Cloud
# (192.0.0.192), Azure's wire server (168.63.129.16). From https://github.com/canonical/cloud-init (data sources), the
# clouds' documents on instance metadata, and https://gist.github.com/BuffaloWill/fa96693af67e3a3dd3fb; 2026-11-25.
_METADATA = tuple(
    ipaddress.ip_network(each)
    for each in (
        *("fd00:ec2::/32", "fd20:ce::/64", "fd00:42::/64", "100.100.100.200/32", "192.0.0.192/32"),
        "168.63.129.16/32",
    )
)
# IPv6 addresses with one of IPv4 in their last 32 bits: mapped, translated, compatible, and of NAT64.
_CARRIERS = tuple(ipaddress.ip_network(each) for each in ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96", "64:ff9b::/96"))
_NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")
_6TO4 = ipaddress.ip_network("2002::/16")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(OSError):
    """An address that no request may reach."""


def open_request(request: urllib.request.Request, timeout: float) -> Any:
    """Opens *request* without following a redirect. Raises `AddressRefused` (within URLError), and as urllib does."""
    return urllib.request.build_opener(_Http, _Https, _NoRedirect).open(request, timeout=timeout)


def forbidden(host: str) -> bool:
    """Returns whether *host* is an address, in any form, that no request may reach; a name is none. Asks nobody."""
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_forbidden(str(each[4][0])) for each in found)


def _is_forbidden(text: str) -> bool:
    return any(
        each.is_link_local
        or each.is_multicast
        or each.is_unspecified
        or any(each.version == network.version and each in network for network in _METADATA)
        for each in _meant(ipaddress.ip_address(text.partition("%")[0]))
    )


def _meant(address: Address) -> Iterator[Address]:
    """Gives *address*, and that of IPv4 which stands in it."""
    yield address
    if isinstance(address, ipaddress.IPv4Address):
        return
    if any(address in network for network in (*_CARRIERS, _NAT64_LOCAL)) and int(address) > 1:  # not the loopback
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    elif address in _6TO4:
        yield ipaddress.IPv4Address(int(address) >> 80 & 0xFFFFFFFF)


def _connected(address: tuple[str, int], timeout: Any = None, source: Any = None) -> socket.socket:
    """Connects to one of the addresses of a name; those that were looked at are those that are connected to."""
    host, port = address
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for each in found:
        if _is_forbidden(each):
            raise AddressRefused(f"leads to {each}, where machines have their credentials")
    for number, each in enumerate(found, 1):
        try:
            return socket.create_connection((each, port), timeout, source)
        except OSError:
            if number == len(found):
                raise
    raise socket.gaierror(socket.EAI_NONAME, "no address")


class _Connection(http.client.HTTPConnection):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._create_connection = _connected

    def connect(self) -> None:
        # A proxy resolves names itself.
        tunnel: str | None = getattr(self, "_tunnel_host", None)
        if tunnel is not None and forbidden(tunnel.strip("[]")):
            raise AddressRefused(f"leads to {tunnel}, where machines have their credentials")
        super().connect()


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request, context=ssl.create_default_context())


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None
