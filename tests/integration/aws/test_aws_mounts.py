"""Folders of buckets that nodes mount: the real provider against a moto server, by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud
from moto_aws.projects import Project

pytestmark = pytest.mark.slow

BUCKET = "arn:aws:s3:::my-bucket"


def test_the_role_reaches_what_is_declared_for_as_long_as_it_is(cloud: Cloud, tmp_path: Path) -> None:
    s3, iam = cloud.client("s3"), cloud.client("iam")
    s3.create_bucket(Bucket="my-bucket")
    s3.put_object(Bucket="my-bucket", Key="data/a.txt", Body=b"a")
    before, project = cloud.existing(), Project(tmp_path, cloud)

    def declare(*mounts: str) -> None:
        project.declare(
            f'sky.ComputePool(name="one", accelerator="L4", provider=sky.AWS(), mounts=[{", ".join(mounts)}])'
        )

    def deploy() -> str:
        project.run("deploy", "--auto-approve", "--no-wait")
        assert json.loads(project.run("plan", "--json"))["changes"] == []
        return str(cloud.instance("one-0")["InstanceId"])

    def policy() -> dict[str, list[str]] | None:
        """The actions that the role has, by what they are on; None without a policy for buckets."""
        [role] = [each["RoleName"] for each in iam.list_roles()["Roles"] if "one" in each["RoleName"]]
        if "buckets" not in iam.list_role_policies(RoleName=role)["PolicyNames"]:
            return None
        document: Any = iam.get_role_policy(RoleName=role, PolicyName="buckets")["PolicyDocument"]
        return {each["Resource"]: each["Action"] for each in document["Statement"]}

    reads = {BUCKET: ["s3:ListBucket"], f"{BUCKET}/data/*": ["s3:GetObject"]}
    writes = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    declare()
    plain = deploy()
    assert policy() is None
    declare('sky.Mount("s3://my-bucket/data", "/data")')
    first = deploy()
    assert first != plain and policy() == reads
    assert "my-bucket/data" in cloud.user_data(first)
    declare('sky.Mount("s3://my-bucket/data", "/data")', 'sky.Mount("s3://my-bucket", "/out", mode="write")')
    second = deploy()
    assert second != first and policy() == {**reads, f"{BUCKET}/*": writes}
    # What is taken away is gone, and the bucket is nobody's of ours.
    declare()
    assert deploy() != second and policy() is None
    project.run("destroy", "--auto-approve")
    assert cloud.existing() == before
    assert s3.get_object(Bucket="my-bucket", Key="data/a.txt")["Body"].read() == b"a"
