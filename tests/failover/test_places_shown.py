"""`skyinfra offers --for STACK/POOL`: the order of the places, and what has refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.cli.offers import show_places
from skyinfra.places.choices import Choice, Choices, Refused


def test_the_order_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    synthesized(tmp_path, sky.ComputePool(name="t", accelerator="H100:8", provider=[sky.AWS(), sky.GCP()]))
    at = datetime.now(UTC).isoformat(timespec="seconds")
    refused = Refused("aws us-east-1", at, "QuotaExceeded", {}, "VcpuLimitExceeded", "You have requested more.")
    Choices.read(tmp_path).having("s/t", Choice(refused=(refused,)))
    monkeypatch.chdir(tmp_path)
    show_places("s/t", as_json=True)
    aws, gcp = json.loads(capsys.readouterr().out)["places"]
    assert aws["selected"] and aws["blocked_until"] and "for quota: You have requested more;" in aws["state"]
    assert not gcp["selected"] and gcp["state"] == "free to try" and gcp["usd_per_hour"] > aws["usd_per_hour"]
    show_places("s/t")
    printed = capsys.readouterr().out
    assert "a3-highgpu-8g" in printed and "$55.04" in printed


@pytest.mark.parametrize(
    ("fleet", "says"), [("s", "expected STACK/POOL"), ("s/x", "no such pool"), ("s/t", "one place")]
)
def test_what_has_no_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: str, says: str) -> None:
    synthesized(tmp_path, sky.ComputePool(name="t", accelerator="H100:8", provider=sky.AWS()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sky.SkyinfraError, match=says):
        show_places(fleet)
