"""A fleet that the module of 0.1.0 made, planned and applied with this one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud, tags
from moto_aws.roots import Root, plan_changes
from support import ROOT, missing, unpack

# What stands is changed in place: test_aws_changes shows it with this version alone.
pytestmark = [pytest.mark.slow, pytest.mark.long]

# The last commit whose module had the secret and the versions in the user data.
BEFORE = "e6ec70775fbe"
OLD_DATA = """#cloud-config
write_files:
  - path: /etc/skyinfra/secret
    content: "@SKYINFRA_SECRET@"
  - path: /etc/skyinfra/runner
    content: "@SKYINFRA_RUNNER@"
"""


def module_before(folder: Path) -> Path:
    """The module as it was, from the history of this repository."""
    made = subprocess.run(["git", "archive", BEFORE, "modules/aws"], cwd=ROOT, capture_output=True, check=False)
    if made.returncode != 0:
        missing(f"the commit {BEFORE}, in the history of the repository,")
    unpack(made.stdout, folder)
    return folder / "modules" / "aws"


def pools(cloud: Cloud, **more: Any) -> dict[str, dict[str, Any]]:
    """Two instances, and a group of two nodes, in the account's own network."""
    subnets = cloud.client("ec2").describe_subnets()["Subnets"]
    first = sorted(subnets, key=lambda subnet: subnet["AvailabilityZone"])[:2]
    common = {"subnet_ids": [each["SubnetId"] for each in first], "node_count": 2, "runner_file": "./old.whl", **more}
    return {
        "pair": {**common, "machine_types": ["g5.xlarge"]},
        "group": {**common, "machine_types": ["g6.xlarge", "g5.xlarge"]},
    }


def test_the_first_apply_of_this_version_replaces_no_node(root: Root, cloud: Cloud, tmp_path: Path) -> None:
    old = {"user_data_head": OLD_DATA, "user_data_worker": OLD_DATA, "user_data_revision": "of-0.1.0"}
    declared = pools(cloud, **old, versions=None)
    before = module_before(tmp_path)
    root.write(declared, source=str(before))
    (root.folder / "old.whl").write_bytes(b"old")
    root.init()
    root.apply()
    running = {tags(each)["Name"] + each["InstanceId"]: each["LaunchTime"] for each in cloud.instances()}
    wheels = {pool: _runner(cloud, pool) for pool in declared}

    # Another revision of the same declaration, another runner, other user data: all of this version.
    (root.folder / "new.whl").write_bytes(b"new")
    now = pools(cloud, user_data_revision="of-now", runner_file="./new.whl")
    root.write(now)
    root.run("init", "-no-color", "-input=false")
    found = plan_changes(root.plan())
    machines = ("aws_instance.", "aws_autoscaling_group.", "aws_launch_template.", "aws_network_interface.", "aws_eip.")
    touched = {address: action for address, action in found.items() if any(kind in address for kind in machines)}
    assert set(touched.values()) <= {"update"}, touched
    assert set(found.values()) <= {"create", "update", "destroy"}
    # A head that stands has its volume attached, and uses it when it is replaced.
    assert {found[f"module.{pool}.aws_volume_attachment.head"] for pool in declared} == {"create"}
    assert {address.partition(".terraform_data.")[2] for address, action in found.items() if action == "destroy"} == {
        'identity["head"]',
        'identity["worker"]',
    }
    root.apply()
    assert {tags(each)["Name"] + each["InstanceId"]: each["LaunchTime"] for each in cloud.instances()} == running
    assert plan_changes(root.plan()) == {}
    for pool, address in wheels.items():
        # The launch template of the group still names it.
        assert cloud.carried(address) == b"old", pool

    # From then on what is declared counts again, and what is made anew is of this version, with the runner it had.
    now["pair"]["user_data_revision"] = "of-another-declaration"
    root.write(now)
    replaced = {address for address, action in plan_changes(root.plan()).items() if action == "replace"}
    assert replaced >= {"module.pair.aws_instance.head", 'module.pair.aws_instance.worker["pair-1"]'}
    assert not any(address.startswith("module.group") for address in replaced)
    secret = root.manifest("pair")["secret"]
    assert secret in cloud.shown()
    root.apply()
    assert secret not in cloud.shown()
    bucket = wheels["pair"].rpartition("/")[0]
    assert cloud.carried(f"{bucket}/secret") == secret.encode()
    assert b'"name":"old.whl"' in cloud.carried(f"{bucket}/versions.json")
    root.destroy()


def _runner(cloud: Cloud, pool: str) -> str:
    """The address of the runner in the user data of the head of *pool*."""
    head = next(each for each in cloud.instances(pool) if tags(each)["skyinfra:role"] == "head")
    return cloud.user_data(head["InstanceId"]).rpartition('content: "')[2].rstrip('"\n')
