"""The script of the user: what an import of it sets, and what of it travels with its values."""

from __future__ import annotations

import ast
import collections
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyinfra.tasks.modules import Source
from skyinfra.tasks.script import Script, used


def script(text: str) -> Script:
    return Script(Source("train", Path("/p/train.py"), text.encode()), "", ast.parse(text))


def test_names_that_an_import_of_the_script_sets() -> None:
    found = script(
        "import os.path, a.b as c\nfrom x import y, z as w\nA = B = 1\nC: int = 2\nD: int\n(E, [F, *G]) = [1, [2]]\n"
        "for I in []: J = 1\nwith open('x') as K: pass\n"
        "if A:\n    def L(): inner = 1\nelse:\n    class M: attribute = 1\n"
        "try: pass\nexcept OSError as N: pass\nif (O := 1): pass\nasync def P(): pass\n"
        "if __name__ == '__main__':\n    A = 3\n    Q = 4\n    with open('x') as R: pass\nelse:\n    S = 1\n"
    )
    assert found.top == frozenset(
        ["os", "c", "y", "w", "B", "C", "D", "E", "F", "G", "I", "J", "K", "L", "M", "N", "O", "P", "S"]
    )


@pytest.mark.parametrize(
    "test",
    [
        "__name__ == '__main__'",
        "'__main__' == __name__",
        '__name__ == "__main__" and ready',
        "x and __name__ == '__main__'",
    ],
)
def test_blocks_of_the_main_program(test: str) -> None:
    assert len(script(f"if {test}:\n    pass\n").blocks) == 1


@pytest.mark.parametrize("test", ["__name__ != '__main__'", "name == '__main__'", "__name__ == 'x'", "True"])
def test_other_blocks(test: str) -> None:
    assert script(f"if {test}:\n    pass\n").blocks == []


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("args = parser.parse_args()", True),
        ("import sys\nif len(sys.argv) > 1: DEBUG = 1", True),
        ("from sys import argv\nprint(argv)", True),
        ("def main():\n    return parser.parse_args()", False),
        ("class A:\n    x = parse_known_args()", True),
        ("if __name__ == '__main__':\n    args = parse_args()", False),
    ],
)
def test_arguments_go_where_an_import_reads_them(monkeypatch: pytest.MonkeyPatch, text: str, reads: bool) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    assert script(text).main == ("train.py", "", *(["--lr", "1"] if reads else []))


def test_global_names_that_a_function_reads() -> None:
    def function(pool: list[int]) -> object:
        def inner() -> object:
            return ast.parse, Script

        return [importlib for _ in pool], len(pool), pool.names, inner

    assert set(used(function.__code__)) == {"ast", "Script", "importlib", "len"}


PROGRAM = """
import enum, pickle, threading
from skyinfra.tasks import pickling
from skyinfra.tasks.needs import Needs
from skyinfra.tasks.task import Task
try: from .starred import *
except ImportError: from starred import *

LIMIT = 1
DEVICE = "cuda"
if DEVICE: DEVICE = "cpu"
STATE, OPENED = {}, threading.local()
class Config: rate = 1
CONFIGURED = Config()
class Scale(enum.Enum):
    plain = 1
    log = 2
def named(): return f"{id} {len(STATE)}", DEVICE, shared, guard, CONFIGURED.rate, OPENED
def eval(): return setting
def through(): return eval()
def logs():
    class Inner: pass
    return __name__, Inner
TABLE = {"a": 1}
UNCHANGED = [1, 2]
CONFIG = dict(lr=1e-3, sizes=list((4 * 1024,)))
SAME = dict(size=4 * 1024)
NAMES = set()
LOCK = threading.Lock()
cache = None
class Net:
    rate = 0
    def go(self): return LOCK, setting, LIMIT, UNCHANGED
def helper(): return TABLE, CONFIG, NAMES, cache, Net().go()
def function(): return helper()
def alone(): return UNCHANGED, SAME

def values(task):
    needs = Needs()
    pickling.dump(task, needs)
    return needs

if __name__ == "__main__":
    setting, other, lock = {"lr": 1}, 2, threading.Lock()
    LIMIT = 5
    TABLE["b"] = 2
    CONFIG["lr"] = 1
    NAMES.add("a")
    id = 7
    CONFIGURED.rate = 2
    OPENED.value = 1
    def late(): return alone()
    more = values(Task(named)).values
    assert set(more) == {"id", "CONFIGURED"} and vars(more["CONFIGURED"]) == {"rate": 2}, more
    assert values(Task(through)).values == {"setting": {"lr": 1}}
    assert values(Task(logs)).values == {}
    sent = pickling.dump(Task(named, (Scale.plain,)), Needs())
    assert b"Scale" in sent and b"_make_skeleton_enum" not in sent
    found = values(Task(function))
    changed = {"TABLE": {"a": 1, "b": 2}, "CONFIG": {"lr": 1, "sizes": [4096]}, "NAMES": {"a"}}
    assert found.values == {"setting": {"lr": 1}, "LIMIT": 5, **changed}, found.values
    assert found.modules == {"__main__"}
    assert values(Task(alone)).values == {}
    assert values(Task(len, (Net(),))).values.keys() == {"setting", "LIMIT"}
    assert "late" in values(Task(lambda: late())).values
    call, included = pickling.dump_call(Task(function))
    assert included.tree.main == (".skyinfra/program.py", "",), included.tree.main
    assert list(included.tree.files) == [".skyinfra/program.py", ".skyinfra/starred.py"], included.tree.files
    try:
        values(Task(lambda: lock))
    except Exception as error:
        assert "'lock', which <lambda> uses" in str(error), error
    print("ended well")
"""


def test_what_the_main_block_sets_travels_and_what_an_import_sets_does_not(tmp_path: Path) -> None:
    (tmp_path / "starred.py").write_text("import threading\nshared, guard = 1, threading.Lock()\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "ended well\n", done.stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4 * 1024 - 2**10", 3072),
        ("dict(a=[-1], b={2: (3,)})", {"a": [-1], "b": {2: (3,)}}),
        ("dict([(1, 2)]) | {3: {4}}", {1: 2, 3: {4}}),
        ("[None] * 3 + list('a')", [None, None, None, "a"]),
        ("float('inf')", float("inf")),
        ("frozenset()", frozenset()),
    ],
)
def test_plain_data_is_known_however_it_is_written(text: str, value: object) -> None:
    found = script(f"X = {text}\n")
    assert not found.has_changed("X", value) and found.has_changed("X", 0)


@pytest.mark.parametrize(
    "text",
    [
        "os.cpu_count()",
        "cpus",
        "dict.fromkeys('a')",
        "dict(**{'a': 1})",
        "[*{1}]",
        "list(range(3))",
        "10**10**10",
        "1 << 10**9",
        "'x' * 10**9",
        "10**9 * [0]",
        "'%1000000000d' % 1",
        "1 / 0",
        "-{}",
        "{[]}",
    ],
)
def test_what_is_computed_or_large_is_the_own_of_each_node(text: str) -> None:
    assert not script(f"X = {text}\n").has_changed("X", 0)


@pytest.mark.parametrize(
    "text",
    [
        "X = 'a'\nif ready: X = 'b'\n",
        "X = 'a'\ntry: import x as X\nexcept ImportError: pass\n",
        "X = 1\nX += 1\n",
        "X = 1\nX = count()\n",
        "X = 1\ndef count():\n    global X\n    X = 3\ncount()\n",
    ],
)
def test_what_an_import_computes_last_is_the_own_of_each_node(text: str) -> None:
    assert not script(text).has_changed("X", "b")
    assert script(f"{text}X = 'c'\n").has_changed("X", "b")


def test_a_value_of_another_kind_is_another_one() -> None:
    assert script("X = {}\n").has_changed("X", collections.defaultdict(int))


def test_a_script_without_such_a_block_travels_by_value(tmp_path: Path) -> None:
    text = (
        PROGRAM.partition("if __name__")[0].replace("from starred import *", "pass")
        + "call, included = pickling.dump_call(Task(alone))\nprint(included)\n"
    )
    (tmp_path / "program.py").write_text(text)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "None\n", done.stderr


REACHED = """
import functools
from skyinfra.tasks import pickling
from skyinfra.tasks.needs import Needs
from skyinfra.tasks.task import Compute, Task

TABLE = []
ROWS, FIRST = {}, 1
MODEL = None
class Unbound:
    def __getattr__(self, name): raise RuntimeError("working outside of a context")
request = Unbound()

def timed(function):
    @functools.wraps(function)
    def timed_one(*arguments): return function(*arguments), in_wrapper
    return timed_one
class Logged:
    def __init__(self, function): self.function = function
    def __call__(self, *arguments): return self.function(*arguments), in_call
class Kind(type):
    def __call__(cls): return in_meta
class Base:
    def inherited(self): return in_base
class Net(Base, metaclass=Kind):
    @property
    def first(self): return in_property
    @functools.cached_property
    def second(self): return in_cached_property
    @classmethod
    def third(cls): return in_class_method
class Plain:
    def go(self): return in_object
@timed
def wrapped(): return in_wrapped
@functools.cache
def cached(): return in_cached
@Logged
def logged(): return in_logged
def bound(x): return in_partial
@Compute
@timed
def decorated(): return in_decorated
def default(): return in_default
partial, thing = functools.partial(bound, 1), Plain()
def closed():
    def inner(): return in_closure, default
    return inner
closure = closed()
def listed(): return in_list
by_name = {"a": listed}

def each_of(name):
    return {
        "wrapped": lambda: wrapped(), "cached": lambda: cached(), "logged": lambda: logged(),
        "partial": lambda: partial(), "closure": lambda: closure(), "thing": lambda: (thing.go(), request),
        "net": lambda: Net, "list": lambda: by_name["a"](), "decorated": lambda: decorated(),
    }[name]
def fill():
    global MODEL
    TABLE.append(bytes(2**20 + 1))
    ROWS[1] = MODEL = bytes(2**20 + 1)
def use_table(): return TABLE, MODEL, ROWS, FIRST
def use_default(given=default): return given()

def values(function):
    needs = Needs()
    pickling.dump(Task(function), needs)
    return needs.values

if __name__ == "__main__":
    in_wrapper = in_call = in_meta = in_base = in_property = in_cached_property = in_class_method = 1
    in_object = in_wrapped = in_cached = in_logged = in_partial = in_decorated = in_closure = in_default = in_list = 1
    wanted = {
        "wrapped": {"in_wrapper", "in_wrapped"}, "cached": {"in_cached"}, "logged": {"in_call", "in_logged"},
        "partial": {"in_partial"}, "closure": {"in_closure", "in_default"}, "thing": {"in_object"},
        "net": {"in_meta", "in_base", "in_property", "in_cached_property", "in_class_method"},
        "decorated": {"in_wrapper", "in_decorated"}, "list": {"in_list"},
    }
    wrong = {}
    for name, names in wanted.items():
        if (found := {each for each in values(each_of(name)) if each.startswith("in_")}) != names:
            wrong[name] = found
    if set(values(use_default)) != {"in_default"}:
        wrong["default"] = values(use_default)
    fill()
    if set(values(use_table)) != {"TABLE", "ROWS"}:
        wrong["large"] = list(values(use_table))
    print(wrong)
"""


def test_values_are_found_through_decorators_classes_and_objects_and_travel_whatever_their_size(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(REACHED)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "{}\n", done.stdout + done.stderr


OWN_CLASS = """
import concurrent.futures, dataclasses, pickle, sys, tempfile
import skyinfra as sky

class Net:
    def __init__(self): self.weights = [1]
@dataclasses.dataclass
class State: step: int
def square(x): return x * x
@sky.compute
def use(folder):
    with tempfile.TemporaryFile() as file:
        pickle.dump(Net(), file)
        file.seek(0)
        weights = pickle.load(file).weights
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        squares = list(pool.map(square, [1, 2, 3]))
    checkpoints = sky.SpotCheckpointer(folder)
    checkpoints.save({"state": State(3)}, 3)
    return weights, squares, checkpoints.load_latest()

if __name__ == "__main__":
    with sky.connect(sys.argv[1], progress=False) as pool:
        found = pool.submit(use(sys.argv[2])).result(timeout=25)
        assert found == ([1], [1, 4, 9], ({"state": State(3)}, 3)), found
        print(pool.launch(use.function, sys.argv[2], nodes=1, per_node=1, framework="none") == [found])
"""


def test_own_classes_of_a_script_are_pickled_in_tasks_by_whoever_pickles_there(fleet: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OWN_CLASS)
    (tmp_path / "fleet.json").write_text(json.dumps(fleet.manifest.to_json()))
    command = [sys.executable, "program.py", "fleet.json", str(tmp_path / "checkpoints")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "True\n", done.stdout + done.stderr
