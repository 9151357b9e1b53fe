"""The last deploy or destroy of a stack from this checkout, where it has not ended well."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from skyinfra.errors import SkyinfraError
from skyinfra.terraform.project import SynthesizedStack


@dataclass(frozen=True)
class Failure:
    """A deploy or destroy (*verb*) that has not ended well.

    began: in ISO 8601, UTC. message: of its error; None where it still runs, or was killed.
    """

    verb: str
    began: str
    message: str | None = None


def last_failure(stack: SynthesizedStack) -> Failure | None:
    """Returns the failure of the last run; None where it ended well, or none was made from this checkout."""
    try:
        return Failure(**json.loads(_file(stack).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def recorded(stack: SynthesizedStack, verb: str) -> Iterator[None]:
    """Keeps the failure of the run in the block, also where it is killed; forgets it where the block ends well."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    _write(stack, Failure(verb, began))
    try:
        yield
    except SkyinfraError as error:
        _write(stack, Failure(verb, began, str(error)))
        raise
    _file(stack).unlink(missing_ok=True)


def _file(stack: SynthesizedStack) -> Path:
    return stack.folder / "last-run.json"


def _write(stack: SynthesizedStack, failure: Failure) -> None:
    # A cloud's words may name what is nobody else's business.
    new = _file(stack).with_suffix(".new")
    with open(new, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        json.dump(asdict(failure), file)
    new.replace(_file(stack))
