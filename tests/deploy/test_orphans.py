"""Orphaned states: their machines and cost, and the configuration that destroys them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from terraform_projects import synthesized

import skyinfra as sky
from skyinfra.deploy.cost import running_cost
from skyinfra.deploy.orphans import find_orphans, restore, stack_to_destroy
from skyinfra.terraform.project import Project
from skyinfra.terraform.state import read_state

PROVIDER = 'provider["registry.terraform.io/hashicorp/aws"].us-east-1_research'


def resource(type: str, *instances: dict[str, Any], provider: str = PROVIDER, mode: str = "managed") -> dict[str, Any]:
    return {
        "module": "module.train",
        "mode": mode,
        "type": type,
        "name": "this",
        "provider": provider,
        "instances": [{"attributes": each} for each in instances],
    }


def instance(type: str, **more: object) -> dict[str, Any]:
    return {"arn": "arn:aws:ec2:us-east-1:123456789012:instance/i-1", "instance_type": type, **more}


GROUP = {
    "arn": "arn:aws:autoscaling:eu-west-1:123456789012:autoScalingGroup:1:autoScalingGroupName/a",
    "desired_capacity": 4,
    "mixed_instances_policy": [
        {
            "instances_distribution": [{"on_demand_percentage_above_base_capacity": 0}],
            "launch_template": [{"override": [{"instance_type": "g5.xlarge"}, {"instance_type": "g5.2xlarge"}]}],
        }
    ],
}


def state(*resources: dict[str, Any]) -> str:
    return json.dumps({"version": 4, "resources": resources})


def test_the_cost_of_the_machines_of_a_state() -> None:
    text = state(
        resource("aws_instance", instance("p4d.24xlarge"), instance("p4d.24xlarge"), instance("m6i.large")),
        resource("aws_autoscaling_group", GROUP),
        resource("aws_eip", {}),
        resource("aws_instance", instance("p5.48xlarge"), mode="data"),
    )
    resources = read_state(text, source="s")
    assert len(resources) == 5
    cost = running_cost(resources)
    (p4d,), (m6i,), (g5,) = (
        [m for m in cost.machines if m.machine_type == name] for name in ("p4d.24xlarge", "m6i.large", "g5.xlarge")
    )
    assert (p4d.count, p4d.region, p4d.spot) == (2, "us-east-1", False)
    assert (g5.count, g5.region, g5.spot) == (4, "eu-west-1", True)
    assert p4d.price is not None and m6i.price is not None
    spot = g5.price.usd_per_hour if g5.price else 0.0
    assert cost.usd_per_hour == pytest.approx(2 * p4d.price.usd_per_hour + m6i.price.usd_per_hour + 4 * spot)
    assert str(cost).startswith(
        "2 p4d.24xlarge in us-east-1, 1 m6i.large in us-east-1, 4 g5.xlarge spot in eu-west-1, "
    )


def test_the_cost_of_a_group_of_google_cloud() -> None:
    head = {"machine_type": "e2-standard-2", "zone": "us-central1-a", "scheduling": [{"preemptible": False}]}
    template = {"machine_type": "a2-highgpu-8g", "scheduling": [{"preemptible": True}]}
    text = state(
        resource("google_compute_region_instance_group_manager", {"region": "us-central1", "target_size": 4}),
        resource("google_compute_instance_template", template),
        resource("google_compute_instance", head),
    )
    cost = running_cost(read_state(text, source="s"))
    group, alone = cost.machines
    assert (group.machine_type, group.region, group.spot, group.count) == ("a2-highgpu-8g", "us-central1", True, 4)
    assert group.price is not None and alone.price is not None
    assert cost.usd_per_hour == pytest.approx(4 * group.price.usd_per_hour + alone.price.usd_per_hour)
    assert str(cost).startswith("4 a2-highgpu-8g spot in us-central1, 1 e2-standard-2 in us-central1-a, $")


def test_a_machine_whose_price_is_not_known() -> None:
    cost = running_cost(read_state(state(resource("aws_instance", instance("x9.huge"))), source="s"))
    assert str(cost) == "1 x9.huge in us-east-1, the price of x9.huge is not known"
    assert cost.to_json()["usd_per_hour"] == 0 and cost.unknown == ("x9.huge",)


def project(folder: Path) -> Project:
    synthesized.synthesized(folder, sky.ComputePool(name="cpu", provider=sky.Local()), name="new")
    return Project.find(folder)


def test_the_configuration_that_destroys_is_made_from_the_state(tmp_path: Path) -> None:
    here = project(tmp_path)
    text = state(resource("aws_instance", instance("p4d.24xlarge")), resource("aws_eip", {}))
    (tmp_path / "terraform.old.tfstate").write_text(text)
    (orphan,) = find_orphans(here, here.stacks())
    assert (orphan.stack.name, orphan.where, orphan.command) == (
        "old",
        "terraform.old.tfstate",
        "skyinfra destroy old",
    )
    stack = restore(orphan)
    document = json.loads((stack.folder / "cdk.tf.json").read_text())
    assert document["provider"] == {
        "aws": [{"alias": "us-east-1_research", "region": "us-east-1", "profile": "research", "max_retries": 8}]
    }
    assert document["terraform"]["required_providers"]["aws"]["source"] == "registry.terraform.io/hashicorp/aws"
    assert stack.state_file is not None and stack.state_file.samefile(tmp_path / "terraform.old.tfstate")
    assert "module" not in document


def test_the_configuration_of_providers_with_settings_of_their_own(tmp_path: Path) -> None:
    here = project(tmp_path)
    provider = 'provider["registry.terraform.io/hashicorp/azurerm"].this'
    machine = "azurerm_linux_virtual_machine"
    text = state(resource(machine, {}, provider=provider), resource("azurerm_public_ip", {}, provider=provider))
    (tmp_path / "terraform.old.tfstate").write_text(text)
    (orphan,) = find_orphans(here, here.stacks())
    document = json.loads((restore(orphan).folder / "cdk.tf.json").read_text())
    features = {"persist_id_on_create_before_polling_for_completion": True}
    assert document["provider"] == {"azurerm": [{"alias": "this", "features": features}]}


def test_nodes_that_a_program_ends_get_the_module_that_has_it(tmp_path: Path) -> None:
    here = project(tmp_path)
    built_in = 'provider["terraform.io/builtin/terraform"]'
    made = {
        "cpu": ("secret", "node"),
        "boxes": ("engine", "state"),
        "gpu__container-lab": ("engine", "node"),
        "lab.module.hosts": ("fleet", "node"),
        "cloud": ("secret", "versions"),
    }
    entries = [
        {**resource("terraform_data", {}, provider=built_in), "module": f"module.{pool}", "name": name}
        for pool, names in made.items()
        for name in names
    ]
    (tmp_path / "terraform.old.tfstate").write_text(state(*entries))
    (orphan,) = find_orphans(here, here.stacks())
    folder = restore(orphan).folder
    modules = json.loads((folder / "cdk.tf.json").read_text())["module"]
    assert {call: (module["source"], module["name"]) for call, module in modules.items()} == {
        "cpu": ("./local", "cpu"),
        "boxes": ("./container", "boxes"),
        "gpu__container-lab": ("./container", "gpu"),
        "lab": ("./ssh", "lab"),
    }
    assert (folder / "local" / "node.sh").is_file() and (folder / "container" / "node.sh").is_file()
    assert (folder / "core" / "main.tf").is_file()


@pytest.mark.parametrize("text", ["{", '{"version": 3}', '{"encrypted_data": "x"}'])
def test_a_state_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    here = project(tmp_path)
    (tmp_path / "terraform.old.tfstate").write_text(text)
    (orphan,) = find_orphans(here, here.stacks())
    assert orphan.problem is not None and "is no Terraform state" in orphan.problem


def test_an_empty_state_and_one_that_a_stack_declares_are_no_orphans(tmp_path: Path) -> None:
    here = project(tmp_path)
    (tmp_path / "terraform.old.tfstate").write_text(state())
    (tmp_path / "terraform.older.tfstate").write_text("")
    (declared,) = here.stacks()
    (tmp_path / "terraform.moved.tfstate").write_text(state(resource("aws_eip", {})))
    file = declared.folder / "cdk.tf.json"
    document = json.loads(file.read_text())
    document.setdefault("terraform", {})["backend"] = {"local": {"path": "../../../terraform.moved.tfstate"}}
    file.write_text(json.dumps(document))
    assert find_orphans(here, here.stacks()) == ()
    with pytest.raises(sky.StackNotFound, match="Its stacks: new"):
        stack_to_destroy(here, "old")
    assert stack_to_destroy(here, "new").name == stack_to_destroy(here, None).name == "new"
