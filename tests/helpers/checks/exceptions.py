"""Exceptions, each of which is made or pickled in a way that loses something."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any


class Composes(Exception):
    def __init__(self, message: str, code: int = 500) -> None:
        super().__init__(f"HTTP {code}: {message}")
        self.code = code


class Prefixed(ValueError):
    def __init__(self, message: str = "") -> None:
        super().__init__("invalid: " + message)


class NoArguments(Exception):
    def __init__(self) -> None:
        super().__init__("fixed text")


class KeywordsOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OfPath(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "gone", path)
        self.path = path


class Slotted(Exception):
    __slots__ = ("__hidden", "extra")

    def __init__(self, extra: int) -> None:
        super().__init__("slotted", extra)
        self.extra = extra
        self.__hidden = 7


class NewTakesMore(Exception):
    def __new__(cls, first: int, second: int) -> NewTakesMore:
        return super().__new__(cls, first)

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.second = second


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    number: int


class Dumps(Exception):
    """Says how it is pickled, and leaves out what it cannot."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Dumps, self.args


class Words(ExceptionGroup[Exception]):
    def derive(self, excs: Any) -> Words:
        return Words(self.message, excs)


class Locked(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Grows(Exception):
    """Is another one each time it is made."""

    def __init__(self, text: str) -> None:
        super().__init__(text + "!")

    def __str__(self) -> str:
        return f"{self.args[0]} {next(_count)}"


_count = itertools.count()


class Scaled(Exception):
    def __init__(self, usd: float) -> None:
        super().__init__(usd * 1.2)


class Boxed(Exception):
    def __init__(self, body: object) -> None:
        super().__init__({"error": body})


class Below(Exception):
    def __init__(self, name: str | Path) -> None:
        super().__init__(Path("/data") / Path(name).name / "x")
        self.name = name


class Listed(Exception):
    def __init__(self, *numbers: object) -> None:
        super().__init__([*numbers])


class Unlocked(Exception):
    """Has what cannot be pickled in a slot, which its ``__init__`` makes anew."""

    __slots__ = ("lock",)

    def __init__(self, usd: float) -> None:
        super().__init__(usd)
        self.lock = threading.Lock()


class Costly(Unlocked):
    def __init__(self, usd: float) -> None:
        super().__init__(usd * 1.2)


class Forgets(float):
    """Is another one each time it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Forgets, (float(self) * 2,)


class Another(str):
    """Is another one where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Another, ("other",)


class Circular(dict[str, Any]):
    """Is in itself."""

    def __init__(self) -> None:
        self["self"] = self


class Tensor:
    """Says what does not travel, as one of PyTorch with a grad_fn."""

    def __init__(self, grad: str = "grad_fn=<Mul>") -> None:
        self.grad = grad

    def __reduce__(self) -> tuple[type[Tensor], tuple[str]]:
        return Tensor, ("requires_grad=True",)

    def __repr__(self) -> str:
        return f"tensor(3., {self.grad})"
