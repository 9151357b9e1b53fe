"""Preflight of clouds that are asked as their data files say, against servers that answer as their API documents do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers.provider_tables import all_tables
from servers.rest import Rest, Status, serving, slow

from skyinfra import providers
from skyinfra.preflight import Line, Report, clouds, preflight
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode
from skyinfra.terraform.synthesized import SynthesizedStack

KEY = "k3y-of-t3sts"


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with all_tables(tmp_path, monkeypatch):
        yield


def pool(provider: str, machine: str, **fields: Any) -> dict[str, Any]:
    return {"name": "p", "provider": provider, "nodes": 1, "machine_types": [machine], "spot": False, **fields}


def check(environment: dict[str, str], *pools: dict[str, Any]) -> Report:
    stack = SynthesizedStack("s", Path(), pools, {})
    report = preflight(stack, environment=environment)
    assert KEY not in json.dumps(report.to_json()), "a key is shown"
    return report


def line(report: Report, check: str) -> Line:
    (found,) = [each for each in report.lines if each.check == check]
    return found


DROPLET = {
    "slug": "gpu-h100x8-640gb",
    "memory": 1966080,
    "vcpus": 160,
    "price_hourly": 23.92,
    "regions": ["nyc2", "tor1"],
    "available": True,
    "gpu_info": {"count": 8, "vram": {"amount": 640, "unit": "gib"}, "model": "nvidia_h100"},
}


@pytest.fixture
def digitalocean() -> Iterator[tuple[Rest, dict[str, str]]]:
    answers = {
        "/v2/account": {"account": {"droplet_limit": 3, "status": "active"}},
        "/v2/sizes": {"sizes": [{"slug": "s-1vcpu-1gb", "available": True}, DROPLET], "links": {}},
    }
    with serving(answers) as rest:
        yield rest, {"DIGITALOCEAN_TOKEN": KEY, "DIGITALOCEAN_API_URL": rest.address}


def test_a_cloud_that_answers_all(digitalocean: tuple[Rest, dict[str, str]]) -> None:
    rest, environment = digitalocean
    report = check(environment, pool("digitalocean", "gpu-h100x8-640gb", region="nyc2", nodes=2))
    assert not report.failed
    assert [(each.check, each.result) for each in report.lines] == [
        ("credentials", "pass"),
        ("quota", "pass"),
        ("machine", "pass"),
        ("price", "pass"),
        ("not asked", "warn"),
    ]
    assert line(report, "credentials").found.endswith("accepts DIGITALOCEAN_TOKEN")
    assert line(report, "quota").found == "3 Droplets in all; the pool needs 2"
    assert line(report, "machine").found == "gpu-h100x8-640gb can be had now in nyc2, tor1"
    assert line(report, "price").found.startswith(
        "gpu-h100x8-640gb costs $23.92/h on-demand now; the shipped price is $"
    )
    assert rest.headers("Authorization") == {f"Bearer {KEY}"}
    assert sorted(url for _, url, _, _ in rest.asked) == ["/v2/account", "/v2/sizes?per_page=200"]  # each once


def test_what_does_not_fit(digitalocean: tuple[Rest, dict[str, str]]) -> None:
    _, environment = digitalocean
    wanted = pool("digitalocean", "gpu-h100x8-640gb", region="sfo3", nodes=4, max_hourly_cost=20.0)
    report = check(environment, wanted)
    assert line(report, "quota").result == line(report, "machine").result == line(report, "price").result == "fail"
    assert line(report, "machine").to_do == "Declare region='nyc2'."
    assert "max_hourly_cost is $20" in line(report, "price").found
    report = check(environment, pool("digitalocean", "gpu-l40sx1-48gb", region="tor1", accelerators_per_node=1))
    assert (
        line(report, "machine").result == "warn"
        and "does not list gpu-l40sx1-48gb now" in line(report, "machine").found
    )


def test_a_list_of_machines_with_accelerators_says_nothing_of_others(digitalocean: tuple[Rest, dict[str, str]]) -> None:
    _, environment = digitalocean
    found = line(check(environment, pool("digitalocean", "s-8vcpu-32gb", region="nyc2")), "machine")
    assert (found.result, found.to_do) == ("warn", "") and "whether it has s-8vcpu-32gb now is not known" in found.found


def test_a_price_far_above_the_shipped_one(digitalocean: tuple[Rest, dict[str, str]]) -> None:
    rest, environment = digitalocean
    rest.answers["/v2/sizes"] = {"sizes": [{**DROPLET, "price_hourly": 35.28}]}
    report = check(environment, pool("digitalocean", "gpu-h100x8-640gb", region="nyc2"))
    assert line(report, "price").result == "warn" and "too low" in line(report, "price").to_do


def test_all_pages_are_read_and_on_that_server_only(digitalocean: tuple[Rest, dict[str, str]]) -> None:
    rest, environment = digitalocean

    def sizes(_: Any, query: dict[str, list[str]], __: bytes) -> Any:
        if "page" in query:
            return {"sizes": [DROPLET]}
        return {"sizes": [], "links": {"pages": {"next": "https://elsewhere.example/v2/sizes?page=2&per_page=200"}}}

    rest.answers["/v2/sizes"] = sizes
    report = check(environment, pool("digitalocean", "gpu-h100x8-640gb", region="nyc2"))
    assert line(report, "machine").result == "pass"


@pytest.mark.parametrize(
    ("answer", "result", "found"),
    [
        (401, "fail", "it does not accept what DIGITALOCEAN_TOKEN holds (401)"),
        (403, "fail", "it does not accept what DIGITALOCEAN_TOKEN holds (403)"),
        (429, "warn", "it takes no more questions now (429)"),
        (500, "warn", "it answered with the status 500"),
        (b"<html>who are you</html>", "warn", "what it answered is not JSON"),
    ],
)
def test_refusals(digitalocean: tuple[Rest, dict[str, str]], answer: Any, result: str, found: str) -> None:
    rest, environment = digitalocean
    rest.answers["/v2/account"] = answer
    report = check(environment, pool("digitalocean", "gpu-h100x8-640gb", region="nyc2"))
    assert line(report, "credentials").result == result and found in line(report, "credentials").found
    assert report.failed == (result == "fail")
    # With refused credentials nothing else is asked.
    assert any(each.check == "machine" for each in report.lines) == (result != "fail")


def test_without_credentials_nothing_is_asked_and_it_is_said_how_to_get_them() -> None:
    report = check({}, pool("digitalocean", "gpu-h100x8-640gb", region="nyc2"))
    (credentials, rest) = report.lines
    assert credentials.result == "fail" and credentials.found == (
        "missing in the environment: DIGITALOCEAN_TOKEN, or DIGITALOCEAN_ACCESS_TOKEN"
    )
    assert "https://cloud.digitalocean.com/account/api/tokens" in credentials.to_do
    assert rest.check == "not asked"


def test_keys_go_nowhere_else(digitalocean: tuple[Rest, dict[str, str]]) -> None:
    rest, environment = digitalocean
    with serving({"/v2/account": {}}) as elsewhere:

        def moved(*_: Any) -> Any:
            raise Status(302, Location=f"{elsewhere.address}/v2/account")

        rest.answers["/v2/account"] = moved
        report = check(environment, pool("digitalocean", "gpu-h100x8-640gb", region="nyc2"))
        assert "status 302" in line(report, "credentials").found and not elsewhere.asked
    plain = {**environment, "DIGITALOCEAN_API_URL": "http://api.example.com"}
    report = check(plain, pool("digitalocean", "gpu-h100x8-640gb", region="nyc2"))
    assert "DIGITALOCEAN_API_URL is no https address" in line(report, "credentials").found


def test_a_cloud_that_does_not_answer_costs_no_more_than_its_time(digitalocean: tuple[Rest, dict[str, str]]) -> None:
    rest, environment = digitalocean
    rest.answers["/v2/account"] = slow(8)
    begin = time.monotonic()
    wanted = pool("digitalocean", "gpu-h100x8-640gb", region="nyc2")
    lines = clouds.check_pools([wanted], environment=environment, seconds=0.5)["p"]
    assert time.monotonic() - begin < 3
    assert lines[0].result == "warn" and "did not answer in time" in lines[0].found


def test_verda_asks_for_a_token_first() -> None:
    def token(_: Any, __: Any, body: bytes) -> Any:
        assert json.loads(body) == {"grant_type": "client_credentials", "client_id": "id", "client_secret": KEY}
        return {"access_token": "t0ken", "token_type": "Bearer", "expires_in": 3600}

    machine = {"instance_type": "1H100.80S.30V", "price_per_hour": "2.29", "spot_price": "0.80", "currency": "usd"}
    answers = {
        "/oauth2/token": token,
        "/balance": {"amount": 10, "currency": "usd"},
        "/instance-types": [machine],
        "/instance-availability": [
            {"location_code": "FIN-02", "availabilities": ["1H100.80S.30V", "CPU.4V.16G"]},
            {"location_code": "ICE-01", "availabilities": ["CPU.4V.16G"]},
        ],
    }
    with serving(answers) as rest:
        environment = {"VERDA_CLIENT_ID": "id", "VERDA_CLIENT_SECRET": KEY, "VERDA_BASE_URL": rest.address}
        report = check(environment, pool("verda", "1H100.80S.30V", region="ICE-01", spot=True))
    assert line(report, "credentials").found.endswith("accepts VERDA_CLIENT_ID and VERDA_CLIENT_SECRET")
    assert line(report, "machine").found == "1H100.80S.30V cannot be had in ICE-01 now, but in FIN-02"
    assert "costs $0.80/h spot now" in line(report, "price").found
    assert rest.headers("Authorization") == {None, "Bearer t0ken"}


@contextmanager
def google_cloud(quotas: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    answers = {
        "/compute/v1/projects/research": {"name": "research"},
        "/compute/v1/projects/research/regions/us-central1": {"quotas": quotas},
    }
    with serving(answers) as rest:
        yield {
            "GOOGLE_OAUTH_ACCESS_TOKEN": KEY,
            "GOOGLE_PROJECT": "research",
            "GOOGLE_COMPUTE_CUSTOM_ENDPOINT": rest.address,
        }


def test_google_cloud_quotas_by_the_metric_of_the_machine() -> None:
    quotas = [
        {"metric": "CPUS", "limit": 72.0, "usage": 0.0},
        {"metric": "NVIDIA_H100_GPUS", "limit": 16.0, "usage": 8.0},
        {"metric": "PREEMPTIBLE_NVIDIA_H100_GPUS", "limit": 0.0, "usage": 0.0},
    ]
    h100 = pool("gcp", "a3-highgpu-8g", region="us-central1", accelerators_per_node=8)
    with google_cloud(quotas) as environment:
        one, two = check(environment, h100), check(environment, {**h100, "nodes": 2})
        spot = check(environment, {**h100, "spot": True})
        other = check(environment, pool("gcp", "v5p-8", region="us-central1"))
    assert line(one, "quota").found == "NVIDIA_H100_GPUS: 16 in all, 8 in use; the pool needs 8"
    assert (line(one, "quota").result, line(two, "quota").result, line(spot, "quota").result) == (
        "pass",
        "fail",
        "fail",
    )
    assert line(other, "quota").result == "warn" and "not known here" in line(other, "quota").found
    # Terraform may find credentials that are looked for nowhere here.
    without = check({}, h100)
    assert not without.failed and "GOOGLE_CREDENTIALS" in line(without, "credentials").found


def test_the_project_of_the_provider_block_is_asked() -> None:
    h100 = pool("gcp", "a3-highgpu-8g", region="us-central1", accelerators_per_node=8)

    def asked(environment: dict[str, str], **block: Any) -> list[Line]:
        return clouds.check_pools([{**h100, "configuration": block}], environment=environment)["p"]

    with google_cloud([{"metric": "NVIDIA_H100_GPUS", "limit": 16.0, "usage": 0.0}]) as environment:
        elsewhere = {**environment, "GOOGLE_PROJECT": "other"}
        for given, block in ((elsewhere, {"project": "research"}), (environment, {})):
            assert [each.result for each in asked(given, **block)] == ["pass", "pass", "warn"], given
        assert asked(elsewhere)[0].result == "warn"  # the server has no such project
        # The other variables of Terraform's provider, in its order.
        named = {"GOOGLE_CLOUD_PROJECT" if name == "GOOGLE_PROJECT" else name: v for name, v in environment.items()}
        assert asked(named)[0].result == "pass"
        # A block of the stack's own that is somebody else, or of a project that is not known yet.
        for block in ({"impersonate_service_account": "a@b"}, {"project": "${var.project}"}):
            [first, _] = asked(environment, **block)
            [name] = block
            assert (first.check, first.result) == ("credentials", "warn") and first.found.endswith(f", by {name}")


def test_a_subscription_is_no_login() -> None:
    with serving({"/api/retail/prices": {"Items": []}}) as rest:
        environment = {"SKYINFRA_AZURE_PRICES_URL": rest.address, "ARM_SUBSCRIPTION_ID": "0"}
        wanted = pool("azure", "Standard_NC24ads_A100_v4", region="eastus")
        alone = line(check(environment, wanted), "credentials")
        client = dict.fromkeys(("ARM_TENANT_ID", "ARM_CLIENT_ID", "ARM_CLIENT_SECRET"), KEY)
        declared = {**wanted, "configuration": {"subscription_id": "1"}}
        whole = clouds.check_pools([declared], environment={"SKYINFRA_AZURE_PRICES_URL": rest.address, **client})["p"]
    assert alone.result == "warn" and "az login" in alone.to_do
    assert alone.found.startswith("ARM_SUBSCRIPTION_ID says which account, and not who logs in")
    assert whole[0].result == "pass"


def test_a_quota_has_what_the_stack_has_once_and_what_its_pools_need_together(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = pool("gcp", "a3-highgpu-8g", region="us-central1", accelerators_per_node=8)
    nodes = [ManifestNode(f"p-{n}", str(n), "10.0.0.1", machine_type="a3-highgpu-8g", head=not n) for n in range(2)]
    fleet = Manifest(1, "s", "p", "gcp", Endpoint("10.0.0.1", 1), tuple(nodes), (), "secret")
    with google_cloud([{"metric": "NVIDIA_H100_GPUS", "limit": 24.0, "usage": 16.0}]) as environment:
        new = check(environment, {**h100, "nodes": 3})
        monkeypatch.setattr(SynthesizedStack, "known_fleets", lambda self: {"p": fleet})
        grown, other = check(environment, {**h100, "nodes": 3}), {**h100, "name": "q", "nodes": 2}
        two = check(environment, {**h100, "nodes": 2}, other)
        one = check(environment, h100, {**other, "spot": True})
    assert line(new, "quota").result == "fail" and line(grown, "quota").result == "pass"
    assert line(grown, "quota").found == "NVIDIA_H100_GPUS: 24 in all, 0 in use by others; the pool needs 24"
    quotas = [each for each in two.lines if each.check == "quota"]
    assert [each.result for each in quotas] == ["fail", "fail"]
    assert quotas[1].found.endswith("the pool needs 16, the pools p, q together 32")
    assert next(each for each in one.lines if each.check == "quota").result == "pass"


def test_lambda_lists_where_it_has_capacity() -> None:
    kind = {"name": "gpu_1x_h100_pcie", "price_cents_per_hour": 329, "specs": {"gpus": 1, "vcpus": 26}}
    answers = {
        "/api/v1/instances": {"data": []},
        "/api/v1/instance-types": {
            "data": {"gpu_1x_h100_pcie": {"instance_type": kind, "regions_with_capacity_available": []}}
        },
    }
    with serving(answers) as rest:
        environment = {"LAMBDALABS_API_KEY": KEY, "SKYINFRA_LAMBDA_URL": rest.address}
        report = check(environment, pool("lambda", "gpu_1x_h100_pcie", region="us-west-3"))
    assert line(report, "machine").found == "gpu_1x_h100_pcie is nowhere to be had now" and report.failed
    assert "costs $3.29/h on-demand now" in line(report, "price").found


def test_several_gpus_of_runpod_are_several_of_one() -> None:
    gpu = {"id": "NVIDIA H100 PCIe", "name": "H100 PCIe", "memory": 80, "secure": True, "availability": "HIGH"}
    answers = {"/v2/pods": [], "/v2/catalog/gpus": {"gpus": [{**gpu, "price": {"secure": 2.5}}]}}
    with serving(answers) as rest:
        environment = {"RUNPOD_API_KEY": KEY, "RUNPOD_API_BASE_URL": rest.address}
        report = check(environment, pool("runpod", "8x NVIDIA H100 PCIe (secure)", region="all regions"))
    assert "lists 8x NVIDIA H100 PCIe (secure)" in line(report, "machine").found
    assert line(report, "price").usd_per_hour == 20.0


def test_an_offer_of_a_marketplace_is_known_by_its_like() -> None:
    row = {
        "id": 1,
        "gpu_name": "H100 SXM",
        "num_gpus": 8,
        "gpu_ram": 81559,
        "dph_total": 15.5,
        "geolocation": "Norway, NO",
    }
    offers = [{**row, "id": 2, "num_gpus": 4, "dph_total": 1.0}, {**row, "id": 3, "dph_total": 16.0}, row]
    answers = {"/api/v0/users/current/": {}, "/api/v0/bundles/": {"offers": offers}}
    with serving(answers) as rest:
        environment = {"VASTAI_API_KEY": KEY, "VASTAI_API_URL": rest.address}
        report = check(environment, pool("vastai", "8x-H100_SXM-32-65536", region="all regions"))
    assert line(report, "price").usd_per_hour == 15.5 and line(report, "machine").result == "pass"


def test_providers_that_take_no_such_questions_say_what_else_to_ask() -> None:
    for provider, words in (("oci", "oci limits value list"), ("nebius", "gRPC"), ("crusoe", "signed questions")):
        report = check({}, pool(provider, "any", region="here"))
        assert words in line(report, "not asked").found
        # Nebius has no way in besides: its provider block names the variables.
        assert report.failed is (provider == "nebius")


def test_every_table_says_where_it_comes_from_and_what_cannot_be_asked() -> None:
    for kind in providers.kinds():
        asked = providers.read(kind).preflight
        assert asked is not None, kind
        if not (asked.nothing or asked.module):
            assert asked.unasked and asked.source and asked.date and asked.login, kind


def test_a_provider_without_a_table_is_a_warning() -> None:
    report = check({}, pool("coreweave", "H100"))
    assert [each.result for each in report.lines] == ["warn"] and "coreweave" in report.lines[0].found


def test_machines_that_stand_already_are_not_asked_for() -> None:
    report = check({}, pool("local", "local"), {**pool("ssh", "ssh"), "name": "q"})
    assert [each.result for each in report.lines] == ["pass", "pass"]
    assert report.lines[0].found == "nothing to check: its nodes are processes on this machine"
