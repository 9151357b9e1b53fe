"""Credentials, permissions, throttling, and the command itself."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
from botocore.awsrequest import AWSResponse
from moto_aws.account import ACCOUNT, Cloud
from terraform_projects.synthesized import project_of, synthesized
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.preflight import api, aws, preflight
from skyinfra.preflight.api import ATTEMPTS
from skyinfra.preflight.aws import ACTIONS, check_place
from skyinfra.preflight.pool_inputs import PoolInputs
from skyinfra.terminal.reports import show_report

Make = Callable[..., sky.ComputePool]


def credentials(cloud: Cloud, *pools: sky.ComputePool) -> Any:
    """The line of the credentials, which is the only one where they do not serve."""
    return cloud.line("credentials", *pools)


def test_an_account_that_nobody_tells_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> Any:
        raise api.CallFailed("throttled", "Throttling", "sts:GetCallerIdentity", "Rate exceeded")

    monkeypatch.setattr(api.Api, "ask", ask)
    inputs = PoolInputs(
        stack="s",
        pool="p",
        region="us-east-1",
        profile=None,
        nodes=1,
        machine_types=("g6.xlarge",),
        grouped=False,
        spot=False,
        spot_max_price=None,
        max_hourly_cost=None,
        zones=(),
        accounts=("123456789012",),
    )
    [line] = aws.check_pools([inputs], session=object(), checks=())["p"]
    assert (line.check, line.result) == ("credentials", "warn")


def test_whose_the_credentials_are(cloud: Cloud, pool: Make) -> None:
    line = credentials(cloud, pool("L4"))
    assert (line.result, line.found) == ("pass", f"arn:aws:sts::{ACCOUNT}:user/moto")


def test_credentials_of_another_account(cloud: Cloud, pool: Make) -> None:
    line = credentials(cloud, pool("L4", aws={"account_id": ACCOUNT}))
    assert (line.result, line.found) == ("pass", f"arn:aws:sts::{ACCOUNT}:user/moto")
    # What this account has says nothing of the other one.
    [line] = cloud.check(pool("L4", aws={"account_id": "222222222222"})).lines
    assert (line.check, line.result) == ("credentials", "fail")
    assert line.found == f"the credentials are of the account {ACCOUNT}, and the pool is declared in 222222222222"
    places = [sky.AWS(account_id="222222222222"), sky.AWS(region="us-west-2")]
    made = synthesized(cloud.folder, sky.ComputePool(name="p", accelerator="L4", provider=places))
    one, two = made.pools[0]["places"]
    for place, result in ((one, "fail"), (two, "pass")):
        assert check_place(made, {**made.pools[0], **place}, session=cloud.session)[0].result == result


@pytest.mark.parametrize("arguments", [{"assume_role": [{"role_arn": "arn:aws:iam::2:role/a"}]}, {"access_key": "A"}])
def test_a_block_that_logs_in_otherwise_is_not_asked_as_somebody_else(
    cloud: Cloud, pool: Make, arguments: dict[str, Any]
) -> None:
    made = synthesized(cloud.folder, pool("L4", aws={"provider": "aws.east"}))
    block = {"alias": "east", "region": "us-east-1", "skip_credentials_validation": True}
    own = dataclasses.replace(made, providers={"aws": [{**block, **arguments}]})
    [line] = preflight(own, session=cloud.session).lines
    [name] = arguments
    assert (line.check, line.result, cloud.asked) == ("credentials", "warn", {})
    assert line.found == f"not asked: the provider block logs in otherwise, by {name}"
    asked = preflight(dataclasses.replace(made, providers={"aws": [block]}), session=cloud.session)
    assert [line.result for line in asked.lines if line.check == "credentials"] == ["pass"]
    place = {**made.pools[0], "own": "aws.east"}
    assert [line.check for line in check_place(own, place, session=cloud.session)] == ["credentials"]


def test_the_root_user(cloud: Cloud, pool: Make) -> None:
    identity = {"Arn": f"arn:aws:iam::{ACCOUNT}:root", "Account": ACCOUNT, "UserId": ACCOUNT}
    cloud.answer("sts", "GetCallerIdentity", identity)
    assert credentials(cloud, pool("L4")).result == "warn"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("ExpiredToken", "the AWS credentials have expired: "),
        ("ExpiredTokenException", "the AWS credentials have expired: "),
        ("InvalidClientTokenId", "AWS does not accept the credentials: "),
    ],
)
def test_credentials_that_do_not_serve(cloud: Cloud, pool: Make, code: str, found: str) -> None:
    cloud.refuse("sts", "GetCallerIdentity", code, "The security token is of no use", 403)
    report = cloud.check(pool("L4"), pool("H100", name="q"))
    assert report.failed
    # Nothing else can be asked, so nothing else is said.
    assert [(line.pool, line.check, line.result) for line in report.lines] == [
        ("p", "credentials", "fail"),
        ("q", "credentials", "fail"),
    ]
    assert report.lines[0].found == f"{found}The security token is of no use"
    assert "aws s" in report.lines[0].to_do
    assert set(cloud.asked) == {"GetCallerIdentity"}


def test_no_credentials_at_all(cloud: Cloud, pool: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (line,) = preflight(synthesized(tmp_path, pool("L4"))).lines
    assert (line.result, line.found) == ("fail", "no valid credentials: Unable to locate credentials")
    assert line.to_do == "Log in with: aws sso login, or set AWS_PROFILE, or make credentials with: aws configure."


def test_a_profile(cloud: Cloud, pool: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = preflight(synthesized(tmp_path, pool("L4", aws={"profile": "research"}))).lines
    assert [(line.check, line.result) for line in missing] == [("credentials", "fail")]
    assert missing[0].found == "there is no profile research in the AWS configuration"
    assert missing[0].to_do == "Make it with: aws configure sso --profile research"
    (tmp_path / "aws-config").write_text(
        "[profile research]\nsso_session = x\nsso_account_id = 1\nsso_role_name = r\n"
        "[sso-session x]\nsso_region = us-east-1\nsso_start_url = https://example.com\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (expired,) = preflight(synthesized(tmp_path, pool("L4", aws={"profile": "research"}))).lines
    assert (expired.result, "aws sso login --profile research" in expired.to_do) == ("fail", True), expired


def test_each_region_and_profile_is_asked_for_itself(cloud: Cloud, pool: Make) -> None:
    pools = [pool("L4", name="a"), pool("L4", name="b"), pool("L4", name="c", aws={"region": "us-west-2"})]
    lines = [line for line in cloud.check(*pools).lines if line.check == "machine"]
    assert [("us-west-2" in line.found, line.result) for line in lines] == [(False, "pass")] * 2 + [(True, "pass")]
    assert cloud.asked["GetCallerIdentity"] == 2


def test_no_way_to_aws(cloud: Cloud, pool: Make) -> None:
    def lost(**_: Any) -> None:
        raise botocore.exceptions.EndpointConnectionError(endpoint_url="https://sts.us-east-1.amazonaws.com")

    cloud.session.events.register_first("before-send.sts", lost)
    line = credentials(cloud, pool("L4"))
    assert (line.result, "no answer to sts:GetCallerIdentity" in line.found) == ("fail", True)


def test_something_else_answers_in_the_place_of_aws(cloud: Cloud, pool: Make) -> None:
    def page(request: Any, **_: Any) -> AWSResponse:
        text = b"<!doctype html><p>Log in to the hotel: token=abc<br>"
        return AWSResponse(request.url, 500, {}, type("Raw", (), {"stream": lambda self: iter([text])})())

    cloud.session.events.register_first("before-send.sts", page)
    line = credentials(cloud, pool("L4"))
    assert (line.result, "no answer to sts:GetCallerIdentity" in line.found) == ("fail", True), line
    assert "hotel" not in str(line)


def test_a_page_in_the_place_of_a_json_answer_is_not_shown(cloud: Cloud, pool: Make) -> None:
    def page(request: Any, **_: Any) -> AWSResponse:
        return AWSResponse(request.url, 403, {}, type("Raw", (), {"stream": lambda self: iter([b"<html>hotel"])})())

    cloud.session.events.register_first("before-send.ssm", page)
    cloud.refuse("iam", "GetInstanceProfile", "AccessDenied", "<!DOCTYPE html>hotel", 403)
    report = cloud.check(pool("L4", aws={"iam_instance_profile": "node"}))
    assert "hotel" not in str(report) and not report.failed


def test_a_service_that_hangs_is_asked_once(cloud: Cloud, pool: Make) -> None:
    asked: list[str] = []

    def hang(request: Any, **_: Any) -> None:
        asked.append(request.url)
        raise botocore.exceptions.ReadTimeoutError(endpoint_url=request.url)

    cloud.session.events.register_first("before-send.ec2", hang)
    report = cloud.check(pool("L4"), workers=1)
    assert len(asked) == 1
    # What is only a question leaves the others to stand.
    assert not report.failed and any("no answer to ec2:" in line.found for line in report.lines)


def test_a_region_that_is_not_enabled(cloud: Cloud, pool: Make) -> None:
    cloud.refuse("ec2", "DescribeInstanceTypeOfferings", "OptInRequired", "You are not subscribed", 401)
    line = cloud.line("machine", pool("L4"))
    assert (line.result, "has not enabled the region" in line.found) == ("fail", True)
    assert "aws account enable-region --region-name us-east-1" in line.to_do


def throttled(cloud: Cloud, times: int) -> list[str]:
    """EC2 throttles DescribeInstances so many times."""
    seen: list[str] = []

    def slow_down(request: Any, **_: Any) -> AWSResponse | None:
        body = request.body if isinstance(request.body, bytes) else request.body.encode()
        if b"Action=DescribeInstances&" not in body or len(seen) > times:
            return None
        seen.append(request.url)
        if len(seen) > times:
            return None
        error = "<Error><Code>RequestLimitExceeded</Code><Message>x</Message></Error>"
        text = f"<Response><Errors>{error}</Errors></Response>".encode()
        return AWSResponse(request.url, 503, {}, type("Raw", (), {"stream": lambda self: iter([text])})())

    cloud.session.events.register_first("before-send.ec2", slow_down)
    return seen


def test_throttling_is_waited_for(cloud: Cloud, pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    seen = throttled(cloud, 2)
    assert cloud.line("quota", pool("L4")).result == "pass"
    assert len(seen) == 3


def test_throttling_that_goes_on_is_said(cloud: Cloud, pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    seen = throttled(cloud, 100)
    line = cloud.line("quota", pool("L4"))
    assert len(seen) == ATTEMPTS
    assert (line.result, line.to_do) == ("warn", "Run it again in a minute.")
    assert line.found == f"not checked: AWS throttled ec2:DescribeInstances, {ATTEMPTS} times"


def test_an_instance_profile(cloud: Cloud, pool: Make) -> None:
    own = {"iam_instance_profile": "node"}
    line = cloud.line("instance profile", pool("L4", aws=own))
    assert (line.result, line.found) == ("fail", "there is no instance profile node")
    iam = cloud.session.client("iam")
    iam.create_instance_profile(InstanceProfileName="node")
    line = cloud.line("instance profile", pool("L4", aws=own))
    assert (line.result, line.found) == ("fail", "the instance profile node has no role")
    iam.create_role(RoleName="r", AssumeRolePolicyDocument="{}")
    iam.add_role_to_instance_profile(InstanceProfileName="node", RoleName="r")
    assert cloud.line("instance profile", pool("L4", aws=own)).result == "pass"
    line = cloud.line("instance profile", pool("L4", aws=own, nodes=sky.Range(0, 8)))
    assert line.result == "warn" and "the role r; not checked: whether that may change the number of" in line.found
    assert "autoscaling:SetDesiredCapacity" in line.to_do and "skyinfra-p-*" in line.to_do
    cloud.refuse("iam", "GetInstanceProfile", "AccessDenied", status=403)
    line = cloud.line("instance profile", pool("L4", aws=own))
    assert (line.result, "iam:GetInstanceProfile" in line.to_do) == ("warn", True)


def test_the_buckets_that_nodes_mount(cloud: Cloud, pool: Make) -> None:
    """What the first boot would say after the machines are bought is said before."""
    s3 = cloud.s3

    def found(*mounts: sky.Mount) -> list[tuple[str, str]]:
        report = cloud.check(pool("L4", mounts=list(mounts)))
        return [(line.result, line.found) for line in report.lines if line.check == "bucket"]

    read, write = sky.Mount("s3://my-bucket/data", "/data"), sky.Mount("s3://my-bucket/out", "/out", mode="write")
    assert found(read) == [("fail", "there is no bucket my-bucket")]
    s3.create_bucket(Bucket="my-bucket")
    s3.put_object(Bucket="my-bucket", Key="database/a", Body=b"a")
    assert found(read, write) == [
        ("fail", "s3://my-bucket/data/ has no files"),
        ("pass", "s3://my-bucket/out/ is there"),
    ]
    for number in range(3):
        s3.put_object(Bucket="my-bucket", Key=f"data/{number}", Body=b"a")
    before = cloud.asked["ListObjectsV2"]
    assert found(read, write) == [("pass", f"s3://my-bucket/{name}/ is there") for name in ("data", "out")]
    # However many files there are, one is asked for; a bucket at two paths is asked once.
    assert cloud.asked["ListObjectsV2"] == before + 2
    assert found(read, sky.Mount("s3://my-bucket/data/", "/again")) == [("pass", "s3://my-bucket/data/ is there")]
    s3.create_bucket(Bucket="far-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    [(result, text)] = found(sky.Mount("s3://far-bucket", "/far", mode="cached"))
    assert result == "warn" and "s3://far-bucket/ is in eu-west-1 and the nodes in us-east-1" in text
    cloud.refuse("s3", "ListObjectsV2", "AccessDenied", status=403)
    assert found(read) == [("warn", "not checked: the credentials may not call s3:ListBucket")]
    assert found() == []


def test_permissions_that_are_missing_are_warnings_that_name_them(cloud: Cloud, pool: Make) -> None:
    words = "You are not authorized to perform this operation. Encoded authorization failure message: AbCd"
    for operation in (
        "DescribeInstanceTypeOfferings",
        "DescribeImages",
        "DescribeAddresses",
        "DescribeSpotPriceHistory",
    ):
        cloud.refuse("ec2", operation, "UnauthorizedOperation", words, 403)
    cloud.refuse("ssm", "GetParameter", "AccessDeniedException", words)
    report = cloud.check(pool("H100:8", spot=True))
    assert not report.failed
    denied = {line.to_do.split()[4].rstrip(",") for line in report.lines if line.result == "warn"}
    assert denied >= {"ec2:DescribeInstanceTypeOfferings", "ssm:GetParameter", "ec2:DescribeAddresses"}
    assert "AbCd" not in str(report)


@pytest.mark.slow
def test_the_order_is_that_of_the_declaration_however_many_ask(cloud: Cloud, pool: Make) -> None:
    local = sky.ComputePool(name="here", provider=sky.Local(simulate=True), accelerator="H100")
    pools = [pool("L4", name="z", spot=True, nodes=2), local, pool("H100:8", name="a")]
    reports = [cloud.check(*pools, workers=workers) for workers in (1, 8, 8)]
    assert reports[0] == reports[1] == reports[2]
    assert list(dict.fromkeys(line.pool for line in reports[0].lines)) == ["z", "here", "a"]
    assert [line.found for line in reports[0].lines if line.pool == "here"] == [
        "nothing to check: its nodes are processes on this machine"
    ]


def test_a_question_is_asked_once(cloud: Cloud, pool: Make) -> None:
    cloud.check(*(pool("L4", name=f"p{index}", spot=True, nodes=2) for index in range(5)))
    asked = {name: number for name, number in cloud.asked.items() if number > 1}
    # One for each quota and each image; DescribeInstanceTypes for nodes, heads and both.
    assert asked == {"GetServiceQuota": 4, "GetParameter": 2, "DescribeInstanceTypes": 3}


def test_the_actions_that_are_asked_for_are_those_that_are_named(cloud: Cloud, pool: Make) -> None:
    own = {"subnet_ids": ["subnet-1"], "security_group_ids": ["sg-1"], "iam_instance_profile": "node"}
    pools = [pool("L4", name="spot", spot=True, nodes=2), pool("H100:8", name="od"), pool("L4", name="own", aws=own)]
    cloud.check(
        *pools, pool("H100:8", name="b", aws={"capacity": sky.CapacityBlock(id="cr-0123"), "zones": ["us-east-1a"]})
    )
    asked = {action.partition(":")[2] for action in ACTIONS}
    assert set(cloud.asked) == asked - {"GetAWSDefaultServiceQuota"}  # where the account has no value of its own


def test_the_table_and_what_to_do(cloud: Cloud, pool: Make, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.quotas["L-DB2E81BA"] = 0
    report = cloud.check(pool("L4"))
    show_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["POOL", "CHECK", "RESULT", "FOUND"]
    assert next(line.split()[:3] for line in lines if " quota " in line) == ["p", "quota", "fail"]
    assert lines[-2].startswith("p, quota: aws service-quotas request-service-quota-increase ")
    assert lines[-1] == "s: 5 pass, 1 fail"


PROJECT = "[sky.ComputePool(name='p', provider=sky.AWS(), accelerator='L4')]"


def test_the_command(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project_of(tmp_path / "project", PROJECT))
    monkeypatch.setattr("boto3.Session", lambda **_: cloud.session)
    done = CliRunner().invoke(app, ["preflight", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["stack"], document["fail"]) == ("s", 0)
    assert document["lines"][0] == {
        "pool": "p",
        "check": "credentials",
        "result": "pass",
        "found": f"arn:aws:sts::{ACCOUNT}:user/moto",
        "to_do": "",
        "usd_per_hour": None,
    }
    cloud.quotas["L-DB2E81BA"] = 0
    done = CliRunner().invoke(app, ["preflight", "s"])
    assert done.exit_code == 1
    assert "--quota-code L-DB2E81BA" in done.stdout
    assert "s3cret-value" not in done.output and "AKIA" not in done.output


def test_boto3_is_needed_for_aws_alone(tmp_path: Path, pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "boto3":
            raise ModuleNotFoundError("No module named 'boto3'", name="boto3")
        return real(name, *arguments, **more)

    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(sky.MissingDependency, match=r'pip install "skyinfra\[aws\]"'):
        preflight(synthesized(tmp_path, pool("L4")))
    local = sky.ComputePool(provider=sky.Local())
    (line,) = preflight(synthesized(tmp_path, local)).lines
    assert line.result == "pass"


def test_nothing_that_synthesizes_brings_boto3(tmp_path: Path) -> None:
    program = "import sys, skyinfra.deploy.apply, skyinfra.cli.app, skyinfra.deploy.cost; print('boto3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
