"""Vast.ai: the declaration. This version does not compile it yet."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from skyinfra.errors import NotSupported
from skyinfra.providers.base import Provider, Request


class VastAI(Provider):
    """The Vast.ai marketplace. Can be declared; this version of skyinfra does not compile it yet."""

    kind: ClassVar[str] = "vastai"

    def select(self, request: Request) -> NoReturn:
        """Raises `NotSupported`: there are no offers and no module for Vast.ai in this version."""
        raise NotSupported(
            "this version of skyinfra does not compile Vast.ai yet",
            field="provider",
            hint="sky.Local(simulate=True) runs the same declaration on simulated accelerators of this machine.",
        )
