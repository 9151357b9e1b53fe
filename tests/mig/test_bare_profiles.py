"""Layouts are compared as what they are: lists of bare profiles know no compute instances, and stay in their places."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "packing/problem.py": "what a GPU of an offer may be divided into: kinds, and no partitions that stand",
    "packing/result.py": "what a GPU of an offer may be divided into: kinds, and no partitions that stand",
    "packing/solve.py": "what a GPU of an offer may be divided into: kinds, and no partitions that stand",
    "protocol/nodeconfig.py": "partition modes of AMD GPUs",
    "terminal/names.py": "names of slots",
}


def bare(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "profile"


def made(node: ast.AST) -> bool:
    """Whether it lists or counts profiles, or gives what lists them to `map`, `sorted` and others."""
    match node:
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
            return bare(node.elt)
        case ast.DictComp():
            return bare(node.key) or bare(node.value)
        case ast.Lambda():
            return bare(node.body)
        case ast.Subscript(ctx=ast.Store()):  # counts[each.profile] += 1
            return bare(node.slice)
        case ast.Call(func=ast.Name("attrgetter") | ast.Attribute(attr="attrgetter"), args=[ast.Constant("profile")]):
            return True
    return isinstance(node, ast.Compare) and sum(map(bare, [node.left, *node.comparators])) > 1


def lists(package: Path = PACKAGE) -> Iterator[str]:
    """Yields the module of each list of profiles, and of each comparison of two."""
    for path in package.rglob("*.py"):
        if any(map(made, ast.walk(ast.parse(path.read_text(encoding="utf-8"))))):
            yield path.relative_to(package).as_posix()


@pytest.mark.parametrize(
    "text",
    [
        "[each.profile for each in found]",
        "Counter(each.profile for each in found)",
        "{each.profile: each.start for each in found}",
        "{each.start: each.profile for each in found}",
        "sorted(found, key=lambda each: each.profile)",
        "map(attrgetter('profile'), found)",
        "map(operator.attrgetter('profile'), found)",
        "counts[each.profile] += 1",
        "one.profile == other.profile",
    ],
)
def test_each_way_to_list_them_is_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    assert list(lists(tmp_path)) == ["module.py"]
    (tmp_path / "module.py").write_text(text.replace("profile", "place"))
    assert list(lists(tmp_path)) == []


def test_profiles_are_listed_in_these_modules_alone() -> None:
    assert set(lists()) == set(MAY)
