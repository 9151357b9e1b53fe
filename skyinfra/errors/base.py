"""The base of all errors. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from skyinfra.errors.printable import printable


class SkyinfraError(Exception):
    """Base of every error that skyinfra raises on purpose.

    message: what is wrong, in one sentence.
    field: path of the declared field or the file it is about, such as ``pools[0].accelerator.mig``.
    given: what was found there; shown with ``repr``. Never a secret.
    hint: what would work.

    As text it is `printable`: parts of it may come from a node, a task or a cloud.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, field: str | None = None, given: object = None, hint: str | None = None
    ) -> None:
        self.message = message
        self.field = field
        self.given = given
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}" if self.field else self.message
        if self.given is not None:
            text += f" (given: {self.given!r})"
        if self.hint:
            text += f"\n{self.hint}"
        return printable(text)

    def at(self, field: str) -> SkyinfraError:
        """Puts *field* in front of the error's path, for a caller that knows more of it. Returns the error."""
        separator = "" if not self.field or self.field.startswith("[") else "."
        self.field = f"{field}{separator}{self.field or ''}"
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.field, self.given, self.hint, dict(self.__dict__))


def _rebuild(
    cls: type[SkyinfraError], message: str, field: str | None, given: object, hint: str | None, state: dict[str, object]
) -> SkyinfraError:
    error = cls.__new__(cls, message)
    SkyinfraError.__init__(error, message, field=field, given=given, hint=hint)
    error.__dict__.update(state)
    return error


@contextmanager
def at(field: str, kind: type[SkyinfraError] = SkyinfraError) -> Iterator[None]:
    """Puts *field* in front of the path of an error of that *kind*, which code of the block raises."""
    try:
        yield
    except kind as error:
        error.at(field)
        raise


@contextmanager
def written(error: type[SkyinfraError], field: str, given: object = None) -> Iterator[None]:
    """Raises *error* for *field* in place of OSError, where what the block writes cannot be written."""
    try:
        yield
    except OSError as reason:
        raise error(f"cannot be written: {reason.strerror}", field=field, given=given) from None


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(given: str, known: Iterable[str], *, limit: int = 3) -> str:
    """Returns a hint with the *known* names nearest to *given*, or the empty string where none is near."""
    by_key = {name.lower(): name for name in known}
    near = [by_key[key] for key in get_close_matches(given.lower(), by_key, n=limit, cutoff=0.5)]
    if not near:
        return ""
    return f"Did you mean {' or '.join(near)}?"
