"""`skyinfra offers --live --for STACK/POOL`: what the clouds say of the places, and how `cheapest` goes by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from front_ends.schemas import valid
from moto import mock_aws
from moto_aws.account import Cloud
from servers.rest import Rest, serving, slow
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.failover import live_places
from skyinfra.failover.blocks import PlaceState, cheapest_first, place_states
from skyinfra.failover.live_places import Known, ask
from skyinfra.places.choices import Choice, Choices, Refused
from skyinfra.preflight.pool_inputs import of_place
from skyinfra.preflight.report import Line
from skyinfra.terminal.places import show_places

LOGIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEq0"
KEY = "k3y-of-t3sts"
LAMBDA = "lambda us-east-1"


def lambda_answers(cents: int = 2490, regions: tuple[str, ...] = ("us-east-1",)) -> dict[str, Any]:
    kind = {"name": "gpu_8x_h100_sxm5", "price_cents_per_hour": cents, "specs": {"gpus": 8, "vcpus": 208}}
    here = [{"name": each} for each in regions]
    listed = {"gpu_8x_h100_sxm5": {"instance_type": kind, "regions_with_capacity_available": here}}
    return {"/api/v1/instances": {"data": []}, "/api/v1/instance-types": {"data": listed}}


@pytest.fixture
def lambda_cloud() -> Iterator[tuple[Rest, dict[str, str]]]:
    with serving(lambda_answers()) as rest:
        yield rest, {"LAMBDALABS_API_KEY": KEY, "SKYINFRA_LAMBDA_URL": rest.address}


def declared(folder: Path, provider: Any, **more: Any) -> tuple[Any, dict[str, Any]]:
    stack = synthesized(folder, sky.ComputePool(name="t", accelerator="H100:8", provider=provider, **more))
    return stack, stack.pools[0]


def lines(found: Known) -> dict[str, str]:
    return {each.check: each.found for each in found.lines}


@pytest.mark.slow
def test_aws_says_prices_scores_zones_and_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-value")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    with mock_aws():
        cloud = Cloud(tmp_path)
        cloud.spot(("p5.48xlarge", "us-east-1a", 27.0), ("p5.48xlarge", "us-east-1b", 21.0))
        cloud.scores(a=2, b=9)
        aws = sky.AWS(zones=["us-east-1a", "us-east-1b"])
        stack, pool = declared(tmp_path, [aws, sky.GCP(project="p")], spot=True)
        found = ask(stack, pool, environment={}, session=cloud.session, seconds=300)
        a, b = found["aws us-east-1 us-east-1a"], found["aws us-east-1 us-east-1b"]
        assert (a.usd_per_hour, b.usd_per_hour) == (27.0, 21.0)
        assert "2 of 10 in us-east-1a" in lines(a)["spot score"] and "9 of 10 in us-east-1b" in lines(b)["spot score"]
        assert "vCPUs" in lines(a)["quota"] and not a.problem and lines(a)["machine"]
        # A place does not count towards the quota of another place of the same pool.
        cloud.quotas = dict.fromkeys(("L-7212CCBC", "L-417A185B", "L-C4BD4855"), 200.0)
        assert not ask(stack, pool, environment={}, session=cloud.session, seconds=300)[
            "aws us-east-1 us-east-1b"
        ].problem
        cloud.quotas = dict.fromkeys(("L-7212CCBC", "L-417A185B", "L-C4BD4855"), 100.0)
        assert (
            "100 vCPUs"
            in ask(stack, pool, environment={}, session=cloud.session, seconds=300)["aws us-east-1 us-east-1b"].problem
        )
        # Of a group the head is a machine on demand besides, with a quota of its own.
        cloud.spot(("p5.48xlarge", "us-east-1a", 31.0), ("p5.48xlarge", "us-east-1b", 32.0))
        cloud.quotas = {}
        stack, pool = declared(tmp_path, [sky.AWS(), sky.GCP(project="p")], spot=True, nodes=2, max_hourly_cost=30)
        group = ask(stack, pool, environment={}, session=cloud.session, seconds=300)["aws us-east-1"]
        assert group.usd_per_hour == 2 * 31.0 + 0.096 and group.too_dear and "max_hourly_cost is $30" in group.problem
        gcp = found["gcp us-central1 p"]
        assert gcp.usd_per_hour is None and "tells neither what is free" in lines(gcp)["not asked"]


def test_a_cloud_that_lists_what_is_free(tmp_path: Path, lambda_cloud: tuple[Rest, dict[str, str]]) -> None:
    rest, environment = lambda_cloud
    stack, pool = declared(tmp_path, [sky.Lambda(ssh_public_key=LOGIN), sky.GCP()], nodes=2, max_hourly_cost=95)
    found = ask(stack, pool, environment=environment, seconds=120)[LAMBDA]
    assert found.usd_per_hour == 49.8 and not found.problem
    assert lines(found)["machine"] == "gpu_8x_h100_sxm5 can be had now in us-east-1"
    rest.answers |= lambda_answers(9600, ("us-west-1",))
    found = ask(stack, pool, environment=environment, seconds=120)[LAMBDA]
    assert found.too_dear and "cannot be had in us-east-1 now, but in us-west-1" in found.problem


@pytest.mark.parametrize("answer", [401, 500, b"<html>"])
def test_what_a_cloud_does_not_say_is_a_line(
    tmp_path: Path, lambda_cloud: tuple[Rest, dict[str, str]], answer: Any
) -> None:
    rest, environment = lambda_cloud
    rest.answers = dict.fromkeys(rest.answers, answer)
    stack, pool = declared(tmp_path, [sky.Lambda(ssh_public_key=LOGIN), sky.GCP()])
    found = ask(stack, pool, environment=environment, seconds=120)
    assert found[LAMBDA].usd_per_hour is None and any(each.result != "pass" for each in found[LAMBDA].lines)
    assert KEY not in str(found)


def test_a_cloud_that_is_silent_is_not_waited_for(tmp_path: Path, lambda_cloud: tuple[Rest, dict[str, str]]) -> None:
    rest, environment = lambda_cloud
    rest.answers = dict.fromkeys(rest.answers, slow(3))
    stack, pool = declared(tmp_path, [sky.Lambda(ssh_public_key=LOGIN), sky.GCP()])
    found = ask(stack, pool, environment=environment, seconds=0.5)
    assert "did not answer in time" in str(lines(found[LAMBDA])) and found[LAMBDA].usd_per_hour is None


def test_without_boto3_and_without_credentials_each_place_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> Any:
        raise sky.MissingDependency("preflight asks AWS with boto3", hint="pip install skyinfra[aws]")

    monkeypatch.setattr("skyinfra.preflight.aws.load_boto3", missing)
    stack, pool = declared(tmp_path, [sky.AWS(), sky.Lambda(ssh_public_key=LOGIN)])
    found = ask(stack, pool, environment={}, seconds=120)
    assert "pip install skyinfra[aws]" in lines(found["aws us-east-1"])["not asked"]
    assert "LAMBDALABS_API_KEY" in found[LAMBDA].problem


def test_a_place_has_nothing_of_another_one(tmp_path: Path) -> None:
    image = sky.Image(runner=f"https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={'a' * 64}")
    _, pool = declared(tmp_path, [sky.AWS(profile="a", group=True), sky.RunPod()], nodes=2, image=image)
    there = live_places.at_place(pool, pool["places"][1])
    assert pool["region"] == "us-east-1" and pool["head"] and pool["places"][0]["account"] == "a"
    assert not there.keys() & {"head", "account"} and there["region"] == "all regions"
    assert (there["name"], there["nodes"]) == ("t", 2)


@pytest.mark.parametrize(
    ("fields", "profile"),
    [
        ({"account_id": "123456789012"}, None),
        ({"profile": "a", "account_id": "123456789012"}, "a"),
        # As every stack of the version before.
        ({"profile": "a"}, "a"),
        ({}, None),
    ],
)
def test_the_id_of_an_account_is_no_profile(tmp_path: Path, fields: dict[str, str], profile: str | None) -> None:
    stack, pool = declared(tmp_path, [sky.AWS(**fields), sky.GCP()])  # type: ignore[arg-type]
    place = live_places.at_place(pool, pool["places"][0])
    assert (place.get("account") or "") == " ".join(fields.values())
    assert of_place(stack, place).profile == profile


def test_credentials_of_the_stacks_own_provider_block_are_not_missed(tmp_path: Path) -> None:
    stack, pool = declared(tmp_path, [sky.GCP(), sky.Lambda(ssh_public_key=LOGIN)])
    assert ask(stack, pool, environment={}, seconds=120)[LAMBDA].problem
    places = [{**each, "own": "lambdalabs.mine"} for each in pool["places"]]
    assert not ask(stack, {**pool, "places": places}, environment={}, seconds=120)[LAMBDA].problem


def test_the_cheapest_goes_by_the_prices_of_now(tmp_path: Path) -> None:
    _, pool = declared(tmp_path, sky.cheapest([sky.AWS(), sky.GCP()]))
    aws, gcp = place_states(pool, Choice(), datetime.now(UTC))
    assert pool["by_price"] and [aws.usd_per_hour, gcp.usd_per_hour] == [55.04, 88.49]
    names = [each.place["place"] for each in cheapest_first([aws, replace(gcp, known=Known(40.0))])]
    assert names == ["gcp us-central1", "aws us-east-1"]
    failing = Known(40.0, (Line("t", "quota", "fail", "0 GPUs"),))
    assert cheapest_first([aws, replace(gcp, known=failing)])[0].place["place"] == "aws us-east-1"
    dear = PlaceState(gcp.place, False, known=Known(99.0, (Line("t", "price", "fail", "costs $99.00/h now"),)))
    assert not dear.free


def test_the_table_and_the_document(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lambda_cloud: tuple[Rest, dict[str, str]],
) -> None:
    for name, value in lambda_cloud[1].items():
        monkeypatch.setenv(name, value)
    for name in ("GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    declared(tmp_path, sky.cheapest([sky.GCP(project="p"), sky.Lambda(ssh_public_key=LOGIN)]))
    at = (datetime.now(UTC) - timedelta(hours=5)).isoformat(timespec="seconds")
    Choices.read(tmp_path).having("s/t", Choice(refused=(Refused(LAMBDA, at, "CapacityUnavailable", {}, "", "No."),)))
    show_places("s/t", live=True, as_json=True)
    document = valid("places", capsys.readouterr().out)
    first, second = document["places"]
    assert (first["place"], first["usd_per_hour_now"], second["usd_per_hour_now"]) == (LAMBDA, 24.9, None)
    assert first["state"] == "free to try; refused 5 hours ago" and first["refused"]["age_seconds"] >= 5 * 3600
    assert document["order"] == "the cheapest first, by the prices of now" and KEY not in json.dumps(document)
    show_places("s/t", live=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "$24.90" in printed and "can be had now" in printed and "2026-08-03" in printed
    # Without --live nobody is asked.
    monkeypatch.setattr(live_places, "at_once", None)
    show_places("s/t", as_json=True)
    document = valid("places", capsys.readouterr().out)
    assert document["places"][0]["checks"] is None and document["order"] == "the cheapest first, by shipped prices"
