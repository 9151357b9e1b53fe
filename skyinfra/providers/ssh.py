"""SSH: machines that stand already."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from skyinfra.declared import Declaration
from skyinfra.errors import InvalidField, counted
from skyinfra.providers.base import Provider, Request, Selection
from skyinfra.providers.cloud import SCHEDULER_PORT

# Names of the SSH configuration, DNS names and addresses: nothing that a shell or ssh would take for something else.
_ADDRESS = r"^[A-Za-z0-9][A-Za-z0-9._:-]*$"
_USER = r"^[A-Za-z_][A-Za-z0-9._-]*$"
# One line of a public key, without its host.
_KEY = r"^(ssh-(ed25519|rsa)|ecdsa-sha2-nistp(256|384|521)) [A-Za-z0-9+/]+=*( [^\n]*)?$"


class Host(Declaration):
    """A machine that stands already, as `ssh` reaches it.

    address: its name or address, or a host of your SSH configuration. user: who logs in, root or one with sudo without
    a password; None is whom `ssh` takes, as for port. host_key: its public key, such as ``ssh-ed25519 AAAA...``; None
    takes what your known_hosts say. key_file: the private key to log in with; None is what `ssh` and its agent find.
    via: the machine to go through, as another host or as its address. inside: the address at which clients and the
    other nodes reach it, where that is another one.
    """

    address: str = Field(pattern=_ADDRESS)
    user: str | None = Field(default=None, pattern=_USER)
    port: int | None = Field(default=None, ge=1, le=65535)
    host_key: str | None = Field(default=None, pattern=_KEY)
    key_file: str | None = None
    via: Annotated[Host | None, BeforeValidator(lambda given: parsed(given))] = None
    inside: str | None = Field(default=None, pattern=_ADDRESS)

    def __init__(self, address: str, **values: object) -> None:
        super().__init__(address=address, **values)  # type: ignore[call-arg]

    @property
    def reached(self) -> str:
        """The address at which clients and the other nodes reach it."""
        return self.inside or self.address

    @property
    def label(self) -> str:
        """The last part of its node's name."""
        return _label(self.address)

    def as_input(self) -> dict[str, object]:
        """Returns the module's input for it; what is None is left out."""
        found = {name: value for name, value in self if value is not None and name != "via"}
        return found if self.via is None else {**found, "via": self.via.as_input()}


def _label(address: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", address.lower()).strip("-")


def parsed(given: object) -> object:
    """*given*, where it is ``[USER@]ADDRESS``, as a `Host`."""
    if not isinstance(given, str):
        return given
    user, at, address = given.rpartition("@")
    return Host(address, user=user) if at else Host(address)


def _all_parsed(given: object) -> object:
    if isinstance(given, str):
        raise ValueError(f"expected a list of hosts: [{given!r}]")
    return tuple(map(parsed, given)) if isinstance(given, list | tuple) else given


class SSH(Provider):
    """Machines that stand already, by `ssh`: a lab, a rack, a rented box. Destroying the fleet gives them back.

    hosts: ``"gpu1"``, ``"ubuntu@10.0.0.7"`` or `Host`; the first one is the head, which the others and the clients must
    reach. port: of the head's scheduler. wait_seconds: how long a host may take until every slot is ready.
    """

    kind: ClassVar[str] = "ssh"

    hosts: Annotated[tuple[Host, ...] | list[Host | str], BeforeValidator(_all_parsed)]
    port: int = Field(default=SCHEDULER_PORT, ge=1, le=65535)
    wait_seconds: int = Field(default=1800, ge=1)

    @model_validator(mode="after")
    def _check(self) -> SSH:
        if not self.hosts:
            raise InvalidField("at least one host is needed", field="SSH.hosts", hint='Such as hosts=["gpu1"].')
        seen: dict[str, int] = {}
        for index, host in enumerate(self._hosts):
            for name in {host.label, _label(host.reached)}:
                if seen.setdefault(name, index) != index:
                    raise InvalidField(
                        f"the same host as hosts[{seen[name]}]", field=f"SSH.hosts[{index}]", given=host.address
                    )
        return self

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
        return Selection(
            accelerator=request.first,
            machine_types=("ssh",),
            scheduler=f"0.0.0.0:{self.port}",
            secret_file="/etc/skyinfra/secret",  # noqa: S106 - the name of a file
            inputs={
                "hosts": [host.as_input() for host in self._hosts],
                "scheduler_port": self.port,
                "wait_seconds": self.wait_seconds,
            },
            price_note="machines of yours",
        )
