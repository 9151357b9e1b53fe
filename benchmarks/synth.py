"""Synth: pools against an empty app of the same library, many against one, and one node against typed bindings."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks import bindings, measure
from benchmarks.measure import Result, python

# As cdktf and `skyinfra synth` run a program: what it reads ahead then counts as well.
compare = partial(measure.compare, environment={"CDKTF_CONTEXT_JSON": "{}"})

ROOT = Path(__file__).resolve().parent.parent

EMPTY = """
from {library} import App, TerraformStack
app = App()
TerraformStack(app, "s")
app.synth()
"""
POOLS = """
import skyinfra as sky
from {library} import App
app = App()
sky.FleetStack(app, "s", pools=[
    sky.ComputePool(name=f"p{{i}}", nodes={nodes}, provider=sky.Local(simulate=True), accelerator="H100/3g.40gb")
    for i in range({pools})])
app.synth()
"""
AWS = """
import skyinfra as sky
from {library} import App
app = App()
sky.FleetStack(app, "s", pools=[
    sky.ComputePool(name=f"p{{i}}", provider=sky.AWS(), accelerator={accelerator!r}) for i in range({pools})])
app.synth()
"""


# What is synthesized, against what, and the most it may take as people do it.
ROWS = (
    ("one pool", "empty app", 1.15),
    ("stacks/aws-mig", "empty app", 1.15),
    ("100 pools on aws", "empty app", 1.5),
    ("1,000 nodes", "one pool", 2),
    ("1,000 pools", "one pool", 2),
)


def run() -> Iterator[Result]:
    for library in ("cdktf", "cdktn"):
        if importlib.util.find_spec(library) is None:
            continue
        programs = _programs(library)
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder)
            if library == "cdktf":
                yield from _with_cdktf(programs, at)
                yield from _against_bindings(at)
            for what, baseline, _ in ROWS:
                mine, theirs = python(programs[what]), python(programs[baseline])
                yield compare(f"{what}, the {library} program alone", mine, baseline, theirs, runs=5, folder=at)


def _programs(library: str) -> dict[str, str]:
    # As its own program says it, but for where it writes.
    stack = (ROOT / "stacks" / "aws-mig" / "main.py").read_text()
    return {
        "empty app": EMPTY.format(library=library),
        "one pool": POOLS.format(library=library, nodes=1, pools=1),
        "stacks/aws-mig": f"import os; os.environ['LIBRARY'] = {library!r}\n{stack}",
        "100 pools on aws": AWS.format(library=library, pools=100, accelerator="H100:8/3g.40gb+2g.20gb+1g.10gb*2"),
        "1,000 nodes": POOLS.format(library=library, nodes=1000, pools=1),
        "1,000 pools": POOLS.format(library=library, nodes=1, pools=1000),
    }


def _with_cdktf(programs: dict[str, str], at: Path) -> Iterator[Result]:
    """As people synthesize: ``cdktf synth`` of each program, and our own command."""
    cdktf = shutil.which("cdktf") or ROOT / "tests" / "npm" / "node_modules" / ".bin" / "cdktf"
    if not Path(cdktf).exists():
        print("synth: cdktf-cli is not installed (`make test` does); `cdktf synth` is left out", file=sys.stderr)
        return
    folders = {}
    for number, (what, program) in enumerate(programs.items()):
        folders[what] = at / f"app{number}"
        folders[what].mkdir()
        (folders[what] / "main.py").write_text(program)
        project = {"language": "python", "app": f"{sys.executable} main.py", "sendCrashReports": "false"}
        (folders[what] / "cdktf.json").write_text(json.dumps(project))

    def command(what: str, *program: str) -> list[str]:
        return ["sh", "-c", f"cd {shlex.quote(str(folders[what]))} && exec {shlex.join(program)} synth"]

    measured = partial(measure.compare, runs=5, environment={"CHECKPOINT_DISABLE": "1"})
    for what, baseline, aim in ROWS:
        mine, theirs = (command(each, str(cdktf)) for each in (what, baseline))
        yield measured(f"cdktf synth: {what}", mine, baseline, theirs, aim=f"<= {aim}x")
    mine, theirs = command(what := "stacks/aws-mig", sys.executable, "-m", "skyinfra.cli"), command(what, str(cdktf))
    yield measured(f"skyinfra synth: {what}", mine, "cdktf synth of the same", theirs)


def _against_bindings(at: Path) -> Iterator[Result]:
    program = bindings.python()
    if program is not None:
        one = python(AWS.format(library="cdktf", pools=1, accelerator="H100"))
        typed = [str(program), "-c", bindings.INSTANCE]
        yield compare("synth of one node on aws, cdktf", one, "prebuilt typed bindings", typed, runs=3, folder=at)
