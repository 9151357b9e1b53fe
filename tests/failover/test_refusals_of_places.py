"""Refusals: which part of a cloud they are about, and for how long they count."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from skyinfra.failover import blocks
from skyinfra.places.choices import Choice
from skyinfra.providers import kinds, read
from skyinfra.terraform.cloud_errors import Refusal, refusals

NOW = datetime(2026, 11, 26, 5, tzinfo=UTC)
ROWS = blocks._table()["answers"]


def place(name: str, provider: str = "aws", region: str = "us-east-1", **more: Any) -> dict[str, Any]:
    given = {"place": name, "provider": provider, "region": region, "zones": [], "machine_types": ["p5.48xlarge"]}
    return {**given, **more}


def refusal(says: str, cause: str = "CapacityUnavailable") -> Refusal:
    return Refusal(cause, "", "module.t.aws_instance.head", "", says, "")


def blocked(says: str, *places: dict[str, Any], cause: str = "CapacityUnavailable", later: float = 0.5) -> list[str]:
    """The names of *places* that are blocked *later*, in hours, after the first has refused and *says* why."""
    record = blocks.refused(refusal(says, cause), places[0], says, NOW)
    pool = {"place": places[0]["place"], "places": list(places)}
    found = blocks.place_states(pool, Choice(refused=(record,)), NOW + timedelta(hours=later))
    return [each.place["place"] for each in found if each.until]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["pattern"][:40])
def test_each_row_is_in_its_quotations(row: dict[str, Any]) -> None:
    assert row["provider"] in kinds() and row["quotes"]
    for words, where in row["quotes"]:
        match = re.search(row["pattern"], words)
        assert match and where
        # The answer is known to be a refusal for want of capacity or quota.
        assert any(match.groupdict().values()) or row["level"] in ("region", "cloud")
        errors = [each for each in read(row["provider"]).errors if blocks.moves(each["cause"])]
        texts = "|".join(text for each in errors for text in each["texts"]) or "(?!)"
        assert re.search(texts, words) or any(code in words for each in errors for code in each["codes"]), words


def test_a_zone_is_blocked_where_the_answer_names_it() -> None:
    says = (
        "We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested (us-east-1a)."
    )
    a, b = place("a", zones=["us-east-1a"]), place("b", zones=["us-east-1b"])
    same, other = place("same", zones=["us-east-1a"], account="research"), place("m", zones=["us-east-1a"])
    other["machine_types"] = ["p4d.24xlarge"]
    assert blocked(says, a, b, same, other) == ["a", "same"]


def test_a_region_is_blocked_with_its_zones_and_a_quota_in_its_account_alone() -> None:
    says = "You have requested more vCPU capacity than your current vCPU limit of 0 allows"
    a, b = place("a", zones=["us-east-1a"], account="x"), place("b", zones=["us-east-1b"], account="x")
    other, west = place("other", account="y"), place("west", region="us-west-2", account="x")
    assert blocked(says, a, b, other, west, cause="QuotaExceeded") == ["a", "b"]


def test_a_cloud_is_blocked_where_the_account_has_nothing_left() -> None:
    all_of_it = {"provider": "gcp", "region": "us-central1"}
    a, b = place("a", **all_of_it), place("b", **all_of_it, machine_types=["a2-highgpu-8g"])
    says = "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally."
    assert blocked(says, a, b, place("aws"), cause="QuotaExceeded") == ["a", "b"]


def test_the_answers_of_google_cloud_are_those_of_its_slices() -> None:
    slices = {"provider": "gcptpu", "region": "us-central1", "machine_types": ["v5p-8"]}
    a, b = place("a", zones=["us-central1-a"], **slices), place("b", zones=["us-central1-b"], **slices)
    same = place("same", zones=["us-central1-b"], **slices)
    says = 'There is no more capacity in the zone "us-central1-b"; you can try in another zone'
    assert blocked(says, b, a, same) == ["b", "same"]
    quota = "Quota 'TPUV5PPerProjectPerRegionForTPUAPI' exhausted. Limit 0 in region us-central1"
    assert blocked(quota, a, b, cause="QuotaExceeded") == ["a", "b"]


def test_a_quota_of_lambda_is_known_by_its_message_alone() -> None:
    says = "Could not create instance, unexpected error: Quota exceeded."
    [found] = refusals([("module.t.lambdalabs_instance.node[0]", says)])
    assert found.cause == "QuotaExceeded" and blocks.moves(found.cause)
    a, b = (place(name, "lambda", region) for name, region in (("a", "us-east-1"), ("b", "us-west-1")))
    assert blocked(says, a, b, place("aws"), cause="QuotaExceeded") == ["a", "b"]


def test_an_answer_that_names_nothing_is_about_the_place_that_was_asked() -> None:
    assert blocked("There is no Spot capacity available that matches your request.", place("a"), place("b")) == ["a"]


@pytest.mark.parametrize(("cause", "hours"), [("CapacityUnavailable", 1), ("QuotaExceeded", 24)])
def test_refusals_age(cause: str, hours: float) -> None:
    assert blocked("x", place("a"), cause=cause, later=hours - 0.01) == ["a"]
    assert blocked("x", place("a"), cause=cause, later=hours + 0.01) == []


def test_a_refusal_that_blocks_nothing_any_more_is_remembered_for_a_week() -> None:
    record = blocks.refused(refusal("x"), place("a"), "x", NOW)
    for hours, kept, words in ((0.5, True, "30 minutes ago"), (30, True, "30 hours ago"), (100, True, "4 days ago")):
        later = NOW + timedelta(hours=hours)
        assert (blocks.aged([record], later) == (record,)) is kept and blocks.ago(record, later) == words
        [state] = blocks.place_states({"place": "a", "places": [place("a")]}, Choice(refused=(record,)), later)
        assert state.last == record and state.free is (hours > 1)
    later = NOW + timedelta(days=7, minutes=1)
    assert blocks.aged([record], later) == ()
    [state] = blocks.place_states({"place": "a", "places": [place("a")]}, Choice(refused=(record,)), later)
    assert state.last is None


def test_credentials_are_no_reason_to_go_elsewhere() -> None:
    causes = {each["cause"] for kind in kinds() for each in read(kind).errors}
    assert {each for each in causes if blocks.moves(each)} == {"CapacityUnavailable", "QuotaExceeded"}


def test_credentials_that_are_missing_for_certain_are_said() -> None:
    runpod = place("r", provider="runpod", region=None)
    assert "RUNPOD_API_KEY not set" in blocks.missing_credentials(runpod, {})
    assert blocks.missing_credentials(runpod, {"RUNPOD_API_KEY": "x"}) == ""
    # Terraform may find those elsewhere, such as in a file.
    assert blocks.missing_credentials(place("a"), {}) == ""
