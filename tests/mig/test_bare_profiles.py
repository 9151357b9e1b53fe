"""Layouts are compared as what they are: lists of bare profiles know no compute instances, and stay in their places."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools import house

PACKAGE = house.PACKAGE
# The modules that may make a list of the profiles of partitions, and why nothing is lost there.
MAY = {
    "accelerators/drivers.py": "the oldest driver is that of the GPU instances",
    "bootstrap/steps.py": "the oldest driver is that of the GPU instances",
    "terminal/layouts.py": "the nearest combinations are those of GPU instances",
    "desired/__init__.py": "partition modes of AMD GPUs",
    "doctor/vendors.py": "partition modes of AMD GPUs",
    "gpu/exports.py": "the names of MIG devices, those of compute instances among them",
    "gpu/transition.py": "the places of each profile, of which the device is asked",
    "head/workload_layouts.py": "layouts that follow the work have no compute instances",
    "mig/advice.py": "what tasks ask for",
    "mig/drawing.py": "slices and memory of GPU instances",
    "mig/drivers.py": "the oldest driver is that of the GPU instances",
    "mig/follow.py": "layouts that follow the work have no compute instances",
    "mig/gallery.py": "the geometry: the layouts of a page, each with its profiles",
    "mig/layouts.py": "the geometry: combinations of GPU instances",
    "mig/placement.py": "the geometry: places of GPU instances",
    "mig/simulation.py": "layouts that follow the work have no compute instances",
    "mig/steps.py": "the names of one type for another driver's",
    "protocol/nodeconfig.py": "partition modes of AMD GPUs",
    "terminal/names.py": "names of slots",
}


def bare(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "profile"


def lists() -> Iterator[str]:
    """Yields the module of each list of profiles, and of each comparison of two."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp) and bare(node.elt)
            compared = isinstance(node, ast.Compare) and sum(map(bare, [node.left, *node.comparators])) > 1
            if made or compared:
                yield path.relative_to(PACKAGE).as_posix()


def test_profiles_are_listed_in_these_modules_alone() -> None:
    assert set(lists()) == set(MAY)
