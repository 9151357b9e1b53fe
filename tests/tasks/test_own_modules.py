"""The user's own modules and the script: which a call needs, and what of the script travels with its values."""

from __future__ import annotations

import ast
import collections
import importlib.machinery
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyinfra.protocol.secrets import Secret
from skyinfra.tasks import missing, modules, pickling
from skyinfra.tasks.modules import Source
from skyinfra.tasks.needs import Needs
from skyinfra.tasks.script import Script, used
from skyinfra.tasks.task import Task

Write = Callable[[dict[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files into a folder that Python imports from; what is imported from there is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        importlib.invalidate_caches()

    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


def names(*wanted: str) -> list[str]:
    return [each.name for each in modules.closure(wanted)]


def test_what_a_module_imports_goes_with_it_in_functions_too(write: Write) -> None:
    write(
        {
            "one_mod.py": "import json, two_mod\ndef f():\n    from three_mod import x\n",
            "two_mod.py": "import numpy\nfrom four_pkg.sub import thing\n",
            "three_mod.py": "x = 1\n",
            "four_pkg/__init__.py": "",
            "four_pkg/sub.py": "from . import other\nfrom .deep.far import far\nthing = 2\n",
            "four_pkg/other.py": "",
            "four_pkg/deep/far.py": "far = 1\n",
            "four_pkg/plugins/by_name.py": "",
            "alone_mod.py": "",
        }
    )
    found = names("one_mod")
    assert found == [
        "four_pkg",
        "four_pkg.deep.far",
        "four_pkg.other",
        "four_pkg.plugins.by_name",
        "four_pkg.sub",
        "one_mod",
        "three_mod",
        "two_mod",
    ]
    assert {each.path for each in modules.closure(["four_pkg.sub"])} >= {"four_pkg/__init__.py", "four_pkg/sub.py"}


def test_the_data_files_of_packages_go_along(write: Write, tmp_path: Path) -> None:
    files = {
        "data_pkg/__init__.py": "",
        "data_pkg/table.csv": "1,2",
        "data_pkg/deep/words.txt": "a b",
        "data_pkg/inner/__init__.py": "",
        "data_pkg/inner/one.json": "{}",
        "data_pkg/.env": "no",
        "data_pkg/token.txt": "no",
        "data_pkg/terraform.tfstate": "no",
        "data_pkg/deep/terraform.tfstate.backup": "no",
        "data_pkg/venv/pyvenv.cfg": "no",
        "data_pkg/__pycache__/x.pyc": "no",
        "beside.py": "",
        "beside.txt": "no",
    }
    write(files)
    (tmp_path / "data_pkg/link.txt").symlink_to("/etc/hostname")
    Secret("TOKEN", file=str(tmp_path / "data_pkg/token.txt"))

    def found() -> dict[str, bytes]:
        return {each.path: each.data for each in modules.data_of(modules.closure(["data_pkg.inner", "beside"]))}

    went = ("data_pkg/deep/words.txt", "data_pkg/inner/one.json", "data_pkg/table.csv")
    assert found() == {name: files[name].encode() for name in went}
    (tmp_path / "data_pkg/large").write_bytes(bytes(6 * 2**20))
    assert found() == {}


def test_what_says_the_version_of_an_own_package_goes_with_one_that_asks(write: Write, tmp_path: Path) -> None:
    info = "site-packages/asks_pkg-1.0.dist-info"
    about = {"METADATA": "Metadata-Version: 2.1\nName: asks-pkg\nVersion: 1.0\n", "top_level.txt": "asks_pkg\n"}
    write({f"{info}/{name}": text for name, text in about.items()})
    asks = "from importlib.metadata import version\n__version__ = version('asks-pkg')\n"
    write({"asks_pkg/__init__.py": asks, "asks_pkg/table.csv": "1", "silent_pkg/__init__.py": ""})
    sys.path.insert(0, str(tmp_path / "site-packages"))
    try:
        found = {each.path: each.data for each in modules.data_of(modules.closure(["asks_pkg"]))}
        assert found.keys() == {"asks_pkg/table.csv", "asks_pkg-1.0.dist-info/METADATA"}
        assert found["asks_pkg-1.0.dist-info/METADATA"].decode() == about["METADATA"]
        assert modules.data_of(modules.closure(["silent_pkg"])) == []
    finally:
        sys.path.remove(str(tmp_path / "site-packages"))


def test_a_folder_that_cannot_be_read_is_left_out(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"open_pkg/__init__.py": "", "open_pkg/one.py": "", "open_pkg/closed/two.txt": ""})
    iterdir = Path.iterdir

    def refused(folder: Path) -> Iterator[Path]:
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", refused)
    assert names("open_pkg") == ["open_pkg", "open_pkg.one"]
    assert modules.data_of(modules.closure(["open_pkg"])) == []


def test_a_circle_of_imports_ends_and_a_module_that_does_not_parse_goes_alone(write: Write) -> None:
    write({"left_mod.py": "import right_mod\n", "right_mod.py": "import left_mod\n", "broken_mod.py": "def (:\n"})
    assert names("left_mod", "broken_mod") == ["broken_mod", "left_mod", "right_mod"]


def test_installed_modules_and_those_of_python_are_not_own(write: Write, tmp_path: Path) -> None:
    write({"site-packages/installed_mod.py": "", "json.py": ""})
    sys.path.insert(0, str(tmp_path / "site-packages"))
    try:
        importlib.import_module("installed_mod")
        assert names("installed_mod", "json", "pytest", "skyinfra.pool", "cloudpickle", "no_such_mod") == []
        assert not modules.is_own("installed_mod") and not modules.is_own(None) and not modules.is_own("os")
    finally:
        sys.path.remove(str(tmp_path / "site-packages"))


def test_a_package_that_pip_installed_beside_the_program_is_not_own(write: Write, tmp_path: Path) -> None:
    """`pip install --target` writes a record, and no folder of that name: for PYTHONPATH, or the program's own one."""
    record = "target_pkg/__init__.py,sha256=x,1\ntarget_mod.py,sha256=x,1\ntarget-1.dist-info/RECORD,,\n"
    write(
        {
            "target_pkg/__init__.py": "",
            "target_mod.py": "",
            "target-1.dist-info/RECORD": record,
            "beside_target.py": "import target_pkg, target_mod\n",
        }
    )
    assert names("beside_target") == ["beside_target"]
    importlib.import_module("beside_target")
    assert modules.is_own("beside_target") and not modules.is_own("target_pkg") and not modules.is_own("target_mod")


def test_a_module_goes_as_it_was_loaded_until_it_is_loaded_again(write: Write, tmp_path: Path) -> None:
    write({"edited_mod.py": "A = 1\n"})
    module = importlib.import_module("edited_mod")
    before = modules.closure(["edited_mod"])
    (tmp_path / "edited_mod.py").write_text("A = 22\n")
    assert modules.closure(["edited_mod"])[0].data == b"A = 1\n" and modules.are_current(before)
    importlib.reload(module)
    assert not modules.are_current(before)
    assert modules.closure(["edited_mod"])[0].data == b"A = 22\n"
    assert not modules.are_current(before)
    del sys.modules["edited_mod"]
    assert not modules.are_current(before)


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
            return ast.parse, Write

        return [importlib for _ in pool], len(pool), pool.names, inner

    assert set(used(function.__code__)) == {"ast", "Write", "importlib", "len"}


PROGRAM = """
import enum, pickle, threading
from skyinfra.tasks import pickling
from skyinfra.tasks.needs import Needs
from skyinfra.tasks.task import Task
from starred import *

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


INSTALLED = """
import functools, sys, threading
sys.path.insert(0, "site-packages")
import pickle
from urllib.parse import urlsplit
from installed_lib import Model, predict
from skyinfra.tasks import pickling
from skyinfra.tasks.needs import Needs
from skyinfra.tasks.task import Task
assert b"undecorated_in" in pickling.dump(predict(1), Needs())
assert pickle.loads(pickling.dump(Task(len, ([urlsplit],)), Needs()))[1][0][0] is urlsplit
print("ended well")
"""


def test_what_an_installed_package_decorates_is_what_the_node_has(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed_lib.py").write_text(
        "import threading\nimport skyinfra as sky\n_lock = threading.Lock()\n"
        "@sky.compute\ndef predict(x):\n    with _lock: return x\n@sky.cls\nclass Model: pass\n"
    )
    (tmp_path / "program.py").write_text(INSTALLED)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "ended well\n", done.stderr


def test_a_new_type_without_a_file_travels_by_value() -> None:
    text = (
        "import pickle, typing\nfrom skyinfra.tasks import pickling\nfrom skyinfra.tasks.needs import Needs\n"
        "from skyinfra.tasks.task import Task\nUser = typing.NewType('User', int)\ndef f(u: User) -> User: return u\n"
        "print(pickling.dump(Task(f, (1,)), Needs()).hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    function, arguments, _ = pickle.loads(bytes.fromhex(done.stdout))
    assert function(*arguments) == 1 and function.__annotations__["u"].__supertype__ is int


def test_a_script_without_such_a_block_travels_by_value(tmp_path: Path) -> None:
    text = (
        PROGRAM.partition("if __name__")[0].replace("from starred import *\n", "")
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


def test_modules_of_cached_functions_and_of_new_types_go_along(write: Write) -> None:
    write(
        {
            "cached_mod.py": "import functools\n@functools.cache\ndef one(x): return x\n",
            "typed_mod.py": "import typing\nUser = typing.NewType('User', int)\n",
        }
    )
    cached, typed = importlib.import_module("cached_mod"), importlib.import_module("typed_mod")
    needs = Needs()
    data = pickling.dump(Task(len, ([cached.one, typed.User],)), needs)
    assert needs.modules == {"cached_mod", "typed_mod"}
    assert pickle.loads(data)[1] == ([cached.one, typed.User],)


CACHED = """
import functools, sys
from skyinfra.tasks import pickling
from skyinfra.tasks.task import Task

@functools.lru_cache(maxsize=5, typed=True)
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
class Net:
    @functools.cache
    def go(self): return "went"
def function(): return fibonacci(200), fibonacci.cache_parameters(), Net().go()
sys.stdout.buffer.write(pickling.dump_call(Task(function))[0])
"""


def test_cached_functions_that_no_node_can_import_travel_by_value(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CACHED)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=True)
    load = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())[0]())"
    there = subprocess.run([sys.executable, "-c", load], input=done.stdout, capture_output=True, check=False)
    wanted = (280571172992510140037611932413038677189525, {"maxsize": 5, "typed": True}, "went")
    assert there.stdout.decode() == f"{wanted}\n", there.stderr.decode()


class Finder:
    """Finds packages in folders that are not on the path, as that of an editable install does."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.files = {name: folder / name / "__init__.py" for name in names}

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.files[name]) if name in self.files else None


def test_modules_that_a_finder_finds_go_along_whether_they_are_loaded_or_not(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "found_pkg/__init__.py": "",
        "found_pkg/one.py": "def f():\n    import late_pkg.two\n",
        "found_pkg/deep/__init__.py": "",
        "found_pkg/deep/three.py": "",
        "late_pkg/__init__.py": "",
        "late_pkg/two.py": "",
    }
    write({f"elsewhere/src/{name}": text for name, text in files.items()})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder(tmp_path / "elsewhere/src", "found_pkg", "late_pkg")])
    importlib.import_module("found_pkg")
    found = ["found_pkg", "found_pkg.deep", "found_pkg.deep.three", "found_pkg.one", "late_pkg", "late_pkg.two"]
    assert names("found_pkg") == found
    remedy = missing.remedy("late_pkg.two", [], "--include {}")
    assert "elsewhere/src/late_pkg/two.py here: --include" in remedy, remedy
