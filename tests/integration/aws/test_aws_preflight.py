"""`skyinfra preflight` from the command line, against the tests' AWS: what it sees beside a fleet that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud
from moto_aws.projects import STACK, Project
from moto_ext.images import IMAGES, image_id

P_QUOTA = "L-417A185B"
VCPUS = 16  # of a p5.4xlarge
POOLS = (
    "sky.ComputePool(name='mig', nodes=2, accelerator='H100/3g.40gb', provider=sky.AWS())",
    "sky.ComputePool(name='spot', nodes=2, spot=True, accelerator='L4', provider=sky.AWS())",
)


def looked(project: Project, *, failed: bool = False) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The lines by pool and check."""
    done = project.try_run("preflight", STACK, "--json")
    assert done.returncode == int(failed), done.stdout + done.stderr
    report = json.loads(done.stdout)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in report["lines"]:
        found.setdefault((line["pool"], line["check"]), []).append(line)
    assert {result: report[result] for result in ("pass", "warn", "fail")} == {
        result: sum(line["result"] == result for line in report["lines"]) for result in ("pass", "warn", "fail")
    }
    return found


def start(cloud: Cloud, kind: str, count: int) -> None:
    """Instances of somebody else."""
    cloud.client("ec2").run_instances(
        ImageId=image_id(IMAGES[0][0]),
        InstanceType=kind,
        MinCount=count,
        MaxCount=count,
        SubnetId=cloud.client("ec2").describe_subnets()["Subnets"][0]["SubnetId"],
    )


# tests/preflight counts the same from recorded answers.
@pytest.mark.slow
@pytest.mark.long
def test_what_is_in_use_is_counted_and_its_own_nodes_are_not(cloud: Cloud, tmp_path: Path) -> None:
    project = Project(tmp_path, cloud)
    project.declare(*POOLS)
    assert {line["result"] for lines in looked(project).values() for line in lines} <= {"pass", "warn"}
    assert not cloud.instances()  # it creates nothing
    project.run("deploy", "--auto-approve", "--no-wait")

    # Room for the fleet as it stands, and for one machine of somebody else.
    start(cloud, "p5.4xlarge", 1)
    cloud.tell(quotas={P_QUOTA: 3 * VCPUS})
    [quota] = looked(project)["mig", "quota"]
    assert quota["result"] == "pass"
    assert f"({P_QUOTA}): 48 vCPUs, 16 in use; p5.4xlarge needs 32" in quota["found"]

    start(cloud, "p5.4xlarge", 1)
    [quota] = looked(project, failed=True)["mig", "quota"]
    assert quota["result"] == "fail" and "48 vCPUs, 32 in use; p5.4xlarge needs 32" in quota["found"]
    assert f"--quota-code {P_QUOTA} --desired-value 64 --region us-east-1" in quota["to_do"]
    # A person sees the same.
    shown = project.try_run("preflight")
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    assert f"mig, quota: {quota['to_do']}" in lines
    assert lines[-1].startswith(f"{STACK}: ") and lines[-1].endswith("1 fail")

    # What may not be asked is a warning, and the rest is looked at.
    denied = {"action": "GetServiceQuota", "code": "AccessDeniedException", "message": "not authorized", "status": 400}
    cloud.tell(refuse=[denied])
    found = looked(project)
    [quota] = found["mig", "quota"]
    assert quota["result"] == "warn" and "may not call servicequotas:GetServiceQuota" in quota["found"]
    assert found["mig", "machine"][0]["result"] == "pass"


@pytest.mark.slow
@pytest.mark.xdist_group("aws")
def test_credentials_that_do_not_serve(cloud: Cloud, tmp_path: Path) -> None:
    project = Project(tmp_path, cloud)
    project.declare(*POOLS)
    expired = "The security token included in the request is expired"
    cloud.tell(refuse=[{"action": "GetCallerIdentity", "code": "ExpiredToken", "message": expired, "status": 403}])
    lines = looked(project, failed=True)
    assert set(lines) == {("mig", "credentials"), ("spot", "credentials")}
    for [line] in lines.values():
        assert line["result"] == "fail" and "have expired: The security token" in line["found"]
        assert "aws sso login" in line["to_do"]
