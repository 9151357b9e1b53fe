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


def run() -> Iterator[Result]:
    for library in ("cdktf", "cdktn"):
        if importlib.util.find_spec(library) is None:
            continue
        empty = EMPTY.format(library=library)
        one, nodes, pools = (POOLS.format(library=library, nodes=n, pools=p) for n, p in ((1, 1), (1000, 1), (1, 1000)))
        # As its own program says it, but for where it writes.
        stack = (
            f"import os; os.environ['LIBRARY'] = {library!r}\n{(ROOT / 'stacks' / 'aws-mig' / 'main.py').read_text()}"
        )
        hundred = AWS.format(library=library, pools=100, accelerator="H100:8/3g.40gb+2g.20gb+1g.10gb*2")
        named = {"one pool": (one, 1.15), "stacks/aws-mig": (stack, 1.15), "100 pools on aws": (hundred, 1.5)}
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder)
            if library == "cdktf":
                yield from _with_cdktf(empty, named, at)
                yield from _against_bindings(at)
            for what, (program, _) in named.items():
                name = f"synth of {what}, {library}, the program alone"
                yield compare(name, python(program), "empty app", python(empty), folder=at)
            baseline = python(one)
            yield compare(
                f"synth of 1,000 nodes, {library}", python(nodes), "one node", baseline, aim="<= 2x", folder=at
            )
            name = f"synth of 1,000 pools, {library}"
            yield compare(name, python(pools), "one pool", baseline, runs=3, aim="<= 2x", folder=at)


def _with_cdktf(empty: str, named: dict[str, tuple[str, float]], at: Path) -> Iterator[Result]:
    """As people synthesize: `cdktf synth` of each program."""
    cdktf = shutil.which("cdktf") or ROOT / "tests" / "npm" / "node_modules" / ".bin" / "cdktf"
    if not Path(cdktf).exists():
        print("synth: cdktf-cli is not installed (`make test` does); `cdktf synth` is left out", file=sys.stderr)
        return

    def command(name: str, program: str) -> list[str]:
        folder = at / name
        folder.mkdir()
        (folder / "main.py").write_text(program)
        project = {"language": "python", "app": f"{sys.executable} main.py", "sendCrashReports": "false"}
        (folder / "cdktf.json").write_text(json.dumps(project))
        return ["sh", "-c", f"cd {shlex.quote(str(folder))} && exec {shlex.quote(str(cdktf))} synth"]

    baseline = command("empty", empty)
    for number, (what, (program, aim)) in enumerate(named.items()):
        mine = command(f"app{number}", program)
        name, against = f"cdktf synth of {what}", "cdktf synth of an empty app"
        yield measure.compare(name, mine, against, baseline, aim=f"<= {aim}x", environment={"CHECKPOINT_DISABLE": "1"})


def _against_bindings(at: Path) -> Iterator[Result]:
    program = bindings.python()
    if program is not None:
        one = python(AWS.format(library="cdktf", pools=1, accelerator="H100"))
        typed = [str(program), "-c", bindings.INSTANCE]
        yield compare("synth of one node on aws, cdktf", one, "prebuilt typed bindings", typed, runs=3, folder=at)
