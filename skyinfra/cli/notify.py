"""``--notify`` and ``--secret`` of several commands: whom to notify, and where a secret is."""

from __future__ import annotations

from collections.abc import Sequence

from skyinfra.cli.options import errors_name_options
from skyinfra.errors import InvalidField
from skyinfra.protocol.secrets import Secret


def named_secret(text: str, option: str = "--secret") -> Secret:
    """Returns the secret of ``--secret``: ``NAME``, or ``NAME=@FILE``. Raises `InvalidField`."""
    name, given, file = text.partition("=")
    if given and not file.startswith("@"):
        raise InvalidField(
            "a value in a command line is seen in the process list and in the history of the shell",
            field=option,
            given=name,
            hint=f"Set the variable {name} and say {option} {name}, or {option} {name}=@FILE.",
        )
    return Secret(name, file[1:] if given else None)


def named_target(text: str) -> str | Secret:
    """Returns the target of ``--notify``: an address, ``command:CMD``, or ``NAME``, or ``NAME=@FILE``, that has one."""
    from skyinfra.client.jobs import is_target

    return text if is_target(text) else named_secret(text, "--notify")


def targets(notify: Sequence[str] | None, *, by_head: bool = False) -> list[str]:
    """Returns the addresses and commands of ``--notify``; none that the head cannot notify where it does so.

    Raises `InvalidField`, `SecretNotFound` and `NotSupported`.
    """
    if not notify:
        return []
    from skyinfra.client import jobs

    with errors_name_options():
        named = [named_target(text) for text in notify]
        return jobs.addresses(named) if by_head else jobs.targets(named)
