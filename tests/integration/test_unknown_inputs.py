"""Modules whose inputs are outputs of resources that the same apply makes: planned before anything of them is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import AWS, CASES, GCP, ModuleCase, root
from mock_provider.bed import served

AZURE, NEBIUS, OCI = (next(case for case in CASES if case.name == name) for name in ("azure", "nebius", "oci"))
# As a stack gives it to its modules: never null, which Terraform must know to count what a module makes besides.
NETWORK = '${format("%s", terraform_data.network.output)}'


def begun(begin: str) -> str:
    """An output of which is known how it begins, as `outputs_begin` in the data of a provider has it."""
    return f'{begin}${{trimprefix(terraform_data.network.output, "{begin}")}}'


# What a project makes itself, by module.
UNKNOWN: list[tuple[ModuleCase, dict[str, Any]]] = [
    (AWS, {"vpc_id": NETWORK, "subnet_ids": [NETWORK, NETWORK], "node_count": 2}),
    (AWS, {"subnet_ids": [NETWORK], "security_group_ids": [NETWORK], "node_count": 2}),
    (
        AWS,
        {
            "image": begun("ami-"),
            "ssh_public_key": begun("ssh-"),
            "kms_key_id": NETWORK,
            "iam_instance_profile": NETWORK,
            "permissions_boundary": NETWORK,
        },
    ),
    (AWS, {"subnet_ids": [NETWORK], "spot": True, "node_count": 2, "machine_types": ["g5.xlarge", "g5.2xlarge"]}),
    (GCP, {"subnetwork": NETWORK, "service_account": NETWORK, "allow_cidrs": [NETWORK], "node_count": 2}),
    (GCP, {"service_account": NETWORK, "node_count": 2, "min_nodes": 0, "buckets": [{"bucket": "my-bucket"}]}),
    (AZURE, {"resource_group": NETWORK, "image": NETWORK, "allow_cidrs": [NETWORK]}),
    (NEBIUS, {"subnet_id": NETWORK, "project_id": NETWORK, "allow_cidrs": [NETWORK]}),
    (OCI, {"image": NETWORK, "compartment_id": NETWORK}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "inputs"), UNKNOWN, ids=lambda each: getattr(each, "name", None) or "-".join(each))
def test_a_plan_before_anything_is_known(tmp_path: Path, case: ModuleCase, inputs: dict[str, Any]) -> None:
    document = json.loads(root(case, **inputs))
    document["resource"] = {"terraform_data": {"network": {"input": "${uuid()}"}}}
    with served(tmp_path, *case.mock) as bed:
        case.answers(bed.world)
        bed.write(json.dumps(document), "main.tf.json")
        bed.run("init", "-no-color", "-input=false")
        changes = bed.changes()
    assert changes["terraform_data.network"] == "create"
    assert any(address.startswith("module.train.") for address in changes)
