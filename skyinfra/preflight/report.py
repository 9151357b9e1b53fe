"""The report of a preflight: a line for each check of each pool."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Result = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Line:
    """The result of a check of a pool.

    check: what was looked at, such as ``quota``. result: ``fail`` is what a deploy would fail on, ``warn`` what it may
    fail on or could not be looked at. found: what is there. to_do: what would mend it; empty for a pass. usd_per_hour:
    the price of one machine that was found; None for none.
    """

    pool: str
    check: str
    result: Result
    found: str
    to_do: str = ""
    usd_per_hour: float | None = field(default=None, metadata={"later": True})


@dataclass(frozen=True, slots=True)
class Report:
    """The lines of a stack, pool by pool in the order they are declared."""

    stack: str
    lines: tuple[Line, ...]

    def count(self, result: Result) -> int:
        """Returns the number of lines with that result."""
        return sum(line.result == result for line in self.lines)

    @property
    def failed(self) -> bool:
        """Whether a deploy would fail."""
        return self.count("fail") > 0

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        counts = {result: self.count(result) for result in ("pass", "warn", "fail")}
        return {"stack": self.stack, **counts, "lines": [asdict(line) for line in self.lines]}


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check, before it is known which check of which pool it is; see `Line`."""

    result: Result
    found: str
    to_do: str = ""
    usd_per_hour: float | None = None

    def at(self, usd_per_hour: float | None) -> Finding:
        """Returns the same with the price that was found."""
        return replace(self, usd_per_hour=usd_per_hour)

    def line(self, pool: str, check: str) -> Line:
        """Returns it as the line of a check of a pool."""
        return Line(pool, check, self.result, self.found, self.to_do, self.usd_per_hour)


def passed(found: str) -> Finding:
    """Nothing to do."""
    return Finding("pass", found)


def warned(found: str, to_do: str) -> Finding:
    """Returns a finding that a deploy may fail on, with a remedy."""
    return Finding("warn", found, to_do)


def failed(found: str, to_do: str) -> Finding:
    """Returns a finding that a deploy will fail on, with a remedy."""
    return Finding("fail", found, to_do)
