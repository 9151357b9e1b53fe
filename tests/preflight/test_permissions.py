"""The IAM policy of a stack: what it allows, and on which resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyinfra.errors import NotSupported
from skyinfra.preflight.aws import ACTIONS
from skyinfra.preflight.permissions import policy
from skyinfra.terraform.synthesized import SynthesizedStack

POOL: dict[str, Any] = {"machine_types": ["g6.xlarge"], "node_count": 1, "spot": False, "image": "ami-1"}
KEY = "arn:aws:kms:us-east-1:123456789012:key/6d2b1ad7"


def document(region: str = "us-east-1", backend: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    """The policy's statements of a stack with one pool, by their Sid."""
    module = {**POOL, **inputs, "providers": {"aws": "aws.it"}}
    pool = {"name": "train", "provider": "aws"}
    providers = {"aws": [{"alias": "it", "region": region}]}
    stack = SynthesizedStack("fleet", Path(), (pool,), {"train": module}, providers, {"s3": backend} if backend else {})
    return {each["Sid"]: each for each in policy(stack)["Statement"]}


def actions(found: dict[str, Any]) -> set[str]:
    return {action for sid, each in found.items() if sid != "Preflight" for action in each["Action"]}


@pytest.mark.parametrize(
    ("inputs", "action"),
    [
        ({"subnet_ids": []}, "ec2:CreateVpc"),
        ({"spot": True}, "ec2:CancelSpotInstanceRequests"),
        ({"machine_types": ["g6.xlarge", "g5.xlarge"]}, "autoscaling:CreateAutoScalingGroup"),
        ({"group": True}, "autoscaling:CreateAutoScalingGroup"),
        ({"ssh_public_key": "ssh-rsa AAAA"}, "ec2:ImportKeyPair"),
        ({"placement_group": True}, "ec2:CreatePlacementGroup"),
        ({"head_public_ip": True}, "ec2:AllocateAddress"),
        ({"versions": {"python": "3.12", "requirements": []}}, "s3:CreateBucket"),
        ({"image": "/aws/service/x"}, "ssm:GetParameter"),
        ({"kms_key_id": KEY}, "kms:CreateGrant"),
        ({"iam_instance_profile": None}, "iam:CreateRole"),
        ({"security_group_ids": []}, "ec2:CreateSecurityGroup"),
    ],
)
def test_what_a_pool_does_not_have_is_not_allowed(inputs: dict[str, Any], action: str) -> None:
    bare = {"subnet_ids": ["subnet-1"], "security_group_ids": ["sg-1"], "iam_instance_profile": "mine"}
    assert action not in actions(document(**bare))
    assert action in actions(document(**{**bare, **inputs}))


def test_the_statements_name_what_is_the_pool_s_own() -> None:
    found = document(region="eu-west-1", versions={"python": "3.12"}, kms_key_id=KEY, iam_path="/fleets/")
    assert found["Fleet"]["Condition"] == {"StringEquals": {"aws:RequestedRegion": ["eu-west-1"]}}
    assert found["Role"]["Resource"] == [
        "arn:aws:iam::*:role/fleets/skyinfra-train-*",
        "arn:aws:iam::*:instance-profile/fleets/skyinfra-train-*",
    ]
    assert found["Pass"]["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
    assert found["Bucket"]["Resource"] == ["arn:aws:s3:::skyinfra-train-*", "arn:aws:s3:::skyinfra-train-*/*"]
    assert found["Key"]["Resource"] == [KEY]
    assert "Linked" not in found
    assert set(ACTIONS) <= set(found["Fleet"]["Action"]) | set(found["Preflight"]["Action"])


def test_buckets_that_nodes_mount_are_listed_by_preflight() -> None:
    mounted = [{"bucket": "data", "prefix": prefix, "write": False} for prefix in ("a", "b")]
    found = document(buckets=mounted)
    assert (found["Mounted"]["Action"], found["Mounted"]["Resource"]) == (["s3:ListBucket"], ["arn:aws:s3:::data"])
    assert "Mounted" not in document()


def test_pools_that_may_do_the_same_share_a_statement() -> None:
    names, module = ("a", "b"), {**POOL, "versions": {}, "providers": {"aws": "aws.it"}}
    providers = {"aws": [{"alias": "it", "region": "us-east-1"}]}
    pools = tuple({"name": name, "provider": "aws"} for name in (*names, "c"))
    given = {**module, "iam_instance_profile": "mine"}
    stack = SynthesizedStack("fleet", Path(), pools, {**dict.fromkeys(names, module), "c": given}, providers)
    found = {each["Sid"]: each for each in policy(stack)["Statement"]}
    assert found["Role"]["Resource"][::2] == ["arn:aws:iam::*:role/skyinfra-a-*", "arn:aws:iam::*:role/skyinfra-b-*"]
    assert found["Role2"]["Action"] == ["iam:GetInstanceProfile"]


def test_other_partitions() -> None:
    found = document(region="cn-north-1", versions={"python": "3.12"})
    assert found["Pass"]["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com.cn"}}
    assert found["Bucket"]["Resource"][0] == "arn:aws-cn:s3:::skyinfra-train-*"
    known = {"us-gov-west-1": "aws-us-gov", "eusc-de-east-1": "aws-eusc", "us-iso-east-1": "aws-iso"}
    for region, name in {**known, "us-isob-east-1": "aws-iso-b", "us-east-1": "aws"}.items():
        found = document(region=region, versions={"python": "3.12"})
        assert found["Bucket"]["Resource"][0] == f"arn:{name}:s3:::skyinfra-train-*"


def test_a_state_in_s3() -> None:
    found = document(backend={"bucket": "states", "key": "fleets/here", "kms_key_id": KEY})
    assert found["State"]["Resource"] == ["arn:aws:s3:::states/fleets/here", "arn:aws:s3:::states/fleets/here.tflock"]
    assert found["Jobs"]["Resource"] == "arn:aws:s3:::states/fleets/here/jobs/*"
    assert found["Jobs"]["Action"] == ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
    assert found["StateKey"]["Resource"] == KEY
    assert "StateLock" not in found and "StateRole" not in found
    role = "arn:aws:iam::123456789012:role/states"
    further = {"dynamodb_table": "locks", "assume_role": {"role_arn": role}}
    found = document(backend={"bucket": "states", "key": "fleets/here", **further})
    assert found["StateLock"]["Resource"] == "arn:aws:dynamodb:*:*:table/locks"
    assert "dynamodb:PutItem" in found["StateLock"]["Action"]
    assert (found["StateRole"]["Action"], found["StateRole"]["Resource"]) == (["sts:AssumeRole"], role)
    # A store that is not AWS's has other accounts.
    assert "State" not in document(backend={"bucket": "states", "key": "x", "endpoints": {"s3": "https://minio"}})


def test_a_stack_without_aws_needs_none() -> None:
    with pytest.raises(NotSupported, match="no pool on AWS"):
        policy(SynthesizedStack("fleet", Path(), ({"name": "here", "provider": "local"},), {"here": {}}))


def test_a_key_that_another_construct_makes() -> None:
    assert document(kms_key_id="${local.train_kms_key_id}")["Key"]["Resource"] == ["arn:aws:kms:*:*:key/*"]
