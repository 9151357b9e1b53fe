"""Jobs that are kept for after their fleet: of a head that runs, in a folder and in a bucket of a real boto3's."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from front_ends.schemas import valid
from local_fleets.running_node import BIG, RunningNode, h100, until
from moto_aws.cloud import Cloud, start
from tasks_on_nodes.jobs import starts, wait_for
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.deploy import kept
from skyinfra.protocol.jobs import JobInfo
from skyinfra.terraform.project import Project
from skyinfra.terraform.stores import Store, jobs_prefix, local_store, store_of
from skyinfra.terraform.synthesized import SynthesizedStack

KMS = "arn:aws:kms:us-east-1:123456789012:key/6d2b1ad7-0000-4000-8000-000000000000"
DENY = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::states/*"}],
}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    process, cloud = start(tmp_path_factory.mktemp("moto"))
    yield cloud
    process.communicate()


@pytest.fixture
def bucket(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bucket of the states, whose credentials are those of the environment."""
    cloud.reset()
    for name, value in cloud.environment().items():
        if name.startswith("AWS_") and name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)
    client = cloud.client("s3")
    client.create_bucket(Bucket="states")
    return client


def stack(folder: Path, cloud: Cloud, **settings: Any) -> SynthesizedStack:
    backend = sky.S3(bucket="states", key="fleets/demo.tfstate", region="us-east-1", endpoint=cloud.url, **settings)
    return SynthesizedStack("demo", folder, ({"name": "mig"},), {}, backend={"s3": backend.settings()})


def command(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def fail(word: str) -> None:
    print(f"{word} is printed")
    raise ValueError(word)


def print_lines(number: int) -> None:
    for each in range(number):
        print(f"line {each:06}")


def test_jobs_are_kept_once_and_read_when_the_head_is_gone(
    make_node: Callable[..., RunningNode], tmp_path: Path, cloud: Cloud, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, path = make_node(accelerator=h100(BIG)), tmp_path / "run"
    head.boot()
    made = stack(tmp_path, cloud)
    stores: tuple[Store, ...] = (local_store(tmp_path / "project", "demo"), store_of(made, tmp_path))
    with head.pool() as pool:
        manifest = pool.manifest
        assert str(kept.keep(manifest, stores[0])).startswith("demo/mig: 0 of 0 jobs")
        assert not (tmp_path / "project").exists()
        failed = pool.submit(fail, "w0rd", detach="fails")
        going = pool.submit(wait_for, str(path), detach="goes")
        until(lambda: starts(path) and failed.done(), "one has failed, one runs")
        for store in stores:
            assert (done := kept.keep(manifest, store)).whole and (done.sent, done.already) == (2, 0)
        Path(f"{path}.open").touch()
        going.result(timeout=60)
        for store in stores:
            assert (done := kept.keep(manifest, store)).whole and (done.sent, done.already) == (1, 1), done
            assert str(done).endswith(f"1 of 2 jobs kept in {store.where}, 1 there already")
            assert kept.keep(manifest, store).already == 2
    objects = bucket.list_objects_v2(Bucket="states")["Contents"]
    assert {each["Key"] for each in objects} == {
        f"fleets/demo/jobs/mig/{job.name}-{job.id}/{file}"
        for job in (failed, going)
        for file in ("record.json", "output.log")
    }
    assert {bucket.head_object(Bucket="states", Key=e["Key"])["ServerSideEncryption"] for e in objects} == {"AES256"}
    private = (tmp_path / "project" / ".skyinfra" / ".jobs").rglob("*")
    assert {oct(each.stat().st_mode & 0o777) for each in private} == {"0o700", "0o600"}

    # The head is killed: a destroy goes on, and says what it does not know.
    head.run("stop", "--timeout", "10")
    monkeypatch.setattr(SynthesizedStack, "fleets", lambda self: {"mig": manifest})
    (said,) = kept.keep_before(made, None, tmp_path, destroy=True)  # type: ignore[arg-type]
    assert str(said).startswith("demo/mig: its jobs are not known, and were NOT kept: ")
    for store in stores:
        found = {name.split("/")[1] for name in store.names("mig")}
        assert found == {f"{job.name}-{job.id}" for job in (failed, going)}
    with monkeypatch.context() as within:
        within.setattr(Project, "find", lambda: Project(tmp_path, "", tmp_path))
        within.setattr(Project, "stack", lambda self, name: made)
        in_bucket = sky.kept_jobs("demo")
    monkeypatch.chdir(tmp_path / "project")
    for jobs, store in zip((sky.kept_jobs("demo", "mig"), in_bucket), stores, strict=True):
        assert [(each.info.name, each.info.state) for each in jobs] == [("fails", "failed"), ("goes", "done")]
        fails, goes = jobs
        assert (fails.where, fails.note, fails.simulated) == (store.where, None, True)
        assert "w0rd is printed" in fails.logs() and "ValueError" in str(fails.info.problem)
        assert (goes.logs(), goes.logs(lines=1)) == ("started\nlet through\n", "let through\n")
    listed = command("jobs", "demo/mig", "--json")
    document = valid("jobs", listed.stdout)
    assert [each["name"] for each in document["jobs"]] == ["fails", "goes"] and document["kept"]["fleet"] == "gone"
    assert listed.stderr.startswith("kept 20") and listed.stderr.endswith(", the fleet is gone\n")
    assert "fails" in command("jobs", "demo/mig").stdout
    logs = command("jobs", "logs", "demo/mig", going.id[:8], "-n", "1")
    assert logs.stdout == "let through\n"
    assert logs.stderr.startswith("job goes: done, kept 20") and logs.stderr.endswith(", the fleet is gone\n")
    for nothing in (["jobs", "demo/other"], ["jobs", "demo/../../run"], ["jobs", "logs", "demo/mig", "other"]):
        # The error of the fleet, in place of which there is nothing.
        assert isinstance(CliRunner().invoke(app, nothing).exception, sky.ProjectNotFound)


def test_the_encryption_and_the_workspace_are_those_of_the_state(
    tmp_path: Path, cloud: Cloud, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_WORKSPACE", "blue")
    store = store_of(stack(tmp_path, cloud, kms_key_id=KMS), tmp_path)
    assert store.where == "s3://states/env:/blue/fleets/demo/jobs/"
    store.write("mig/a/record.json", io.BytesIO(b"{}"))
    assert (store.names("mig"), store.names("mi"), store.read("mig/a/record.json")) == (
        {"mig/a/record.json"},
        set(),
        b"{}",
    )
    found = bucket.head_object(Bucket="states", Key="env:/blue/fleets/demo/jobs/mig/a/record.json")
    assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", KMS)
    for late in (store, local_store(tmp_path, "demo")):
        with pytest.raises((sky.CloudRefused, sky.ProjectError), match=r"the time was up|Error"):
            late.write("mig/b/output.log", kept._Timed(io.BytesIO(b"slow"), time.monotonic() - 1))
    assert not [*tmp_path.rglob("*.part")]
    bare = {"bucket": "b", "key": "k", "region": "r"}
    assert jobs_prefix(bare) == "k/jobs/"


class TakenOver:
    """A fleet whose nodes answer what they like."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def ask(self, *_: Any, offset: int | None, **__: Any) -> Any:
        return self.answer(offset)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda offset: ["no document"], "TypeError: "),
        (lambda offset: {"text": "no offset"}, "KeyError: 'offset'"),
        (lambda offset: {"text": "", "offset": "many"}, "ValueError: "),
        (lambda offset: {"text": "", "offset": 10**30}, True),
        (lambda offset: {"text": "x" * 1000, "offset": 10**9 if offset is None else offset + 1}, True),
    ],
)
def test_a_node_that_was_taken_over_keeps_no_fleet_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, said: Any
) -> None:
    monkeypatch.setattr(kept, "LARGEST_LOG", 5_000)
    info = JobInfo("a", "0" * 32, "t", "script", "me@here", 0, "done", 1.0, 2.0, 3.0, 1, "n1/0")
    store = local_store(tmp_path, "demo")
    manifest: Any = SimpleNamespace(pool="mig", simulated=True)
    copy = kept._Copy(TakenOver(answer), store, manifest, time.monotonic() + 60, (), [])  # type: ignore[arg-type]
    found = copy.attempt(info)
    assert found is said or found.startswith(said)
    assert sum(len(store.read(name)) for name in store.names("mig") if name.endswith(".log")) <= 6_000


@pytest.mark.slow
def test_a_log_that_is_large_loses_its_begin_and_says_so(
    make_node: Callable[..., RunningNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LARGEST_LOG", 600_000)
    head, store = make_node(cpu_slots=1), local_store(tmp_path, "demo")
    head.boot()
    with head.pool() as pool:
        job = pool.submit(print_lines, 100_000, detach="large")
        job.result(timeout=60)
        assert (done := kept.keep(pool.manifest, store)).whole
        pool.submit(print_lines, 0, detach="quiet").result(timeout=60)
        assert str(kept.keep(pool.manifest, store)).endswith(f" kept in {store.where}, 1 there already")
        pool.submit(print_lines, 1, detach="forgotten").result(timeout=60)
        (log,) = (head.path / "tasks").glob("forgotten-*")
        log.unlink()
        forgotten = kept.keep(pool.manifest, store)
        assert forgotten.whole and "1 without the whole log: forgotten: the log could not be read: " in str(forgotten)
    monkeypatch.chdir(tmp_path)
    read, quiet, _ = sky.kept_jobs("demo/mig")
    assert quiet.logs() == "" and quiet.note is None
    text = read.logs(lines=100_000)
    assert len(text) == 600_000 and text.splitlines()[1:] == [f"line {n:06}" for n in range(50_001, 100_000)]
    assert str(done).endswith(f"; 1 without the whole log: large: {read.note}")
    assert read.note == "the first 600000 bytes are left out: 0 MiB are kept of a log"


@pytest.mark.slow
def test_a_bucket_that_refuses_is_said(
    make_node: Callable[..., RunningNode], tmp_path: Path, cloud: Cloud, bucket: Any
) -> None:
    head = make_node(cpu_slots=1)
    head.boot()
    bucket.put_bucket_policy(Bucket="states", Policy=json.dumps(DENY))
    with head.pool() as pool:
        pool.submit(fail, "w0rd", detach="fails").exception(timeout=60)
        done = kept.keep(pool.manifest, store_of(stack(tmp_path, cloud), tmp_path))
        assert not done.whole
        assert "0 of 1 job kept" in str(done) and "1 were NOT kept: s3:PutObject on s3://states/fleets" in str(done)
        bucket.delete_bucket(Bucket="states")
        done = kept.keep(pool.manifest, store_of(stack(tmp_path, cloud), tmp_path))
        assert "1 were NOT kept: s3:ListBucket on s3://states/fleets/demo/jobs/mig: NoSuchBucket" in str(done)
