"""A fleet in a network that its stack makes, with a provider block of the stack's own, and tags: the real provider."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud, tags
from moto_aws.projects import Project
from moto_aws.roots import Root

pytestmark = pytest.mark.slow

PROGRAM = """
import {library} as lib
import skyinfra as sky


class AwsProvider(lib.TerraformProvider):
    def __init__(self, scope, id, alias, **config):
        self._alias, self._config = alias, {{"alias": alias, **config}}
        super().__init__(scope, id, terraform_resource_type="aws", terraform_provider_source="aws")

    @property
    def alias(self):
        return self._alias

    def _synthesize_attributes(self):
        return self._config


def resource(stack, id, kind, **arguments):
    made = lib.TerraformResource(stack, id, terraform_resource_type=kind)
    for key, value in (arguments | {{"provider": "aws.mine"}}).items():
        made.add_override(key, value)
    return made.get_string_attribute("id")


def pools(stack):
    mine = AwsProvider(stack, "mine", "mine", region="us-east-1", default_tags=[{{"tags": {{"owner": "platform"}}}}])
    vpc = resource(stack, "vpc", "aws_vpc", cidr_block="10.0.0.0/16")
    subnets = [
        resource(stack, f"net-{{zone}}", "aws_subnet", vpc_id=vpc, availability_zone=f"us-east-1{{zone}}",
                 cidr_block=f"10.0.{{number}}.0/24")
        for number, zone in enumerate("bc")
    ]
    group = resource(stack, "group", "aws_security_group", vpc_id=vpc, name="mine")
    aws = sky.AWS(provider=mine, vpc_id=vpc, subnet_ids=subnets, security_group_ids=[group])
    return [sky.ComputePool(name="train", nodes=2, accelerator="L4", provider=aws)]


app = lib.App()
sky.FleetStack(app, "fleet", pools=pools)
app.synth()
"""


@pytest.mark.parametrize("library", ["cdktf", "cdktn"])
def test_a_fleet_in_a_network_of_its_stack(cloud: Cloud, tmp_path: Path, library: str) -> None:
    before = cloud.existing()
    project = Project(tmp_path, cloud)
    (tmp_path / "main.py").write_text(PROGRAM.format(library=library))
    planned = json.loads(project.run("plan", "--json"))["changes"]
    created = {each["address"] for each in planned}
    assert {each["action"] for each in planned} == {"create"}
    assert {"aws_vpc.vpc", "module.train.aws_instance.head", 'module.train.aws_instance.worker["train-1"]'} <= created
    assert not any(address.startswith("module.train.aws_vpc") for address in created)
    if library == "cdktn":
        return
    project.run("deploy", "--auto-approve", "--no-wait")
    head, worker = cloud.instances("train")
    assert head["VpcId"] == worker["VpcId"] and tags(head)["owner"] == "platform"
    s3 = cloud.client("s3")
    (bucket,) = (each["Name"] for each in s3.list_buckets()["Buckets"])
    for key in ("secret", "versions.json"):
        assert s3.get_object_tagging(Bucket=bucket, Key=key)["TagSet"] == []
    assert [group["GroupName"] for group in head["SecurityGroups"]] == ["mine"]
    assert json.loads(project.run("plan", "--json"))["changes"] == []
    project.run("destroy", "--auto-approve")
    assert cloud.existing() == before


def _planned_tags(root: Root, labels: dict[str, str], default: dict[str, str]) -> dict[str, dict[str, str]]:
    """The tags that a plan of one pool gives to each resource, as far as they are known."""
    root.write({"train": {"machine_types": ["g6.xlarge"], "labels": labels}})
    main = root.folder / "main.tf.json"
    content: dict[str, Any] = json.loads(main.read_text())
    content["provider"]["aws"][0]["default_tags"] = [{"tags": default}]
    main.write_text(json.dumps(content))
    root.init()
    root.plan("-out=planned")
    plan = json.loads(root.run("show", "-json", "planned").stdout)
    after = {each["address"]: each["change"]["after"] or {} for each in plan["resource_changes"]}
    return {address.removeprefix("module.train."): values.get("tags_all") or {} for address, values in after.items()}


def test_the_keys_of_a_role_differ_by_more_than_case(root: Root) -> None:
    found = _planned_tags(root, {"name": "trainer", "Team": "ml"}, {})
    for address in ("aws_iam_role.this[0]", "aws_iam_instance_profile.this[0]"):
        tagged = found[address]
        assert len({key.lower() for key in tagged}) == len(tagged)
        assert (tagged["Name"], tagged["Team"]) == ("default/train", "ml")
    assert found["aws_instance.head"]["name"] == "trainer"


def test_objects_take_ten_tags_whatever_the_provider_gives(root: Root) -> None:
    found = _planned_tags(root, {}, {f"t{number}": "x" for number in range(12)})
    objects = [given for address, given in found.items() if address.startswith("aws_s3_object.")]
    assert objects == [{}, {}]
    assert found["aws_s3_bucket.runner[0]"]["t11"] == "x"
