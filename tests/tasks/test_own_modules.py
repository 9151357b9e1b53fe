"""The user's own modules and the script: which a call needs, and what of the script travels with its values."""

from __future__ import annotations

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
from skyinfra.tasks.needs import Needs
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
    # What a program writes beside its code in the meantime leaves what goes as it is.
    (tmp_path / "data_pkg/large").write_bytes(bytes(6 * 2**20))
    assert found() == {name: files[name].encode() for name in went}
    write({"large_pkg/__init__.py": "", "large_pkg/table.csv": "1"})
    (tmp_path / "large_pkg/large").write_bytes(bytes(6 * 2**20))
    assert modules.data_of(modules.closure(["large_pkg"])) == []


def test_a_file_that_comes_and_goes_hinders_no_other(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"brief_pkg/__init__.py": "", "brief_pkg/one.txt": "1", "brief_pkg/two.py": ""})
    listed = modules._files_of
    gone = [tmp_path / "brief_pkg/gone.txt", tmp_path / "brief_pkg/gone.py"]
    monkeypatch.setattr(modules, "_files_of", lambda folder: iter([*gone, *listed(folder)]))
    assert [each.path for each in modules.data_of(modules.closure(["brief_pkg"]))] == ["brief_pkg/one.txt"]


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


def test_a_notebook_that_is_imported_as_a_module_travels_by_value(tmp_path: Path) -> None:
    (tmp_path / "book.ipynb").write_text("import skyinfra as sky\n@sky.compute\ndef f(): return 3\n")
    text = (
        "import importlib.machinery, importlib.util, sys\nfrom skyinfra.tasks import pickling\n"
        "from skyinfra.tasks.needs import Needs\nloader = importlib.machinery.SourceFileLoader('book', 'book.ipynb')\n"
        "spec = importlib.util.spec_from_loader('book', loader)\nbook = importlib.util.module_from_spec(spec)\n"
        "sys.modules['book'] = book\nloader.exec_module(book)\nprint(pickling.dump(book.f(), Needs()).hex())\n"
    )
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    function, arguments, _ = pickle.loads(bytes.fromhex(done.stdout))
    assert function(*arguments) == 3


def test_a_new_type_without_a_file_travels_by_value() -> None:
    text = (
        "import pickle, typing\nfrom skyinfra.tasks import pickling\nfrom skyinfra.tasks.needs import Needs\n"
        "from skyinfra.tasks.task import Task\nUser = typing.NewType('User', int)\ndef f(u: User) -> User: return u\n"
        "print(pickling.dump(Task(f, (1,)), Needs()).hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    function, arguments, _ = pickle.loads(bytes.fromhex(done.stdout))
    assert function(*arguments) == 1 and function.__annotations__["u"].__supertype__ is int


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
