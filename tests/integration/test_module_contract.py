"""What holds for every module: the life of a fleet, from its first plan to its end."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import BY_THEMSELVES, CASES, ModuleCase, root
from far_end.stand_in import far_end
from mock_provider.bed import Bed, served
from support import ROOT
from terraform_projects.commands import SCRIPTS, processes, until

from skyinfra.offers import load, providers
from skyinfra.protocol.manifest import Manifest

# One of each kind: a bucket, machines over SSH, containers of a marketplace. `make test-all` has them all.
# That of AWS has a test of its own with the real provider.
EVERYDAY = ("digitalocean", "runpod")
# How many machine types a plan holds: one with all of them takes Terraform minutes on a busy machine.
_OF_A_PLAN = 25


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> ModuleCase:
    found: ModuleCase = request.param
    return found


@pytest.fixture
def bed(case: ModuleCase, tmp_path: Path) -> Iterator[Bed]:
    with served(tmp_path, *case.mock) as made, ExitStack() as api:
        made.environment["PATH"] = f"{SCRIPTS}{os.pathsep}{made.environment['PATH']}"
        if case.over_ssh:
            made.environment |= far_end(tmp_path / "far-end", made.environment["PATH"])
        case.answers(made.world)
        if case.api is not None:
            made.environment |= api.enter_context(case.api(made.world))[1]
        yield made


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=[] if each.name in EVERYDAY else pytest.mark.slow, id=each.name) for each in CASES],
)
def test_the_life_of_a_fleet(case: ModuleCase, bed: Bed) -> None:
    def declare(**inputs: Any) -> dict[str, str]:
        """What a plan would do, in the module."""
        bed.write(root(case, **inputs), "main.tf.json")
        return {address.removeprefix("module.train."): action for address, action in bed.changes().items()}

    def replaced(changes: dict[str, str], *allowed: str) -> dict[str, str]:
        """What is more than an update, besides what carries layouts and what is *allowed*."""
        found = {address: action for address, action in changes.items() if action != "update"}
        passed = (case.carriers, *allowed)
        return {address: action for address, action in found.items() if not any(re.match(p, address) for p in passed)}

    def nodes(count: int) -> dict[str, str]:
        """The ids of the nodes of the manifest, which the fleet has; the plan after it is empty."""
        fleet = bed.output("fleet")
        manifest = Manifest.read(fleet)
        assert [node.name for node in manifest.nodes] == [f"train-{index}" for index in range(count)]
        assert bed.changes() == {}
        secrets.add(fleet["secret"])
        return {node["name"]: node["id"] for node in fleet["nodes"]}

    secrets: set[str] = set()
    bed.write(root(case, node_count=2), "main.tf.json")
    bed.run("init", "-no-color")
    bed.run("validate", "-no-color")
    assert set(declare(node_count=2).values()) == {"create"}
    bed.apply()
    two = nodes(2)

    changed = declare(node_count=2, **case.layout)
    assert bool(changed) is case.layouts and replaced(changed) == {}
    bed.apply()
    assert nodes(2) == two

    # Names that are made otherwise, as a later version may, are for what is made later.
    assert not case.over_ssh or replaced(declare(node_count=2, **case.layout, stack="renamed")) == {}

    grown = declare(node_count=3, **case.layout)
    assert set(replaced(grown).values()) <= {"create"} and any(re.match(case.nodes, each) for each in replaced(grown))
    bed.apply()
    three = nodes(3)
    assert three.items() > two.items()

    shrunk = declare(node_count=1, **case.layout)
    assert set(replaced(shrunk).values()) <= {"delete"} and any(re.match(case.nodes, each) for each in replaced(shrunk))
    bed.apply()
    assert nodes(1).items() < two.items()

    bed.destroy()
    assert bed.world.existing() == {} and not (bed.folder / ".skyinfra").exists()
    until(lambda: not processes(bed.folder))
    assert len(secrets) == 1 and len(min(secrets)) >= 32
    assert not any(secret in printed for secret in secrets for printed in bed.printed)


@pytest.mark.slow
@pytest.mark.parametrize("case", [each for each in CASES if each.name in providers()], ids=lambda case: case.name)
def test_every_machine_type_of_its_offers_is_accepted(case: ModuleCase, bed: Bed) -> None:
    its = [offer for offer in load() if offer.provider == case.name and re.match(case.types, offer.machine_type)]
    types = sorted({offer.machine_type for offer in its})
    assert types
    declared = json.loads(root(case))
    [module] = declared["module"].values()
    del declared["output"]
    for start in range(0, len(types), _OF_A_PLAN):
        some = types[start : start + _OF_A_PLAN]
        declared["module"] = {f"m{number}": {**module, "machine_types": [kind]} for number, kind in enumerate(some)}
        bed.write(json.dumps(declared, indent=1), "main.tf.json")
        bed.run("init", "-no-color")
        assert set(bed.changes().values()) == {"create"}


def test_what_its_readme_and_examples_show_is_valid(case: ModuleCase, bed: Bed) -> None:
    module = bed.folder.parent / "modules" / case.name
    shutil.copytree(case.folder.parent, module.parent, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    readme = (case.folder / "README.md").read_text()
    shown = [each for each in re.findall(r"```hcl\n(.*?)```", readme, re.DOTALL) if f"./modules/{case.name}" in each]
    assert shown
    folders = [module / "examples" / path.name for path in case.examples]
    for number, text in enumerate(shown):
        folders.append(bed.folder.parent / f"shown-{number}")
        folders[-1].mkdir()
        for name in re.findall(r'file\("([^"/]+)"\)', text):
            (folders[-1] / name).write_text("#cloud-config\n")
        (folders[-1] / "main.tf").write_text(text.replace(f"./modules/{case.name}", f"{module.parent}//{module.name}"))
    for folder in folders:
        bed.folder = folder
        bed.run("init", "-no-color")
        bed.run("validate", "-no-color")


def test_every_module_is_a_case() -> None:
    assert all((ROOT / file).is_file() for file in BY_THEMSELVES.values())
    assert {*BY_THEMSELVES, *(each.name for each in CASES)} == {
        path.parent.name for path in (ROOT / "modules").glob("*/README.md")
    }
