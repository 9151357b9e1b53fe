"""SSH: machines that stand already."""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from skyinfra.declared import OUTPUT, Declaration, is_output
from skyinfra.errors import InvalidField, counted
from skyinfra.providers.base import Provider, Request, Selection
from skyinfra.providers.cloud import SCHEDULER_PORT
from skyinfra.providers.data import Output

# Names of the SSH configuration, DNS names and addresses: nothing that a shell or ssh would take for something else.
_ADDRESS = r"^[A-Za-z0-9][A-Za-z0-9._:-]*$"
# A user of a directory has its domain: me@example.com.
_USER = r"^[A-Za-z_][A-Za-z0-9._@-]*$"
# One line of a public key, without its host.
_KIND = r"(ssh-(ed25519|rsa)|ecdsa-sha2-nistp(256|384|521))"
_KEY = rf"^{_KIND} [A-Za-z0-9+/]+=*( [^\n]*)?$"


def _address(given: object) -> object:
    """Returns *given*. Raises `InvalidField` for an address with its port, or as a URL has it."""
    if not isinstance(given, str) or ":" not in given or _is_ipv6(given.rpartition("@")[2]):
        return given
    place, port = re.fullmatch(r"(?:ssh://)?(.*?)(?::([0-9]+))?/?", given).groups()  # type: ignore[union-attr]
    user, _, name = place.rpartition("@")
    values = {"user": user or None, "port": int(port) if port else None}
    words = [f'"{name.strip("[]")}"', *(f"{each}={json.dumps(value)}" for each, value in values.items() if value)]
    raise InvalidField(
        "a port is a field of its own", field="Host.address", given=given, hint=f"Declare sky.Host({', '.join(words)})."
    )


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _key(given: object) -> object:
    """Returns the key in a line of `ssh-keyscan` or of a file of known hosts, which have the host in front."""
    if not isinstance(given, str):
        return given
    lines = [line.strip() for line in given.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) > 1:
        raise InvalidField(
            f"{len(lines)} lines", field="Host.host_key", hint="One key, such as the line that has ssh-ed25519."
        )
    return re.sub(rf"^\S+ (?={_KIND} )", "", lines[0]) if lines else given


class Host(Declaration):
    """A machine that stands already, as `ssh` reaches it.

    address: its name or address, or a host of your SSH configuration. user: who logs in, root or one with sudo without
    a password; None is whom `ssh` takes, as for port. host_key: its public key, such as ``ssh-ed25519 AAAA...``, or its
    line of `ssh-keyscan`; None takes what your known_hosts say. key_file: the private key to log in with; None is what
    `ssh` and its agent find. via: the machine to go through, as another host or as its address; that one may have one
    too. inside: the address at which clients and the other nodes reach it, where that is another one. name: the last
    part of its node's name; None makes it of the address, and of its number where that is an output of another
    construct.
    """

    address: Annotated[str, Field(pattern=_ADDRESS), BeforeValidator(_address), OUTPUT]
    user: str | None = Field(default=None, pattern=_USER)
    port: int | None = Field(default=None, ge=1, le=65535)
    host_key: Annotated[str | None, Field(pattern=_KEY), BeforeValidator(_key), OUTPUT] = None
    key_file: Output = None
    via: Annotated[Host | None, BeforeValidator(lambda given: parsed(given))] = None
    inside: Annotated[str | None, Field(pattern=_ADDRESS), OUTPUT] = None
    name: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")

    def __init__(self, address: str, **values: object) -> None:
        super().__init__(address=address, **values)  # type: ignore[call-arg]

    @property
    def reached(self) -> str:
        """The address at which clients and the other nodes reach it."""
        return self.inside or self.address

    @property
    def through(self) -> list[Host]:
        """The machines to go through, the one next to it first."""
        return [] if self.via is None else [self.via, *self.via.through]

    def label(self, *, alone: bool) -> str:
        """Returns the last part of its node's name. *alone*: whether no other host has its address."""
        if self.name is not None:
            return self.name
        more = () if alone else (self.port, *(each.address for each in self.through[:1]))
        return "-".join(_label(str(part)) for part in (self.address, *more) if part is not None)

    def as_input(self) -> dict[str, object]:
        """Returns the module's input for it; what is None is left out."""
        own, *through = [
            {name: value for name, value in each if value is not None and name != "via"}
            for each in (self, *self.through)
        ]
        found = {**own, "via": through[0]} if through else own
        return {**found, "hops": through[1:]} if through[1:] else found


def _label(address: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", address.lower()).strip("-")


def parsed(given: object) -> object:
    """*given*, where it is ``[USER@]ADDRESS``, as a `Host`."""
    if not isinstance(given, str):
        return given
    if is_output(given):
        return Host(given)
    user, at, address = str(_address(given)).rpartition("@")
    return Host(address, user=user) if at else Host(address)


def _all_parsed(given: object) -> object:
    if isinstance(given, str):
        raise ValueError(f"expected a list of hosts: [{given!r}]")
    if not isinstance(given, list | tuple):
        return given
    hosts = map(parsed, given)
    return tuple(_named(index, host) if isinstance(host, Host) else host for index, host in enumerate(hosts))


def _named(index: int, host: Host) -> Host:
    """*host* with its number as its name, where its address is known to Terraform alone."""
    unknown = host.name is None and is_output(host.address)
    return Host(**{**dict(host), "name": str(index)}) if unknown else host


class SSH(Provider):
    """Machines that stand already, by `ssh`: a lab, a rack, a rented box. Destroying the fleet gives them back.

    hosts: ``"gpu1"``, ``"ubuntu@10.0.0.7"`` or `Host`; the first one is the head, which the others and the clients must
    reach. port: of the head's scheduler. wait_seconds: how long a host may take until every slot is ready.
    """

    kind: ClassVar[str] = "ssh"
    outputs: ClassVar[frozenset[str]] = frozenset({"hosts"})

    hosts: Annotated[tuple[Host, ...] | list[Host | str], BeforeValidator(_all_parsed)]
    port: int = Field(default=SCHEDULER_PORT, ge=1, le=65535)
    wait_seconds: int = Field(default=1800, ge=1)

    @model_validator(mode="after")
    def _check(self) -> SSH:
        if not self.hosts:
            raise InvalidField("at least one host is needed", field="SSH.hosts", hint='Such as hosts=["gpu1"].')
        for index, host in enumerate(self._hosts):
            way = [each.address for each in (host, *host.through)]
            if len({*way}) < len(way):
                raise InvalidField("has one machine twice on the way", field=f"SSH.hosts[{index}].via", given=way)
        for names in (self._labels(), self._addresses()):
            for index, name in enumerate(names):
                if (first := names.index(name)) != index:
                    raise InvalidField(
                        f"the same host as hosts[{first}]",
                        field=f"SSH.hosts[{index}]",
                        given=self._hosts[index].address,
                        hint="Machines behind one address differ in `port` or `via`, and each has its own `inside`.",
                    )
        return self

    def _addresses(self) -> list[str]:
        """Returns where each is reached; an output of another construct is taken to be another address."""
        return [host.reached if is_output(host.reached) else _label(host.reached) for host in self._hosts]

    def _labels(self) -> list[str]:
        """Returns the last parts of the nodes' names; modules/ssh makes the same."""
        count = Counter(_label(host.address) for host in self._hosts)
        return [host.label(alone=count[_label(host.address)] == 1) for host in self._hosts]

    @property
    def _hosts(self) -> tuple[Host, ...]:
        return tuple(host for host in self.hosts if isinstance(host, Host))

    def select(self, request: Request) -> Selection:
        """Selects the hosts. Raises `NotSupported` for what only clouds choose, `InvalidField` for their number."""
        self.refuse_lacking(request)
        if request.nodes != len(self.hosts):
            raise InvalidField(
                f"the declaration has {counted(len(self.hosts), 'host')}, and each is one node",
                field="nodes",
                given=request.nodes,
                hint=f"Declare nodes={len(self.hosts)}, or other hosts.",
            )
        # Sockets of all addresses of IPv6 take no connection of IPv4, and the other way round.
        wildcard = "[::]" if _is_ipv6(self._hosts[0].reached) else "0.0.0.0"  # noqa: S104 - nodes and clients reach it
        return Selection(
            accelerator=request.first,
            machine_types=("ssh",),
            scheduler=f"{wildcard}:{self.port}",
            secret_file="/etc/skyinfra/secret",  # noqa: S106 - the name of a file
            inputs={
                "hosts": [host.as_input() for host in self._hosts],
                "scheduler_port": self.port,
                "wait_seconds": self.wait_seconds,
            },
            price_note="machines of yours",
        )
