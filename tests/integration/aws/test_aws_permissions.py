"""`skyinfra iam`: the policy is what plan, deploy and destroy ask of AWS; what it has besides has a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud
from moto_aws.fleet_pools import KEY
from moto_aws.projects import Project
from moto_aws.recorded import recording

from skyinfra.preflight.aws import ACTIONS
from skyinfra.providers.aws_fields import permissions

PLAIN = 'sky.ComputePool(name="plain", {more}provider=sky.AWS(zones=["us-east-1b"], instance_types=["m7i.large"]))'
MORE = (
    'sky.ComputePool(name="one", {more}spot=True, '
    'provider=sky.AWS(zones=["us-east-1b"], instance_types=["m7i.large"]))',
    'sky.ComputePool(name="spot", {more}nodes=2, spot=True, accelerator="L4", '
    f"provider=sky.AWS(zones=['us-east-1b'], ssh_public_key={KEY!r}, allow_cidrs=['203.0.113.7/32']))",
    'sky.ComputePool(name="efa", nodes=2, accelerator="A100-40GB:8", provider=sky.AWS(zones=["us-east-1b"], efa=True))',
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("pools", [(PLAIN,), (PLAIN, *MORE)], ids=["plain", "all"])
def test_the_policy_is_what_is_asked_of_aws(cloud: Cloud, tmp_path: Path, pools: tuple[str, ...]) -> None:
    project = Project(tmp_path, cloud)
    with recording(cloud) as asked:
        for change in ("", 'labels={"team": "ml"}, '):
            project.declare(*(pool.format(more=change) for pool in pools))
            project.run("plan")
            project.run("deploy", "--auto-approve", "--no-wait")
        project.run("destroy", "--auto-approve")
    statements = json.loads(project.run("iam"))["Statement"]
    fleet = [each for each in statements if each["Sid"] != "Preflight"]
    allowed = {action for each in fleet for action in each["Action"]}
    for_a_reason = {action for row in permissions()["not_called"] for action in row["actions"]}
    assert sorted(asked - allowed) == []
    assert sorted(allowed - asked - for_a_reason) == []
    assert set(ACTIONS) <= allowed | set(_statement(statements, "Preflight")["Action"])
    # Of IAM and S3 nothing but what is the pools' own.
    for each in statements:
        if any(action.startswith(("s3:", "iam:")) for action in each["Action"]) and each["Sid"] != "Preflight":
            assert all(":role/aws-service-role/" in to or "skyinfra-" in to for to in each["Resource"]), each


def _statement(statements: list[dict[str, Any]], sid: str) -> dict[str, Any]:
    (found,) = [each for each in statements if each["Sid"] == sid]
    return found
