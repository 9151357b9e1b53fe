"""Synth: one pool against an empty app of the same library; 1,000 nodes and 1,000 pools against one."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Result, compare, python

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
            yield compare(f"synth of one pool, {library}", one, "empty app", empty, aim="<= 1.15x", folder=at)
            yield compare(f"synth of 1,000 nodes, {library}", nodes, "one node", one, aim="<= 2x", folder=at)
            yield compare(f"synth of 1,000 pools, {library}", pools, "one pool", one, runs=3, aim="<= 2x", folder=at)
