"""Secrets by their names. A value travels from a client to the memory of the head, and from there to that of a task."""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyinfra.errors import InvalidField, SecretNotFound
from skyinfra.protocol import instance

# Shorter values stand in other words too, and cannot be masked.
SHORTEST = 4
# A variable of a process holds 128 KiB at most (MAX_ARG_STRLEN of Linux, execve(2)).
LONGEST = 64 * 1024

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
# Variables that the runner sets.
_OURS = "SKYINFRA_"

# Where secrets of this process are read from.
_files: set[Path] = set()

# Of the task that runs in this process: those that stand in no environment.
_held: dict[str, str] = {}
# A program cannot change what it is given.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_met: contextvars.ContextVar[dict[str, Secret] | None] = contextvars.ContextVar("skyinfra_secrets", default=None)


@dataclass(frozen=True)
class Secret:
    """The name of a secret; its value is nowhere in it, and not in what is declared, pickled or printed with it.

    In ``sky.Image(env={"HF_TOKEN": sky.Secret("HF_TOKEN")})`` every task has it as that variable; so it does where
    ``@sky.compute(secrets=["HF_TOKEN"])``, ``sky.connect(..., secrets=["HF_TOKEN"])`` or an argument of the task names
    it. The client that submits the task looks the value up then: in *file*, where one is given, else in the variable of
    that name of its own environment, else in the keyring under the service ``skyinfra``.

    environment: False keeps it out of the environment of the task, and of the programs that it starts, where every task
    of the node could read it; `value` and `descriptor` give it, and other processes of the account cannot look into
    that of the task.

    Raises `InvalidField` for what is no name of a variable.
    """

    name: str
    file: str | None = None
    environment: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name.startswith(_OURS):
            raise InvalidField(
                "a secret has the name of a variable, such as HF_TOKEN",
                field="Secret.name",
                # What is no name may be a value.
                given=self.name if isinstance(self.name, str) and len(self.name) <= len(_OURS) else None,
                hint="A secret is named, and its value is looked up: in the environment, a file or the keyring.",
            )
        if self.file is not None:
            _files.add(Path(self.file).expanduser().resolve())

    @property
    def value(self) -> str:
        """The value: in a task that was given it, and in a local run from the file or the environment.

        Raises `SecretNotFound`.
        """
        if self.file is not None and instance.VARIABLE not in os.environ:
            return read(self.file)
        if self.name in _held:
            return _held[self.name]
        if self.name not in os.environ:
            raise SecretNotFound(
                "this process has no such secret",
                given=self.name,
                hint=f'Name it where the task is made: @sky.compute(secrets=["{self.name}"]).',
            )
        return os.environ[self.name]

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Opens a file in memory with the value, for a program; yields its number, and closes it.

        ``with key.descriptor() as n: subprocess.run(["tool", "--token-file", f"/dev/fd/{n}"], pass_fds=[n])``. No other
        program has it. Raises `SecretNotFound`.
        """
        data = self.value.encode("utf-8", "surrogateescape")
        number = os.memfd_create("secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(number, data)
            os.lseek(number, 0, os.SEEK_SET)
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
            yield number
        finally:
            os.close(number)

    def __repr__(self) -> str:
        file = "" if self.file is None else f", file={self.file!r}"
        return f"Secret({self.name!r}{file}{'' if self.environment else ', environment=False'})"

    def __reduce__(self) -> tuple[object, ...]:
        met = _met.get()
        if met is not None:
            met[self.name] = self
        # Nodes of versions before know two of them.
        return Secret, (self.name, self.file, *(() if self.environment else (False,)))


def named(secrets: Sequence[str | Secret], field: str = "secrets") -> tuple[Secret, ...]:
    """*secrets* with a `Secret` for each name. Raises `InvalidField`."""
    if isinstance(secrets, str):
        raise InvalidField("expected a list of names", field=field, hint=f'{field}=["HF_TOKEN"]')
    return tuple(each if isinstance(each, Secret) else Secret(each) for each in secrets)


@contextlib.contextmanager
def holding(values: Mapping[str, str]) -> Iterator[None]:
    """Gives *values* of secrets, by their names, to this process in the body, and to no environment."""
    _held.update(values)
    try:
        yield
    finally:
        for name in values:
            del _held[name]


@contextlib.contextmanager
def met() -> Iterator[dict[str, Secret]]:
    """Collects the secrets, by name, that are pickled in the body, in this thread; so do those around it."""
    around = _met.get()
    found: dict[str, Secret] = {}
    token = _met.set(found)
    try:
        yield found
    finally:
        _met.reset(token)
        if around is not None:
            around.update(found)


def meet(secrets: dict[str, Secret]) -> None:
    """Adds to what `met` collects: for what was pickled before."""
    around = _met.get()
    if around is not None:
        around.update(secrets)


def read(file: str) -> str:
    """The text of *file* without a line end behind it. Raises `SecretNotFound`; its content is in no message."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise SecretNotFound(f"cannot be read: {error.strerror}", field="Secret.file", given=file) from None
    except ValueError:
        raise SecretNotFound("is no text in UTF-8", field="Secret.file", given=file) from None
    return text.removesuffix("\n").removesuffix("\r")


def is_read_from(path: Path) -> bool:
    """Returns whether a secret of this process is read from that file; *path* is absolute and has no links."""
    return path in _files


def check(name: str, value: str) -> None:
    """Raises `InvalidField` where *value* cannot be that of the secret *name*; it is in no message."""
    if len(value) < SHORTEST:
        raise InvalidField(
            f"has {len(value)} characters, and a secret at least {SHORTEST}: a shorter one cannot be masked",
            field=f"secret {name}",
            hint="What everybody may see is a variable: --env, or env= of sky.Image.",
        )
    if value.encode("utf-8", "ignore").decode() != value:
        raise InvalidField("is no text in UTF-8", field=f"secret {name}", hint="Encode it, as base64 for instance.")
    if "\0" in value or len(value.encode()) > LONGEST:
        raise InvalidField(
            f"a variable holds at most {LONGEST // 1024} KiB of text without NUL", field=f"secret {name}"
        )
