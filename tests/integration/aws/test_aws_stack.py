"""A declaration in Python, deployed by the command line: the real provider, a moto server, two regions, four pools."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from first_boots.cloud_config import problems, schema
from moto_aws.cloud import REGIONS, Cloud, tags
from moto_aws.projects import Project

from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.providers import read

pytestmark = pytest.mark.slow

POOLS = (
    """sky.ComputePool(
        name="mig", nodes=2, provider=sky.AWS(efa=True), labels={{"team": "research"}},
        accelerator=sky.accelerators.A100(count=8, memory="40GB", mig={layout!r}),
        image=sky.Image(pip=["torch"], env={{"A": "${{x}}"}}))""",
    """sky.ComputePool(name="chips", provider=sky.AWS(), accelerator="Trainium1:16")""",
    f"""sky.ComputePool(name="share", accelerator="L4",
        provider=sky.AWS(instance_types=["g6f.xlarge"], ami={read("aws").image(("g6.xlarge",), None, field="")!r}))""",
    """sky.ComputePool(name="west", nodes=2, spot=True, provider=sky.AWS(region="us-west-2"), accelerator="L4")""",
)
BEFORE, AFTER = {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}, "1g.5gb"


def declare(project: Project, layout: Any) -> None:
    project.declare(*(pool.format(layout=layout) for pool in POOLS))


def configuration(cloud: Cloud, instance: dict[str, Any], region: str = "us-east-1") -> NodeConfig:
    """What the node will be, as its own user data say it."""
    text = cloud.user_data(instance["InstanceId"], region)
    assert problems(text, schema()) == []
    document = yaml.safe_load(text)
    files = {file["path"]: file["content"] for file in document["write_files"]}
    assert "/etc/skyinfra/secret" not in files
    clock, first = json.loads(files["/opt/skyinfra/steps.json"])["steps"][:2]
    # Over a wrong clock nothing can be fetched.
    assert (clock["name"], first["name"]) == ("clock", "secret")
    assert len(cloud.carried(first["arguments"]["url"], region)) == 72
    return NodeConfig.read(json.loads(files["/etc/skyinfra/node.json"]))


def test_deploy_change_the_layout_in_place_destroy(cloud: Cloud, tmp_path: Path) -> None:
    before = cloud.existing()
    project = Project(tmp_path, cloud)
    declare(project, BEFORE)
    project.run("deploy", "--auto-approve", "--no-wait")
    secrets = project.secrets()
    assert len(secrets) == len(set(secrets)) == 4
    _check_nodes(cloud)
    shown = "".join(cloud.shown(region) for region in REGIONS)
    assert shown.count("/secret") >= 4 and not any(secret in shown for secret in secrets)
    assert json.loads(project.run("plan", "--json"))["changes"] == []
    _check_pins(project)

    running = {i["InstanceId"]: i["LaunchTime"] for i in cloud.instances()}
    declare(project, AFTER)
    planned = json.loads(project.run("plan", "--json"))
    assert [change["action"] for change in planned["changes"]] == ["update"]
    project.run("deploy", "--auto-approve", "--no-wait")
    assert {i["InstanceId"]: i["LaunchTime"] for i in cloud.instances()} == running
    assert tags(cloud.instance("mig-0"))["skyinfra:layout"] == "1g.5gb"

    project.run("destroy", "--auto-approve")
    assert cloud.existing() == before
    _check_no_secret(project, secrets)


# test_endings shows the words, from plans; that AWS stops and starts a node is here alone.
@pytest.mark.long
def test_another_machine_type_stops_nodes_and_says_so(cloud: Cloud, tmp_path: Path) -> None:
    project = Project(tmp_path, cloud)
    subnets = [each["SubnetId"] for each in cloud.client("ec2").describe_subnets()["Subnets"]]
    aws = f"sky.AWS(subnet_ids={subnets[1:2]!r}, instance_types=[{{!r}}])"
    pool = f"sky.ComputePool(name='l4', nodes=2, accelerator='L4', provider={aws})"
    project.declare(pool.format("g6.xlarge"))
    project.run("deploy", "--auto-approve", "--no-wait")
    running = {i["InstanceId"] for i in cloud.instances()}

    project.declare(pool.format("g6.2xlarge"))
    said = project.try_run("deploy", "--auto-approve", "--no-wait").stderr
    for node in ("l4-0", "l4-1"):
        why = "is stopped and started, for another machine type: g6.xlarge becomes g6.2xlarge"
        assert f"{node} {why}: what runs there could not be asked" in said, said
    found = cloud.instances()
    assert {i["InstanceId"] for i in found} == running and {i["InstanceType"] for i in found} == {"g6.2xlarge"}
    project.run("destroy", "--auto-approve")


def _check_nodes(cloud: Cloud) -> None:
    head, worker = cloud.instances("mig")
    assert {i["InstanceType"] for i in (head, worker)} == {"p4d.24xlarge"}
    assert tags(head)["skyinfra:layout"] == "3g.20gb+2g.10gb+1g.5gb:2"
    assert tags(head)["team"] == tags(worker)["team"] == "research"
    assert len(cloud.interfaces(worker["InstanceId"])) == 4
    first, second = configuration(cloud, head), configuration(cloud, worker)
    assert (first.node, first.head, second.node, second.head) == ("mig-0", True, "mig-1", False)
    assert second.scheduler == f"{head['PrivateIpAddress']}:8786"
    assert first.accelerator == second.accelerator
    assert first.accelerator is not None and len(first.accelerator.layouts) == 8
    assert (first.pip, first.env) == (("torch",), {"A": "${x}"})
    [chips], [share] = cloud.instances("chips"), cloud.instances("share")
    assert (chips["InstanceType"], share["InstanceType"]) == ("trn1.32xlarge", "g6f.xlarge")
    accelerator = configuration(cloud, share).accelerator
    assert accelerator is not None and (accelerator.count, accelerator.memory_gb) == (1, 3.0)
    west = cloud.instances("west", "us-west-2")
    [alone] = [i for i in west if tags(i).get("skyinfra:role") == "head"]
    assert len(west) == 3 and alone["InstanceType"] == "m6i.large"
    assert configuration(cloud, alone, "us-west-2").scheduler_only
    assert {i["InstanceType"] for i in west if i is not alone} == {"g6.xlarge"}
    assert cloud.instances("west") == []


def _check_pins(project: Project) -> None:
    """The versions of the providers are those of the first deploy, for whoever deploys next."""
    (lock,) = project.folder.glob("terraform.*.lock.hcl")
    pinned = lock.read_text()
    assert 'provider "registry.terraform.io/hashicorp/aws"' in pinned
    lock.write_text(re.sub(r'version( +)= "[^"]+"', r'version\1= "4.67.0"', pinned))
    assert f"{lock.name} pins other versions" in project.refused("plan")
    lock.write_text(pinned)


def _check_no_secret(project: Project, secrets: list[str]) -> None:
    synthesized = [f.read_text(errors="replace") for f in (project.folder / "cdktf.out").rglob("*.json") if f.is_file()]
    for text in (*project.printed, *synthesized):
        for secret in secrets:
            assert secret not in text and secret[:36] not in text
