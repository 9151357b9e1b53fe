"""A fleet whose state is in a bucket: of a moto server, which stands for a store that speaks the language of S3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moto_aws.cloud import Cloud
from moto_aws.projects import Project, secrets_of
from terraform_projects.commands import processes, until

pytestmark = pytest.mark.slow

LOCK = {"ID": "5f1b", "Operation": "OperationTypeApply", "Who": "me@laptop", "Created": "2026-11-01T10:00:00Z"}


def test_deploy_use_destroy(cloud: Cloud, tmp_path: Path) -> None:
    bucket = cloud.client("s3")
    bucket.create_bucket(Bucket="states")
    project = Project(tmp_path, cloud)
    # Nothing but the declaration says where it is.
    del project.environment["AWS_ENDPOINT_URL"]
    backend = f'sky.S3(bucket="states", key="fleets/here", region="us-east-1", endpoint="{cloud.url}")'
    project.declare(
        'sky.ComputePool(name="pool", provider=sky.Local(simulate=True), accelerator="A30:1/2g.12gb*2")',
        backend=backend,
    )
    try:
        project.run("deploy", "--auto-approve")
        state = json.loads(bucket.get_object(Bucket="states", Key="fleets/here")["Body"].read())
        [secret] = secrets_of(state)
        assert "2g.12gb" in project.run("status")
        (tmp_path / "job.py").write_text("import os\nprint('slot', os.environ['SKYINFRA_SLOT'])\n")
        assert '"slot": "pool-0/' in project.run("run", "fleet/pool", "job.py")

        bucket.put_object(Bucket="states", Key="fleets/here.tflock", Body=json.dumps(LOCK).encode())
        refusal = project.refused("plan")
        assert "the state is locked: another apply of Terraform by me@laptop" in refusal, refusal
        assert "force-unlock 5f1b" in refusal
        bucket.delete_object(Bucket="states", Key="fleets/here.tflock")
    finally:
        project.run("destroy", "--auto-approve")
    until(lambda: not processes(tmp_path))
    assert json.loads(bucket.get_object(Bucket="states", Key="fleets/here")["Body"].read())["resources"] == []
    assert {each["Key"] for each in bucket.list_objects_v2(Bucket="states")["Contents"]} == {"fleets/here"}
    assert not list(tmp_path.glob("*.tfstate*"))
    synthesized = [file.read_text(errors="replace") for file in (tmp_path / "cdktf.out").rglob("*.json")]
    assert not any(secret in text for text in (*project.printed, *synthesized))
