"""The secrets of tasks, in the head's memory alone: it writes none of them, and forgets them with their owner.

The owner is a client, by its topic, or a job, by its id. A head that starts anew has no secret: clients that wait for a
task give theirs again by themselves, and jobs wait for somebody who does.
"""

from __future__ import annotations

from collections.abc import Iterable

from skyinfra.errors import NotSupported
from skyinfra.protocol import calls, rpc, services

# Owners with secrets at one time, and secrets of one of them.
_MOST_OWNERS = 20_000
_MOST = 1_000


class HeadSecrets:
    """Values by the owner and the reference of `calls.SecretUse`. ``handlers``: answer the calls about them."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, str]] = {}
        self.handlers = rpc.handlers(services.secrets_give.by(self._give), services.secrets_take.by(self.take))

    def _give(self, owner: str, values: dict[str, str]) -> None:
        if not owner.startswith(calls.TOPIC):
            raise NotSupported("secrets of a job are given to the job", field="owner", given=owner)
        self.keep(owner, values)

    def keep(self, owner: str, values: dict[str, str]) -> None:
        """Keeps *values*, by their references, until `forget`. Raises `NotSupported` for too many of them."""
        kept = self._values.get(owner, {})
        if len(kept.keys() | values.keys()) > _MOST or (not kept and len(self._values) >= _MOST_OWNERS):
            raise NotSupported("the head keeps no more secrets", field="secrets", hint="Close clients, or cancel jobs.")
        self._values.setdefault(owner, {}).update(values)

    def take(self, refs: Iterable[str]) -> list[str | None]:
        """Returns the values of *refs*; None for one that is not here."""
        return [self._values.get(ref.rpartition(".")[0], {}).get(ref) for ref in refs]

    def lacks(self, uses: Iterable[calls.SecretUse]) -> tuple[str, ...]:
        """Returns the names of those of *uses* that are not here."""
        return tuple(sorted({use.name for use in uses if self.take([use.ref]) == [None]}))

    def forget(self, owner: str) -> None:
        """Drops the secrets of *owner*."""
        self._values.pop(owner, None)
