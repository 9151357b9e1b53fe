"""The jobs of a fleet that is destroyed, in the bucket of its state: real Terraform, boto3, Dask and a moto server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from front_ends.schemas import valid
from moto_aws.cloud import Cloud, start
from moto_aws.projects import Project
from terraform_projects.commands import kill, processes, until

pytestmark = pytest.mark.slow

POOL = 'sky.ComputePool(name="pool", provider=sky.Local(simulate=True), accelerator="A30:1/2g.12gb*2")'
DENY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::states/fleets/here/*"}
    ],
}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    process, cloud = start(tmp_path_factory.mktemp("moto"))
    cloud.client("s3").create_bucket(Bucket="states")
    yield cloud
    process.communicate()


@pytest.fixture
def project(cloud: Cloud, tmp_path: Path) -> Iterator[Project]:
    """A project whose fleet is deployed, with one job that is done and one that has failed."""
    made = Project(tmp_path, cloud)
    del made.environment["AWS_ENDPOINT_URL"]
    backend = f'sky.S3(bucket="states", key="fleets/here.tfstate", region="us-east-1", endpoint="{cloud.url}")'
    made.declare(POOL, backend=backend)
    (tmp_path / "good.py").write_text("print('it is done')\n")
    (tmp_path / "bad.py").write_text("import sys\nprint('it fails')\nsys.exit(3)\n")
    made.run("deploy", "--auto-approve")
    for name in ("good", "bad"):
        made.run("run", "fleet/pool", "--detach", "--name", name, f"{name}.py")
        made.try_run("jobs", "result", "fleet/pool", name)
    yield made
    made.run("destroy", "--auto-approve")
    until(lambda: not processes(tmp_path))


def destroyed(project: Project) -> str:
    """What a destroy says of the jobs."""
    done = project.try_run("destroy", "--auto-approve")
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("fleet/pool: "))


def test_destroyed_and_read(project: Project) -> None:
    assert "2 of 2 jobs kept in s3://states/fleets/here/jobs/" in project.run("jobs", "keep", "fleet/pool")
    assert destroyed(project).endswith("0 of 2 jobs kept in s3://states/fleets/here/jobs/, 2 there already")
    document = valid("jobs", project.run("jobs", "fleet/pool", "--json"))
    assert [(each["name"], each["state"]) for each in document["jobs"]] == [("good", "done"), ("bad", "failed")]
    assert document["kept"]["where"] == "s3://states/fleets/here/jobs/" and document["kept"]["fleet"] == "gone"
    done = project.try_run("jobs", "logs", "fleet/pool", "bad")
    assert done.stdout == "it fails\n" and "bad: failed, kept 20" in done.stderr, done
    assert done.stderr.endswith("the fleet is gone\n")


def test_a_head_that_was_killed_and_a_bucket_that_refuses(project: Project, cloud: Cloud) -> None:
    bucket = cloud.client("s3")
    bucket.put_bucket_policy(Bucket="states", Policy=json.dumps(DENY))
    try:
        refused = project.try_run("jobs", "keep", "fleet/pool")
        assert refused.returncode == 1 and "2 were NOT kept: s3:PutObject" in refused.stderr, refused.stderr
        assert "0 of 2 jobs kept" in destroyed(project)
    finally:
        bucket.delete_bucket_policy(Bucket="states")
    project.run("deploy", "--auto-approve")
    project.run("run", "fleet/pool", "--detach", "--name", "kept", "good.py")
    project.run("jobs", "result", "fleet/pool", "kept")
    project.run("jobs", "keep", "fleet/pool")
    kill(processes(project.folder))
    asked = project.try_run("jobs", "fleet/pool")
    assert "kept" in asked.stdout and asked.stderr.endswith(", its head does not answer\n"), asked.stderr
    assert "its jobs are not known, and were NOT kept" in destroyed(project)
