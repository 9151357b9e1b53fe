"""An integer programme, column by column and row by row, solved by HiGHS through scipy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from skyinfra.errors import MissingDependency

# Nodes of the search tree after which a solve that only beautifies ends with the best it has: the same in every run,
# which a time limit would not be.
NODES = 2000


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a solve.

    values: of the columns; None where none were found. objective, bound: of the values, and below which no values are.
    proven: whether nothing better exists, or, without values, that there are none.
    """

    values: tuple[float, ...] | None
    objective: float
    bound: float
    proven: bool

    def whole(self) -> tuple[int, ...]:
        """Returns the values as the whole numbers they stand for."""
        return tuple(round(value) for value in self.values or ())


@dataclass
class Programme:
    """Columns are at least 0 and at most `upper`; rows lie between their bounds."""

    upper: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[Mapping[int, float], float, float]] = field(default_factory=list)

    def column(self, *, integer: bool = True, upper: float = math.inf) -> int:
        """Adds a column; returns its number."""
        self.upper.append(upper)
        self.lower.append(0)
        self.integer.append(integer)
        return len(self.upper) - 1

    def row(self, coefficients: Mapping[int, float], *, at_least: float = -math.inf, at_most: float = math.inf) -> None:
        """Adds a row: the sum of the columns times their coefficients lies between the bounds."""
        self.rows.append((dict(coefficients), at_least, at_most))

    def minimise(
        self,
        costs: Mapping[int, float],
        *,
        relaxed: bool = False,
        seconds: float | None = None,
        nodes: int | None = None,
        more: Sequence[tuple[Mapping[int, float], float, float]] = (),
        upper: Mapping[int, float] | None = None,
    ) -> Answer:
        """Returns the values with the least costs.

        relaxed: columns need not be integers. seconds, nodes: limits, after which the best so far is returned.
        more: rows for this solve alone. upper: tighter bounds of columns, for this solve alone.
        Raises MissingDependency where scipy is not installed.
        """
        optimize, sparse, numpy = solver()
        rows = [*self.rows, *more]
        entries = [(index, column, value) for index, row in enumerate(rows) for column, value in row[0].items()]
        places = ([index for index, _, _ in entries], [column for _, column, _ in entries])
        matrix = sparse.csr_array(
            (numpy.array([value for _, _, value in entries], dtype=float), places), shape=(len(rows), len(self.upper))
        )
        highest = [min(bound, (upper or {}).get(index, math.inf)) for index, bound in enumerate(self.upper)]
        options: dict[str, float] = {"mip_rel_gap": 0}
        options |= {} if seconds is None else {"time_limit": seconds}
        options |= {} if nodes is None else {"node_limit": nodes}
        found = optimize.milp(
            numpy.array([costs.get(index, 0) for index in range(len(self.upper))], dtype=float),
            integrality=numpy.zeros(len(self.upper)) if relaxed else numpy.array(self.integer, dtype=int),
            bounds=optimize.Bounds(self.lower, highest),
            constraints=optimize.LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
            options=options,
        )
        return _answer(found)


def solver() -> tuple[ModuleType, ModuleType, ModuleType]:
    """scipy.optimize, scipy.sparse and numpy. Raises MissingDependency with the command that installs them."""
    try:
        import numpy
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("numpy", "scipy"):
            raise
        raise MissingDependency(
            "packing needs scipy, which is not installed", hint='Install it with: pip install "skyinfra[pack]"'
        ) from None
    return optimize, sparse, numpy


# Status codes of scipy: an optimal answer, and an empty set.
_OPTIMAL, _INFEASIBLE = 0, 2


def _answer(found: object) -> Answer:
    values = getattr(found, "x", None)
    objective = getattr(found, "fun", None)
    bound = getattr(found, "mip_dual_bound", None)
    status = getattr(found, "status", None)
    return Answer(
        values=None if values is None else tuple(map(float, values)),
        objective=math.inf if objective is None else float(objective),
        bound=-math.inf if bound is None else float(bound),
        proven=status in (_OPTIMAL, _INFEASIBLE),
    )
