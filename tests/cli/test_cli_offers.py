from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from skyinfra import InvalidField, NotOffered
from skyinfra import providers as sky_providers
from skyinfra.cli.app import app
from skyinfra.deploy.cost import cost_of
from skyinfra.terminal.plans import _cost_remarks


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["offers", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_json() -> None:
    (offer,) = json.loads(run("A100-80GB:8", "--provider", "aws", "--json"))["offers"]
    assert (offer["machine_type"], offer["selected"], offer["count"], offer["memory_gb"]) == (
        "p4de.24xlarge",
        True,
        8,
        80,
    )
    assert offer["on_demand"] == {
        "usd_per_hour": 27.44705,
        "region": "us-east-1",
        "date": "2026-07-20",
        "basis": "listed",
    }
    assert (offer["efa_interfaces"], offer["network_cards"], offer["mig_model"]) == (4, 4, "a100_80gb")
    (offer,) = json.loads(run("A100-40GB:8", "--provider", "aws", "--json"))["offers"]
    assert offer["machine_type"] == "p4d.24xlarge"


def test_the_chosen_row_is_marked_and_prices_have_region_and_date() -> None:
    lines = run("H100:8", "--provider", "aws", "--provider", "azure").splitlines()
    assert lines[0].split()[:3] == ["PROVIDER", "MACHINE", "ACCELERATOR"]
    assert lines[1].startswith("->") and "p5.48xlarge" in lines[1]
    assert "$55.04 us-east-1 2026-07-20" in lines[1] and "~$26.42 us-east-1 2025-07-28" in lines[1]
    assert not lines[2].startswith("->") and "$98.32 eastus 2026-06-18" in lines[2]


def test_the_chosen_row_is_one_that_can_be_deployed() -> None:
    found = json.loads(run("H100:8", "--json"))["offers"]
    (selected,) = [offer for offer in found if offer["selected"]]
    deployable = [offer for offer in found if offer["deployable"]]
    assert selected == deployable[0] and selected["provider"] in sky_providers.deployable()
    assert all(bool(offer["not_deployable_because"]) != offer["deployable"] for offer in found)
    assert {o["partitioned_by"] for o in found if o["provider"] == "aws"} == {"tenant"}
    assert {o["partitioned_by"] for o in found if o["provider"] == "vastai"} == {"nobody"}
    assert {o["partitioned_by"] for o in json.loads(run("L4", "--json"))["offers"]} == {None}


def test_a_region_of_which_no_source_says_whether_it_has_the_machine() -> None:
    said = run("RTX PRO 4500", "--provider", "aws", "--region", "eu-west-1")
    assert "No source here says whether eu-west-1 has g7.2xlarge, g7.4xlarge, g7.8xlarge" in said
    assert "No source" not in run("RTX PRO 4500", "--provider", "aws", "--region", "us-east-1")


def test_a_machine_without_a_known_image_is_not_chosen() -> None:
    found = {o["machine_type"]: o for o in json.loads(run("V100-32GB:8", "--provider", "aws", "--json"))["offers"]}
    assert found and all(o["deployable"] and not o["selected"] for o in found.values())
    assert all("proprietary kernel modules" in o["refused_because"] for o in found.values())
    assert "own image" in run("V100-32GB:8", "--provider", "aws")
    (selected,) = [o for o in json.loads(run("MI300X", "--json"))["offers"] if o["selected"]]
    assert (selected["provider"], selected["refused_because"]) == ("digitalocean", None)


def test_a_machine_that_is_not_sold_on_demand_is_not_chosen() -> None:
    found = {o["machine_type"]: o for o in json.loads(run("H200:8", "--provider", "gcp", "--json"))["offers"]}
    (ultra,) = found.values()
    assert ultra["deployable"] and not ultra["sold_on_demand"] and not ultra["selected"]
    assert "not on demand" in run("H200:8", "--provider", "gcp")


def test_the_machines_that_a_network_for_rdma_connects() -> None:
    found = json.loads(run("H100", "--rdma", "--json"))["offers"]
    networks = {offer["provider"]: offer["rdma"] for offer in found}
    assert networks == {
        "aws": "EFA",
        "azure": "InfiniBand",
        "crusoe": "InfiniBand",
        "nebius": "InfiniBand",
        "oci": "RoCE",
    }
    assert next(o for o in found if o["provider"] == "nebius")["count"] == 8
    assert any(offer["rdma"] is None for offer in json.loads(run("H100", "--json"))["offers"])
    with pytest.raises(NotOffered, match="connects any of these machines"):
        run("L40S", "--provider", "nebius", "--rdma")


@pytest.mark.parametrize("slice_", ["TPUv5p_8", "TPUv4_64"])
def test_the_slices_of_the_offers_can_be_deployed(slice_: str) -> None:
    (found,) = json.loads(run(slice_, "--json"))["offers"]
    assert found["deployable"] and found["selected"]


def test_providers_that_cannot_be_deployed_to_say_why() -> None:
    lines = run("H100:1", "--provider", "coreweave").splitlines()
    assert all(not line.startswith("->") for line in lines)
    assert "no machine resource" in lines[-2] and "skyinfra render --format kubernetes" in lines[-2]
    assert lines[-1] == "This version of skyinfra can deploy none of them."
    assert not any(line.startswith("Not deployable") for line in run("H100:8", "--provider", "aws").splitlines())


def test_a_doubtful_price_is_marked_and_does_not_count() -> None:
    out = run("H100:8", "--provider", "gcp")
    assert "$43.07? us-central1 2026-05-20" in out and "? is a price that cannot be right" in out
    assert "a3-highgpu-8g" in out.splitlines()[1]  # at twice as much, but believed
    with pytest.raises(NotOffered):
        run("H100:8", "--provider", "gcp", "--max-price", "50")


def test_spot_sorts_and_limits() -> None:
    lines = run("H100:8", "--provider", "aws", "--provider", "azure", "--spot", "--max-price", "20").splitlines()
    assert "Standard_ND96isr_H100_v5" in lines[1] and "p5" not in lines[2]


def test_what_a_reader_must_know_is_said() -> None:
    out = run("L4", "--provider", "aws", "--region", "eu-west-2")
    assert "The on-demand prices are of us-east-1: none of eu-west-2 are known." in out
    assert "Left out: 5 with a share of one; --fraction 0.125 shows them." in out
    assert "g6f" not in out
    assert "g6f.large" in run("L4", "--fraction", "0.125")
    assert "~ is an estimate" in run("H100:8", "--provider", "aws", "--spot")
    assert "price of 1 of them is not known or doubtful" in run("H100:8")


def test_minima_and_preferences() -> None:
    assert "gr6.8xlarge" in run("L4:1", "--provider", "aws", "--vcpus", "30", "--ram", "200").splitlines()[1]
    assert "p5en.48xlarge" in run("H200:8,H100:8", "--provider", "aws").splitlines()[1]
    assert "NVIDIA RTX A5000 (community)" in run("--memory", "24", "--count", "1", "--max-price", "0.2")


def test_without_arguments_everything_is_listed() -> None:
    assert len(json.loads(run("--json"))["offers"]) == 519 - 14 - 8  # without legacy machines and shares


def test_nothing_found_and_wrong_names() -> None:
    with pytest.raises(NotOffered, match=r"p5\.48xlarge") as caught:
        run("H100:3", "--provider", "aws")
    assert caught.value.exit_code == 2
    for options, field in (
        (("--memory", "-1"), "--memory"),
        (("--ram", "0"), "--ram"),
        (("--max-price", "0"), "--max-price"),
    ):
        with pytest.raises(InvalidField, match=f"^{field}: must be more than 0"):
            run("H100", *options)
    with pytest.raises(NotOffered, match=r"with --max-price=1\.0\n(.|\n)*Without --max-price: aws p5\.48xlarge"):
        run("H100:8", "--provider", "aws", "--max-price", "1")
    with pytest.raises(InvalidField, match=r"^--provider: (.|\n)*Did you mean aws"):
        run("H100", "--provider", "awss")


def test_prices_of_more_than_twelve_months_ago_are_marked() -> None:
    """AWS's spot prices are of 2025-07-28; whatever the clock says after that year, they are old."""
    out = run("V100-32GB:8", "--provider", "aws")
    assert "us-east-1 2025-07-28 (old)" in out and "skyinfra offers --refresh asks for those of now" in out
    pool = {"name": "mig", "provider": "aws", "region": "us-east-1", "nodes": 1, "machine_types": ["p3.16xlarge"]}
    price = {"usd_per_hour": 3.0, "region": "us-east-1", "date": "2025-07-28"}
    (said,) = [line for line in _cost_remarks(cost_of([{**pool, "prices": {"p3.16xlarge": price}}])) if "ago" in line]
    assert said == "mig: the price is of 2025-07-28, more than 12 months ago."
