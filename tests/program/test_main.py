"""The script of a client as the module ``__main__``, and modules that a node lacks, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from skyinfra.program import views

SCRIPT = """
import dataclasses, sys, typing
import absent_pkg.deep
import absent_pkg
from absent_other import thing, Base
try:
    import absent_optional
except ImportError:
    absent_optional = None
import helper
import skyinfra as sky
POOL = sky.ComputePool(provider=sky.AWS(region="x"), accelerator="H100")
print("loaded", __name__, sys.argv[1:])
@thing.decorate(1)
def decorated(): ...
class Derived(Base, absent_pkg.Mixin):
    pass
@dataclasses.dataclass
class State:
    step: "int"
def hints(): return typing.get_type_hints(State), __name__, State.__module__
def imports():
    import absent_pkg
    return absent_pkg.x
def uses(what):
    if what == "attribute": return absent_pkg.deep.far
    if what == "call": return decorated()
    if what == "class": return Derived()
    if what == "isinstance": return isinstance(1, thing)
    if what == "pool": return POOL.manifest
    if what == "import": return imports()
if __name__ == "__main__":
    raise SystemExit("the block ran")
"""
RUN = """
import pickle, sys
from skyinfra.program import main
from skyinfra.protocol import pickles

class Wheel:  # nodes have not all of this package
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *given):
        return None if name in ("skyinfra.pool", "skyinfra.providers") else self.finder.find_spec(name, *given)

sys.meta_path[:] = [Wheel(finder) for finder in sys.meta_path]
before = sys.modules["__main__"]
load = lambda data: main.loading(lambda: pickle.loads(data))
hints, State = load(b"c__main__\\nhints\\n."), load(b"c__main__\\nState\\n.")
assert hints() == ({"step": int}, "__main__", "__main__"), hints()
assert pickle.loads(pickle.dumps(State(1))) == State(1)
assert b"__main__" in pickles.dumps(State) and len(pickles.dumps(State)) < 60
assert sys.modules["__main__"].absent_optional is None
uses = load(b"c__main__\\nuses\\n.")
for what in ("attribute", "call", "class", "isinstance", "pool", "import"):
    try:
        uses(what)
    except ModuleNotFoundError as error:
        assert error.name.startswith(("absent_", "skyinfra.p")), error.name
    else:
        raise AssertionError(what)
assert not [name for name in sys.modules if name.startswith("absent_")]
try:
    load(b"cno_such_mod\\nx\\n.")
except ModuleNotFoundError as error:
    assert error.name == "no_such_mod"
print("ended well")
"""


def run(folder: Path, text: str, script: str, package: str = "") -> subprocess.CompletedProcess[str]:
    path = folder / package / "train.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    (folder / "helper.py").write_text("import absent_in_helper\ndef f(): return absent_in_helper.x\n")
    program = json.dumps([str(path), package, "--lr", "1"])
    environment = {**os.environ, views.VARIABLE: str(folder), views.PROGRAM: program, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_script_is_the_main_module_and_placeholders_stand_for_what_the_node_lacks(tmp_path: Path) -> None:
    done = run(tmp_path, RUN, SCRIPT)
    assert done.stdout.splitlines()[-2:] == ["loaded train ['--lr', '1']", "ended well"], done.stderr


def test_a_script_that_fails_leaves_no_main_module(tmp_path: Path) -> None:
    text = """
import pickle, sys
from skyinfra.program import main
before = sys.modules["__main__"]
for _ in range(2):
    try:
        main.loading(lambda: 1)
    except LookupError as error:
        assert error.args == ("as it should",) and sys.modules["__main__"] is before
    else:
        raise AssertionError
print("ended well")
"""
    done = run(tmp_path, text, "raise LookupError('as it should')\n")
    assert done.stdout == "ended well\n", done.stderr


VALUES = """
CONFIG = {"lr": 0.1}
COUNT = 0
SENT = []
def rate():
    global COUNT
    COUNT += 1
    return CONFIG["lr"], globals().get("ONLY_IN_BLOCK")
class Model:
    def __init__(self): self.made_with = CONFIG["lr"]
    def rates(self): return self.made_with, CONFIG["lr"]
    def out(self): SENT.append(CONFIG["lr"])
    out.__skyinfra_exit__ = True
if __name__ == "__main__":
    raise SystemExit("the block ran")
"""
RUN_VALUES = """
import pickle, sys
from skyinfra.program import main
from skyinfra.worker import stateful

def task(values, name):
    function = main.loading(lambda: getattr(sys.modules["__main__"], name))
    return main.with_values(values, function) if values else function()

set_values = {"CONFIG": {"lr": 0.5}, "ONLY_IN_BLOCK": 1}
imported = main.loading(lambda: sys.modules["__main__"].CONFIG)
assert task({}, "rate") == (0.1, None)
assert task(set_values, "rate") == (0.5, 1)
assert task({}, "rate") == (0.1, None), task({}, "rate")
assert sys.modules["__main__"].CONFIG is imported and sys.modules["__main__"].COUNT == 3
assert task({**set_values, "CONFIG": {"lr": 0.7}}, "rate") == (0.7, 1)
assert task({"ONLY_IN_BLOCK": 2}, "rate") == (0.1, 2)

# An object keeps the values with which it was made, for its methods and its exit methods.
def recipe(digest, values):
    kind = sys.modules["__main__"].Model
    made = (main.with_values, (values, kind), {}) if values else (kind, (), {})
    return stateful.Recipe("Model", digest, 1, pickle.dumps(made))

def rates(recipe):
    return main.loading(lambda: stateful.Method(recipe, "rates"))()

one, other = recipe("one", set_values), recipe("other", {})
for _ in range(2):
    assert rates(one) == (0.5, 0.5), rates(one)
    assert task({}, "rate") == (0.1, None)
assert rates(other) == (0.1, 0.1), rates(other)
assert sys.modules["__main__"].SENT == [0.5]
stateful.release("other")
assert sys.modules["__main__"].SENT == [0.5, 0.1]
print("ended well")
"""


def test_values_of_a_call_are_those_of_its_call_alone(tmp_path: Path) -> None:
    done = run(tmp_path, RUN_VALUES, VALUES)
    assert done.stdout == "ended well\n", done.stderr


PART = """
from . import part
def two(x): return part.two(x)
"""
SPAWNS = """
import multiprocessing, pickle
from skyinfra.program import main

two = main.loading(lambda: pickle.loads(b"c__main__\\ntwo\\n."))
with multiprocessing.get_context("spawn").Pool(1) as pool:
    print(pool.map(two, [1, 2]))
"""


def test_a_module_of_a_package_is_the_main_module_of_processes_that_it_spawns(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/part.py").write_text("def two(x): return 2 * x\n")
    done = run(tmp_path, SPAWNS, PART, "pkg")
    assert done.stdout == "[2, 4]\n", done.stderr
