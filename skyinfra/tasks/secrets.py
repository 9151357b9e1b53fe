"""The secrets of a client: looks values up when a task is submitted, and gives them to the head."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from skyinfra.errors import SecretNotFound
from skyinfra.protocol import secrets, services
from skyinfra.protocol.calls import SecretUse
from skyinfra.protocol.rpc import Peer
from skyinfra.protocol.secrets import Secret

# The service under which keyrings have our secrets: `keyring set skyinfra HF_TOKEN`.
SERVICE = "skyinfra"


class Secrets:
    """The secrets for the tasks of *owner*: the topic of a client, or the id of a job.

    *given*: of every task; where one has a file, it is that wherever the secret is named. *declared*: the names of
    those that the image of the fleet declares, by their variables. Values are in memory, here and at the head.
    """

    def __init__(
        self, owner: str, given: Sequence[str | Secret] = (), declared: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self._owner = owner
        self._given = secrets.named(given)
        self._declared = declared
        # By name and value: a value that has changed is another secret, and running tasks keep theirs.
        self._refs: dict[tuple[str, str], str] = {}
        self._at_head: set[str] = set()

    def of(self, owner: str) -> Secrets:
        """Returns the same secrets for another owner."""
        return Secrets(owner, self._given, self._declared)

    def uses(self, wanted: Sequence[str | Secret]) -> tuple[SecretUse, ...]:
        """The secrets of a task that names *wanted*, with their values as they are now. Raises `SecretNotFound`."""
        given = (*secrets.named(wanted), *self._given)
        named = {secret.name: secret for secret in given}
        held = {secret.name for secret in given if not secret.environment}
        by_variable = {variable: Secret(name) for variable, name in self._declared().items()} | named
        return tuple(
            SecretUse(variable, secret.name, self._ref(named.get(secret.name, secret)), variable in held)
            for variable, secret in sorted(by_variable.items())
        )

    def _ref(self, secret: Secret) -> str:
        found = secret.name, look_up(secret)
        return self._refs.setdefault(found, f"{self._owner}.{len(self._refs)}")

    def at_head(self, uses: Iterable[SecretUse]) -> bool:
        """Returns whether the head was given all of *uses*."""
        return all(use.ref in self._at_head for use in uses)

    async def give(self, head: Peer, uses: Iterable[SecretUse], *, again: bool = False) -> None:
        """Gives *head* the values that it has not been given, or all of *uses* again."""
        wanted = {use.ref for use in uses if again or use.ref not in self._at_head}
        if wanted:
            values = {ref: value for (_, value), ref in self._refs.items() if ref in wanted}
            await services.secrets_give(head, owner=self._owner, values=values)
            self._at_head |= wanted

    def values(self, uses: Iterable[SecretUse]) -> dict[str, str]:
        """Returns the values of *uses*, by the names of the secrets."""
        refs = {use.ref for use in uses}
        return {name: value for (name, value), ref in self._refs.items() if ref in refs}

    def __repr__(self) -> str:
        return f"<secrets of {self._owner}>"


def look_up(secret: Secret) -> str:
    """Returns the value of *secret* here. Raises `SecretNotFound`, and `InvalidField` for what no secret can be."""
    value = secrets.read(secret.file) if secret.file is not None else os.environ.get(secret.name)
    if value is None:
        value = _in_keyring(secret.name)
    secrets.check(secret.name, value)
    return value


def _in_keyring(name: str) -> str:
    where = f"Set the variable {name}, or name a file: --secret {name}=@FILE, sky.Secret({name!r}, file=...)."
    try:
        keyring = importlib.import_module("keyring")
    except ModuleNotFoundError:
        raise SecretNotFound(
            "this environment has no such variable, and no keyring is asked: the library keyring is not installed",
            given=name,
            hint=f"{where} Or pip install 'skyinfra[keyring]' and `keyring set {SERVICE} {name}`.",
        ) from None
    try:
        value = keyring.get_password(SERVICE, name)
    except Exception as error:  # noqa: BLE001 - backends raise errors of the system's services besides their own
        raise SecretNotFound(
            f"this environment has no such variable, and the keyring does not answer: {type(error).__name__}",
            given=name,
            hint=where,
        ) from None
    if not isinstance(value, str):
        hint = f"{where} Or `keyring set {SERVICE} {name}`."
        raise SecretNotFound("neither this environment nor the keyring has it", given=name, hint=hint)
    return value
