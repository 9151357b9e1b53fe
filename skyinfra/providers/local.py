"""Local: nodes as processes on this machine."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.providers.base import Provider, Request, Selection


class Local(Provider):
    """Nodes as processes on this machine, with the accelerators it has, or with simulated ones.

    Of several accelerators in order of preference the first is taken: compiling looks at no machine.
    simulate: give every node simulated accelerators that keep NVML's rules; nothing is computed faster on them.
    port: where the head's scheduler listens on the loopback interface; None takes a free one and keeps it.
    wait_seconds: how long a node may take until every slot is ready.
    """

    kind: ClassVar[str] = "local"

    simulate: bool = False
    port: int | None = Field(default=None, ge=1, le=65535)
    wait_seconds: int = Field(default=300, ge=1)

    def select(self, request: Request) -> Selection:
        """Selects this machine. Raises `NotSupported` for fields that only a cloud node supports."""
        self.refuse_lacking(request)
        accelerator = request.first
        return Selection(
            accelerator=accelerator,
            machine_types=("local",),
            scheduler=f"127.0.0.1:{self.port or 0}",
            secret_file="../secret",  # noqa: S106 - the name of a file, which the nodes of a fleet share
            inputs={"wait_seconds": self.wait_seconds, "simulate": self.simulate},
            project_paths={"root": ".skyinfra"},
            price_note="this machine",
            simulated=self.simulate and accelerator is not None,
            head_machine="local" if request.elastic else None,
        )
