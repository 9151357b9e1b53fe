"""A stack with other constructs, in both libraries: their outputs as values, their names and providers left alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import first_fast
from terraform_projects.cdk import read, synth

import skyinfra as sky
from skyinfra.terraform.program import Terraform

LIBRARIES = ("cdktf", "cdktn")
TEXT, LIST, NUMBER = "${TfToken[TOKEN.0]}", ["#{TfToken[TOKEN.1]}"], -1.8881545897087505e289

# The provider of aws as the prebuilt packages have it, and a module of somebody else.
OTHERS = """
import {library} as lib

class AwsProvider(lib.TerraformProvider):
    def __init__(self, scope, id, *, alias=None, version=None, **config):
        self._alias, self._config = alias, config
        made = {{"provider_name": "aws", "provider_version": version}} if version else None
        super().__init__(scope, id, terraform_resource_type="aws", terraform_provider_source="aws",
                         terraform_generator_metadata=made)

    @property
    def alias(self):
        return self._alias

    def _synthesize_attributes(self):
        return self._config | ({{"alias": self._alias}} if self._alias else {{}})

def module(scope, name, **variables):
    return lib.TerraformHclModule(scope, name, source="terraform-aws-modules/vpc/aws", version="5.21.0",
                                  variables=variables)
"""


def made(folder: Path, library: str, program: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return synth(folder, OTHERS.format(library=library) + program, library, check=check)


POOLS = """
pools = lambda vpc: [
    sky.ComputePool(name="cloud", nodes=2, provider=sky.AWS(
        vpc_id=vpc.get_string("vpc_id"), subnet_ids=[vpc.get_string("one"), "subnet-2"],
        security_group_ids=vpc.get_list("groups"), ami=vpc.get_string("ami"), kms_key_id=vpc.get_string("key"),
        iam_instance_profile=vpc.get_string("profile"), permissions_boundary=vpc.get_string("boundary"))),
    sky.ComputePool(name="mine", nodes=2, provider=sky.SSH(hosts=[
        vpc.get_string("ip"), sky.Host(vpc.get_string("other"), user="ubuntu", name="gpu")])),
]
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_outputs_of_another_stack_reach_the_module(tmp_path: Path, library: str) -> None:
    made(
        tmp_path,
        library,
        POOLS + "vpc = module(lib.TerraformStack(app, 'net'), 'vpc')\n"
        "sky.FleetStack(app, 'f', pools=pools(vpc))\napp.synth()",
    )
    document = read(tmp_path, "f")
    [(name, state)] = document["data"]["terraform_remote_state"].items()
    assert state["config"]["path"].endswith("terraform.net.tfstate")
    cloud, given = document["module"]["cloud"], document["locals"]
    fields = {"vpc_id": "vpc_id", "image": "ami", "kms_key_id": "key", "iam_instance_profile": "profile"}
    read_there = rf"data\.terraform_remote_state\.{re.escape(name)}\.outputs\.[\w-]+vpc"
    for field, output in (fields | {"permissions_boundary": "boundary", "security_group_ids": "groups"}).items():
        assert cloud[field] == f"${{local.cloud_{field}}}"
        assert re.search(rf"{read_there}{output}\b", given[f"cloud_{field}"]), given
    assert given["cloud_image"].startswith("ami-${trimprefix(")
    first, second = given["cloud_subnet_ids"]
    assert re.search(rf"{read_there}one\b", first) and second == "subnet-2"
    assert [(host["name"], host["address"][:2]) for host in given["mine_hosts"]] == [("0", "${"), ("gpu", "${")]
    assert "TfToken" not in str(document)
    assert read(tmp_path, "net")["output"]


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_fleet_on_machines_that_another_construct_makes(tmp_path: Path, library: str, terraform_program: str) -> None:
    """A plan with a real Terraform, before the machines, and so their addresses, are there."""
    made(
        tmp_path,
        library,
        """
rack = lib.TerraformStack(app, "rack")
box = lib.TerraformResource(rack, "box", terraform_resource_type="terraform_data")
box.add_override("input", "10.0.0.7")
lib.LocalBackend(rack, path="../../../terraform.rack.tfstate")
hosts = [sky.Host(box.get_string_attribute("output"), user="ubuntu"), "gpu2"]
sky.FleetStack(app, "f", pools=[sky.ComputePool(name="mine", nodes=2, provider=sky.SSH(hosts=hosts))])
app.synth()
""",
    )
    for stack in ("rack", "f"):
        terraform = Terraform(tmp_path / "cdktf.out" / "stacks" / stack)
        terraform.prepare()
        with terraform.planned(lambda event: None) as plan:
            if stack == "rack":
                terraform.apply_plan(plan, lambda event: None)
                continue
            assert ("create", 'module.mine.module.hosts.terraform_data.node["mine-0"]') in plan.changes
            assert ("create", 'module.mine.module.hosts.terraform_data.worker["mine-gpu2"]') in plan.changes


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_machines_of_the_same_stack_whose_addresses_are_not_known_yet(
    tmp_path: Path, library: str, terraform_program: str
) -> None:
    made(
        tmp_path,
        library,
        """
def pools(stack):
    boxes = [lib.TerraformResource(stack, name, terraform_resource_type="terraform_data") for name in ("a", "b")]
    for box in boxes:
        box.add_override("input", "${uuid()}")
    hosts = [sky.Host(box.get_string_attribute("output"), user="ubuntu") for box in boxes]
    return [sky.ComputePool(name="mine", nodes=2, provider=sky.SSH(hosts=hosts))]

sky.FleetStack(app, "f", pools=pools)
app.synth()
""",
    )
    terraform = Terraform(tmp_path / "cdktf.out" / "stacks" / "f")
    terraform.prepare()
    with terraform.planned(lambda event: None) as plan:
        created = {address for action, address in plan.changes if action == "create"}
    assert {"terraform_data.a", 'module.mine.module.hosts.terraform_data.worker["mine-1"]'} <= created


@pytest.mark.parametrize(
    ("declare", "field"),
    [
        (lambda: sky.AWS(region=TEXT), "AWS.region"),
        (lambda: sky.AWS(profile=TEXT), "AWS.profile"),
        (lambda: sky.AWS(zones=LIST), "AWS.zones"),
        (lambda: sky.AWS(instance_types=LIST), "AWS.instance_types"),
        (lambda: sky.GCP(project=TEXT), "GCP.project"),
        (lambda: sky.ComputePool(name=TEXT), "ComputePool.name"),
        (lambda: sky.ComputePool(nodes=NUMBER), "ComputePool.nodes"),
        (lambda: sky.ComputePool(labels={"team": TEXT}), "ComputePool.labels"),
        (lambda: sky.Image(env={"BUCKET": f"s3://{TEXT}/data"}), "Image.env"),
        (lambda: sky.Image(pip=[TEXT]), "Image.pip"),
        (lambda: sky.Mount(f"s3://{TEXT}/data", "/data"), "Mount.bucket"),
        (lambda: sky.Mount("s3://my-bucket", TEXT), "Mount.path"),
        (lambda: sky.Host("gpu1", user=TEXT), "Host.user"),
        (lambda: sky.S3(bucket=TEXT, key="k", region="us-east-1"), "S3.bucket"),
    ],
)
def test_an_output_that_is_needed_before_terraform_runs_is_refused(declare: Any, field: str) -> None:
    with pytest.raises(sky.InvalidField, match=r"is an output of another construct, which Terraform") as caught:
        declare()
    assert caught.value.field == field and "TfToken" not in str(caught.value)


def test_values_that_look_alike_are_checked_as_before() -> None:
    with pytest.raises(sky.InvalidField, match=r"AWS\.ami"):
        sky.AWS(ami="${aws_ami.mine.id}")
    assert sky.Image(env={"A": "${HOME}"}).env == {"A": "${HOME}"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_providers_of_the_stack_are_left_as_they_are(tmp_path: Path, library: str) -> None:
    made(
        tmp_path,
        library,
        """
tags = [{"tags": {"team": "ml"}}]
stack = sky.FleetStack(app, "f", pools=[
    sky.ComputePool(name="ours", provider=sky.AWS()),
    sky.ComputePool(name="theirs", provider=sky.AWS(provider="aws.east")),
    sky.ComputePool(name="default", provider=sky.AWS(provider="aws"))])
AwsProvider(stack, "aws", region="us-east-1", default_tags=tags, allowed_account_ids=["1"], version="6.1.0")
AwsProvider(stack, "aws-east", alias="east", assume_role=[{"role_arn": "arn:aws:iam::1:role/a"}])
app.synth()
""",
    )
    document = read(tmp_path, "f")
    blocks = {each.get("alias"): each for each in document["provider"]["aws"]}
    assert set(blocks) == {None, "east", "us-east-1"} and len(document["provider"]["aws"]) == 3
    assert blocks[None]["allowed_account_ids"] == ["1"] and blocks[None]["default_tags"] == [{"tags": {"team": "ml"}}]
    assert blocks["east"]["assume_role"] == [{"role_arn": "arn:aws:iam::1:role/a"}]
    assert document["terraform"]["required_providers"]["aws"]["version"] == "6.1.0"
    used = {name: module["providers"]["aws"] for name, module in document["module"].items()}
    assert used == {"ours": "aws.us-east-1", "theirs": "aws.east", "default": "aws"}


def test_a_provider_is_taken_as_its_construct(tmp_path: Path) -> None:
    made(
        tmp_path,
        "cdktf",
        """
class Mine(sky.FleetStack):
    pass
other = lib.TerraformStack(app, "other")
east = AwsProvider(other, "aws-east", alias="east")
print(sky.AWS(provider=east).provider)
sky.FleetStack(app, "f", pools=[sky.ComputePool(name="theirs", provider=sky.AWS(provider=east))])
app.synth()
""",
    )
    document = read(tmp_path, "f")
    assert document["module"]["theirs"]["providers"] == {"aws": "aws.east"} and "provider" not in document


@pytest.mark.parametrize(
    ("given", "field"),
    [({"provider": "google.east"}, "provider"), ({"provider": "aws", "profile": "a"}, "profile")],
)
def test_a_provider_that_is_not_of_this_cloud_or_is_described_twice(given: dict[str, str], field: str) -> None:
    with pytest.raises(sky.InvalidField) as caught:
        sky.AWS(**given)  # type: ignore[arg-type]
    assert caught.value.field == f"AWS.{field}"


TWICE = [
    ("module(stack, 'train')", "the stack has two of the name train"),
    ("lib.TerraformOutput(stack, 'fleet_train', value='x')", "the stack has two of the name fleet_train"),
    ("AwsProvider(stack, 'aws', alias='us-east-1', region='us-east-1')", "a pool has a provider of that alias"),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("other", "said"), first_fast(TWICE))
def test_a_name_that_is_there_twice_is_refused(tmp_path: Path, library: str, other: str, said: str) -> None:
    declared = "stack = sky.FleetStack(app, 'f', pools=[sky.ComputePool(name='train', provider=sky.AWS())])\n"
    done = made(tmp_path, library, f"{declared}{other}\napp.synth()", check=False)
    assert done.returncode == 1 and said in done.stderr.rsplit("RuntimeError: ", 1)[-1]


POOL = """
def pools(stack):
    return [sky.ComputePool(name="train", provider=sky.AWS(ami=module(stack, "net").get_string("ami")))]
stack = sky.FleetStack(app, "f", pools=pools)
"""
VOLUME = """
disk = sky.Volume(name="data", provider=sky.AWS(zones=["us-east-1a"]), size_gb=10)
stack = sky.FleetStack(app, "f", volumes=[disk])
"""
MERGED = [
    (POOL, "lib.TerraformLocal(stack, '{}', 'mine')", "local", "train_image"),
    (VOLUME, "lib.TerraformResource(stack, '{}', terraform_resource_type='aws_ebs_volume')", "aws_ebs_volume", "data"),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("declared", "other", "kind", "name"), first_fast(MERGED))
def test_a_local_and_a_resource_of_the_stack_are_never_merged(
    tmp_path: Path, library: str, declared: str, other: str, kind: str, name: str
) -> None:
    done = made(tmp_path, library, f"{declared}{other.format(name)}\napp.synth()", check=False)
    assert done.returncode == 1
    assert f"{kind}.{name}: the stack has two of the name {name}" in done.stderr.rsplit("RuntimeError: ", 1)[-1]
    made(tmp_path, library, f"{declared}{other.format('another')}\napp.synth()")
