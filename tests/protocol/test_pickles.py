"""Pickling of values that have no file: classes of notebooks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from skyinfra.protocol import pickles

CLASSES = """
import enum
class Perm(enum.IntFlag):
    R = 4; W = 2; X = 1; RW = 6
    def can(self): return bool(self & Perm.R)
class Size(enum.Enum):
    S = (1, "small")
    L = (2, "large")
    def __init__(self, number, word): self.number = number; self.word = word
class Code(int, enum.Enum):
    A = (1, "x")
    def __new__(cls, number, word):
        self = int.__new__(cls, number); self._value_ = number; self.word = word
        return self
class Auto(enum.Flag):
    A = enum.auto(); B = enum.auto(); AB = A | B
def look():
    return repr((Perm.RW, Perm(5), list(Perm.__members__), Perm.R.can(), Size.S.number, Size((2, "large")).word,
                 Code.A.word, Code(1), Auto.AB, ~Auto.A, list(Auto.__members__)))
"""
DUMP = """
import sys
from skyinfra.protocol import pickles
data = pickles.dumps((look, [Perm.R, Size.L, Code.A, Auto.B]))
open(sys.argv[1], "wb").write(data)
print(look())
"""
LOAD = """
import pickle, sys
look, (perm, size, code, auto) = pickle.load(open(sys.argv[1], "rb"))
assert perm is type(perm).R and size is type(size).L and size.word == "large" and code.word == "x"
print(look())
"""


def test_enumerations_without_a_file_keep_aliases_attributes_and_methods(tmp_path: Path) -> None:
    def run(text: str) -> str:
        command = [sys.executable, "-c", text, str(tmp_path / "data")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(CLASSES + DUMP) == run(LOAD)


class ApiError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Coded(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


def test_exceptions_within_a_value_arrive_as_they_were() -> None:
    found = pickle.loads(pickles.dumps([1, ApiError(500, "x"), {"a": Coded(3)}]))
    assert found[0] == 1 and (str(found[1]), found[1].code) == ("500: x", 500) and str(found[2]["a"]) == "code 3"
