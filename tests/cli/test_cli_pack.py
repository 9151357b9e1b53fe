from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from skyinfra import DemandDoesNotFit, InvalidDemand, InvalidField, NotOffered, mig
from skyinfra.cli.app import app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["mig", "pack", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_json() -> None:
    made = json.loads(run("1g.10gb*20,3g.40gb*4", "--provider", "aws", "--json"))
    assert (made["status"], made["gap"], made["bound"]) == ("optimal", 0, made["cost_per_hour"])
    cost = sum(each["nodes"] * each["price"]["usd_per_hour"] for each in made["machines"])
    assert cost == pytest.approx(made["cost_per_hour"])
    partitions = 0
    for each in made["machines"]:
        assert each["provider"] == "aws" and each["price"]["region"] == "us-east-1" and each["price"]["date"]
        for gpu in each["gpus"]:
            assert all(set(each) == {"profile", "start", "size"} for each in gpu["partitions"])
            partitions += each["nodes"] * len(gpu["partitions"])
    assert sum(each["count"] for each in made["given"]) == 24
    assert partitions == 24 + sum(each["count"] for each in made["spare"])
    assert {each["wanted"]: each["count"] for each in made["demand"]} == {"1g.10gb": 20, "3g.40gb": 4}
    assert made["waste"]["asked"] == 360
    assert "sky.ComputePool(" in made["source"]


def test_pluses_join_a_demand_as_commas_do() -> None:
    joined = run("1g.10gb+me*2 + 3g.40gb*4+2x>=18GB", "--provider", "aws", "--json")
    assert joined == run("1g.10gb+me*2, 3g.40gb*4, 2x>=18GB", "--provider", "aws", "--json")
    assert {each["wanted"]: each["count"] for each in json.loads(joined)["demand"]} == {
        "1g.10gb+me": 2,
        "3g.40gb": 4,
        ">=18GB": 2,
    }


def test_for_a_person() -> None:
    out = run("1g.10gb*20, 3g.40gb*4, >=18GB*6", "--provider", "aws")
    assert out.startswith("3g.40gb*4, >=18GB*6, 1g.10gb*20 on 1 machine for $27.45/h, optimal")
    assert "p4de.24xlarge" in out and "$27.45 us-east-1 2026-07-20" in out
    assert ">=18GB*6: 6 x 2g.20gb of A100" in out
    assert "spare: 1 x 7g.80gb of A100, 1 x 1g.10gb of A100" in out
    assert "waste: 27% of 640 GB bought" in out
    assert "left out: 20 (not an NVIDIA GPU)" in out
    assert "quotas of your account are not known" in out
    source = out[out.index("import skyinfra as sky") :]
    space: dict[str, object] = {}
    exec(source, space)
    (pool,) = space["pools"]  # type: ignore[misc]
    (accelerator,) = pool.accelerators
    assert isinstance(accelerator.mig, mig.PerGpu) and accelerator.count == 8


def test_prices_are_never_silently_of_another_region() -> None:
    out = run("1g.10gb*7", "--provider", "aws", "--region", "eu-west-2")
    assert "Prices are of us-east-1: none of eu-west-2 are known." in out
    notes = json.loads(run("7g.269gb", "--provider", "aws", "--json"))["notes"]
    assert "Prices are of us-east-1: none of us-west-2 are known." in notes
    assert "~ is an estimate" in run("1g.10gb", "--provider", "aws", "--spot")


def test_exact_and_limits() -> None:
    exact = json.loads(run("1g.10gb*3", "--provider", "aws", "--exact", "--json"))
    assert {each["profile"] for each in exact["given"]} == {"1g.10gb"}
    assert "whole L4" in run(">=18GB*2", "--provider", "aws")
    assert "# It cannot be declared: CoreWeave" in run(">=40GB", "--provider", "coreweave")
    with pytest.raises(DemandDoesNotFit, match=r"--max-nodes: .*\nAt least 2 are needed"):
        run("1g.10gb*100", "--provider", "aws", "--max-nodes", "1")


def test_wrong_usage() -> None:
    with pytest.raises(InvalidDemand) as caught:
        run("1g.10gb and 2g.20gb")
    assert caught.value.exit_code == 2
    with pytest.raises(InvalidField, match=r"^--max-nodes: a number of machines from 1"):
        run("1g.10gb", "--max-nodes", "0")
    with pytest.raises(NotOffered) as nobody:
        run(">=300GB")
    assert nobody.value.exit_code == 2
