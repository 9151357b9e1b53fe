"""Synth: pools against an empty app of the same library, many against one, and one node against typed bindings."""

from __future__ import annotations

import importlib.util
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
        empty = python(EMPTY.format(library=library))
        one, nodes, pools = (
            python(POOLS.format(library=library, nodes=n, pools=p)) for n, p in ((1, 1), (1000, 1), (1, 1000))
        )
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder)
            yield from _on_aws(library, empty, at)
            yield compare(f"synth of one pool, {library}", one, "empty app", empty, aim="<= 1.15x", folder=at)
            yield compare(f"synth of 1,000 nodes, {library}", nodes, "one node", one, aim="<= 2x", folder=at)
            yield compare(f"synth of 1,000 pools, {library}", pools, "one pool", one, runs=3, aim="<= 2x", folder=at)


def _on_aws(library: str, empty: list[str], at: Path) -> Iterator[Result]:
    # As its own program says it, but for where it writes.
    stack = f"import os; os.environ['LIBRARY'] = {library!r}\n{(ROOT / 'stacks' / 'aws-mig' / 'main.py').read_text()}"
    yield compare(f"synth of stacks/aws-mig, {library}", python(stack), "empty app", empty, aim="<= 1.15x", folder=at)
    many = python(AWS.format(library=library, pools=100, accelerator="H100:8/3g.40gb+2g.20gb+1g.10gb*2"))
    yield compare(f"synth of 100 pools on aws, {library}", many, "empty app", empty, aim="<= 1.5x", folder=at)
    program = bindings.python() if library == "cdktf" else None
    if program is not None:
        one = python(AWS.format(library=library, pools=1, accelerator="H100"))
        typed = [str(program), "-c", bindings.INSTANCE]
        yield compare("synth of one node on aws, cdktf", one, "prebuilt typed bindings", typed, runs=3, folder=at)
