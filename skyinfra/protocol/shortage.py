"""The figures of a task whose device had no more memory, on their way from the slot to the client."""

from __future__ import annotations

from dataclasses import dataclass

from skyinfra.errors import NodeError
from skyinfra.protocol import _schema

# Among the lines of a script: the stream of one that is the JSON of a `Shortage`.
STREAM = "shortage"


@dataclass(frozen=True)
class Shortage(_schema.Document, error=NodeError, source="shortage"):
    """The memory of a device that was not enough for a task.

    slot: ``NODE/INDEX``. accelerator, profile: of the slot, as in `InstanceInfo`. has: bytes of the slot, by its name
    or as the library that failed says. taken: the most bytes of it that the task, or its process, is known to have had,
    and measured: by what; None where nothing says it. asked: bytes of the request that failed, or None. held: bytes in
    use when the task began, where they were many, and tasks before it had the same process; else None.
    """

    slot: str
    accelerator: str | None = None
    profile: str | None = None
    has: int | None = None
    taken: int | None = None
    measured: str = ""
    asked: int | None = None
    held: int | None = None

    @property
    def needs(self) -> int | None:
        """The bytes without which the task would have failed here; None where the request is not known."""
        return None if self.asked is None else (self.taken or 0) + self.asked

    def __str__(self) -> str:
        device = " of ".join(part for part in (self.profile, self.accelerator) if part)
        text = f"Slot {self.slot}{f' ({device})' if device else ''}"
        text += f" has {_gb(self.has)}" if self.has else " has no room for it"
        if self.taken is not None:
            text += f"; the task had taken {_gb(self.taken)} ({self.measured})"
        if self.asked is not None:
            text += f"{' and' if self.taken is not None else '; the task'} asked for {_gb(self.asked)} more"
            text += f": {_gb(self.needs or 0)} in all" if self.taken is not None else ""
        if self.held is not None:
            text += f"; {_gb(self.held)} of the device were in use before it began, after other tasks of its process"
        return f"{text}."


def _gb(number: int) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
