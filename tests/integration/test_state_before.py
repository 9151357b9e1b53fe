"""States of the version before: the first plan of this version moves their resources, and does nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cloud_modules.cases import ModuleCase, gcp_answers, of_project
from cloud_modules.states import CASES, declare, place, restore
from mock_provider.bed import Bed, served
from terraform_projects.commands import skyinfra

from skyinfra.deploy.upgrade import Upgrade
from skyinfra.terraform.project import Project

# One of each kind: machines over SSH, Google Cloud, a marketplace, and the one that stands for itself.
EVERYDAY = ("digitalocean", "gcp", "runpod", "ssh")
# Notes of where the pool is, and of the key of its machines; the rule that lets Identity-Aware Proxy through to nodes.
NEW = (
    "module.train.terraform_data.place",
    "module.train.terraform_data.login",
    'module.train.module.google.google_compute_firewall.this["shell"]',
)

PROGRAM = """import skyinfra as sky
from cdktf import App

app = App()
sky.FleetStack(app, "s", pools=[sky.ComputePool(name="p", accelerator="A100-40GB", provider=sky.GCP(project="p"))])
app.synth()
"""


def secret_and_ids(bed: Bed) -> tuple[str, dict[str, str]]:
    fleet = bed.output("fleet")
    return fleet["secret"], {node["name"]: node["id"] for node in fleet["nodes"]}


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=[] if each.name in EVERYDAY else pytest.mark.slow, id=each.name) for each in CASES],
)
def test_a_fleet_of_the_version_before_is_served_as_it_is(case: ModuleCase, tmp_path: Path) -> None:
    with place(case, tmp_path) as bed:
        restore(case, bed)
        before = secret_and_ids(bed)
        declare(bed, case, case.source)
        bed.run("init", "-no-color")
        planned = bed.changes()
        # Nothing but another address in the state, and what is new.
        noted = [planned.pop(at) for at in list(planned) if at in NEW]
        assert set(planned.values()) <= {"move"} and bool(planned) is (case.folder / "moved.tf").exists()
        assert set(noted) <= {"create"}
        assert f'"add":{len(noted)},"change":0' in bed.printed[-1] and '"remove":0' in bed.printed[-1]
        bed.apply()
        assert bed.changes() == {} and secret_and_ids(bed) == before
        # Its nodes then are those that this version changes and ends.
        declare(bed, case, case.source, **case.layout)
        changed = {at.removeprefix("module.train."): what for at, what in bed.changes().items() if what != "update"}
        assert not [at for at in changed if not re.match(case.carriers, at)]
        assert not (tmp_path / "far-end" / "calls").exists()
        assert before[0] not in "".join(bed.printed)


@pytest.mark.slow
def test_the_commands_name_what_a_version_before_has_named_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, "google") as bed:
        gcp_answers(bed.world)
        of_project(bed.world, "p")
        (bed.folder / "main.py").write_text(PROGRAM)
        (bed.folder / "cdktf.json").write_text('{"language": "python", "app": "python main.py", "projectId": "x"}\n')
        skyinfra(bed.folder, "deploy", "--auto-approve", "--no-wait", **bed.environment)
        state = bed.folder / "terraform.s.tfstate"

        def modules() -> set[str]:
            return {each["module"] for each in json.loads(state.read_text())["resources"] if each["mode"] == "managed"}

        def as_before() -> None:
            """Everything in the module of the pool itself."""
            document = json.loads(state.read_text())
            for each in document["resources"]:
                each["module"] = each["module"].partition(".module.")[0]
            document["serial"] += 1
            state.write_text(json.dumps(document))
            assert modules() == {"module.p"}

        as_before()
        planned = skyinfra(bed.folder, "plan", "--json", **bed.environment)
        assert json.loads(planned.stdout)["changes"] == [] and modules() == {"module.p"}
        # A deploy without changes writes the names.
        assert (
            "to update" not in skyinfra(bed.folder, "deploy", "--auto-approve", "--no-wait", **bed.environment).stdout
        )
        assert modules() == {"module.p", "module.p.module.google"}

        # An upgrade plans a part alone, which Terraform refuses before the rest is named.
        as_before()
        monkeypatch.chdir(bed.folder)
        for name, value in bed.environment.items():
            monkeypatch.setenv(name, value)
        stack = Project.find().stack("s")
        Upgrade(stack, stack.fleet("p"), None, [], 0.0, print)._publish()  # type: ignore[arg-type]
        assert modules() == {"module.p", "module.p.module.google"}

        # An address of the version before still says what is meant.
        def versions() -> str:
            [found] = [each for each in stack.resources() if each.address.endswith("terraform_data.versions[0]")]
            return str(found.attributes["id"])

        first = versions()
        again = ("--replace", "module.p.terraform_data.versions[0]")
        skyinfra(bed.folder, "deploy", "--auto-approve", "--no-wait", *again, **bed.environment)
        assert versions() != first
