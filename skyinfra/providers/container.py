"""Container: nodes as containers of Docker or Podman."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from skyinfra.accelerators import Accelerator
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers.base import Provider, Request, Selection
from skyinfra.providers.cloud import SCHEDULER_PORT
from skyinfra.providers.data import strings

_MACHINE = "container"
_PARTITION = "MIG-"

Gpus = Annotated[
    Literal["all"] | tuple[str, ...] | list[str],
    BeforeValidator(lambda given: given if given == "all" else strings(given)),
]


class Container(Provider):
    """Nodes as containers on this machine or on another one, by the program of the engine.

    engine: None takes the first of Docker and Podman that answers, and keeps it. image: with python3; None is Debian
    with Python. gpus: all GPUs of the host, or the ids of those that the nodes get: the first ones are the first
    node's. Ids of MIG devices, which the host has made, go with an accelerator of `accelerators.Custom`, one for a
    node. network: one of the engine's, in which containers find each other by name, or "host"; None makes one for the
    pool. host: the address of another machine's engine, such as ``ssh://me@gpu1``. port: at which clients reach the
    head; None takes a free one and keeps it. wait_seconds: how long a node may take until every slot is ready.
    """

    kind: ClassVar[str] = "container"

    engine: Literal["docker", "podman"] | None = None
    image: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")
    gpus: Gpus = "all"
    network: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    host: Annotated[str, Field(pattern=r"^(ssh://[A-Za-z0-9._@:\[\]/-]+|unix:///[^\s]+)$")] | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    wait_seconds: int = Field(default=600, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Container:
        if self.network in ("none", "bridge", "default"):
            raise InvalidField(
                "containers do not find each other there",
                field="Container.network",
                given=self.network,
                hint='Leave it out for a network of the pool, name one that you made, or give "host".',
            )
        for index, each in enumerate(() if self.gpus == "all" else self.gpus):
            if not each.replace("-", "").replace(":", "").isalnum():
                raise InvalidField(
                    "expected the id of a GPU or MIG device, or its number on the host",
                    field=f"Container.gpus[{index}]",
                    given=each,
                    hint="`nvidia-smi -L` lists them.",
                )
        return self

    def select(self, request: Request) -> Selection:
        """Selects containers. Raises `NotSupported` for what only machines have, `InvalidField` for GPUs that do not
        add up."""
        self.refuse_lacking(request)
        accelerator = self._accelerator(request)
        # The host's own network has one port for all fleets, which the nodes are told.
        port = (self.port or SCHEDULER_PORT) if self.network == "host" else SCHEDULER_PORT
        near = self.network == "host" and not (self.host or "").startswith("ssh:")
        own = {"engine": self.engine, "network": self.network, "host": self.host, "port": self.port}
        return Selection(
            accelerator=accelerator,
            machine_types=(_MACHINE,),
            scheduler=f"{'127.0.0.1' if near else '0.0.0.0'}:{port}",  # noqa: S104 - of a container
            secret_file="/etc/skyinfra/secret",  # noqa: S106 - the name of a file
            image=self.image or self.data.image((_MACHINE,), None, field="provider.image"),
            inputs={
                "scheduler_port": port,
                "wait_seconds": self.wait_seconds,
                "gpus": self._given(accelerator, request.nodes),
                **{name: value for name, value in own.items() if value is not None},
            },
            project_paths={"root": ".skyinfra"},
            price_note="another machine of yours" if (self.host or "").startswith("ssh:") else "this machine",
            head_machine=_MACHINE if request.elastic else None,
        )

    def _given(self, accelerator: Accelerator | None, nodes: int) -> list[str]:
        """Returns the GPUs of so many *nodes*, each with *accelerator*: of those for more nodes the first ones."""
        if accelerator is None:
            return []
        return [self.gpus] if isinstance(self.gpus, str) else list(self.gpus)[: (accelerator.count or 1) * nodes]

    def _accelerator(self, request: Request) -> Accelerator | None:
        """Returns the declared accelerator, as many as a node gets. Raises `NotSupported`, `InvalidField`."""
        given = () if self.gpus == "all" else tuple(self.gpus)
        if not request.accelerators:
            if given:
                raise InvalidField("go with an accelerator", field="provider.gpus", hint='Such as accelerator="H100".')
            return None
        first = request.accelerators[0]
        if first.mig or first.partition:
            raise NotSupported(
                "a container may not partition the GPUs of its host",
                field="accelerator",
                given=str(first),
                hint='Give MIG devices that the host has made: sky.Container(gpus=["MIG-..."]) with '
                f'accelerator=sky.accelerators.Custom("{first.name}-MIG", memory=...). Or declare sky.Local() on the '
                "host, whose runner makes them.",
            )
        if self.gpus == "all":
            return self._whole(first, request)
        return _named(first, given, request)

    def _whole(self, first: Accelerator, request: Request) -> Accelerator | None:
        if first.vendor != "nvidia":
            raise NotSupported(
                "a container gets NVIDIA GPUs alone",
                field="accelerator",
                given=str(first),
                hint="Declare sky.Local() on the host. MIG devices are named: sky.Container(gpus=[...]).",
            )
        if (most := request.most or request.nodes) > 1:
            raise InvalidField(
                f"{most} nodes would share the GPUs of one host",
                field="provider.gpus",
                given="all",
                hint="Name those of each node, in order, such as gpus=[...] as `nvidia-smi -L` lists them.",
            )
        return request.first


def _named(first: Accelerator, given: tuple[str, ...], request: Request) -> Accelerator:
    """*first*, as many as there are in *given* for each node."""
    parted = [each for each in given if each.startswith(_PARTITION)]
    if bool(parted) != first.custom or len(parted) not in (0, len(given)):
        raise InvalidField(
            "MIG devices go with an accelerator of their own, GPUs with that of the catalog",
            field="accelerator",
            given=str(first),
            hint='For MIG devices: accelerator=sky.accelerators.Custom("H100-3g.40gb", memory="40GB").',
        )
    nodes = request.most or request.nodes
    count = first.count or max(1, len(given) // nodes)
    if len(set(given)) != count * nodes or len(given) != count * nodes or (parted and count != 1):
        each = "one MIG device" if parted else f"{count} GPUs"
        raise InvalidField(
            f"{nodes} nodes with {each} each need {(1 if parted else count) * nodes}, none twice",
            field="provider.gpus",
            given=", ".join(given),
            hint="Name as many, or declare another number of nodes or accelerators.",
        )
    return first.with_(count=count)
