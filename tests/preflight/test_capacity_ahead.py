"""Capacity that is bought ahead: what is on sale, a purchase that is made once, and waiting until it begins."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError
from front_ends.schemas import valid
from moto_aws.account import Cloud
from servers.rest import serving
from terraform_projects.synthesized import synthesized
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli import offers as command
from skyinfra.cli import stacks
from skyinfra.cli.app import app
from skyinfra.errors import CapacityUnavailable, CloudPermissionDenied, CloudRefused, InvalidField
from skyinfra.preflight import api
from skyinfra.preflight.capacity import Block, begun, blocks, buy
from skyinfra.preflight.pool_inputs import PoolInputs, read

# Each question to the simulated account takes its time.
pytestmark = pytest.mark.slow

Make = Callable[..., sky.ComputePool]

DECLARED = {"capacity": sky.CapacityBlock(id="cr-0b10c4"), "zones": ["us-east-1c"]}
BEGINS = datetime(2027, 1, 2, 11, 30, tzinfo=UTC)
BLOCK = Block("cbo-1", "p5.48xlarge", 4, "us-east-1c", BEGINS, BEGINS + timedelta(days=1), 24, 2500.5)


def offering(name: str, usd: str, *, day: int = 2, zone: str = "us-east-1c", hours: int = 24) -> dict[str, Any]:
    begins = BEGINS.replace(day=day)
    return {
        "CapacityBlockOfferingId": name,
        "InstanceType": "p5.48xlarge",
        "InstanceCount": 4,
        "AvailabilityZone": zone,
        "StartDate": begins,
        "EndDate": begins + timedelta(hours=hours),
        "CapacityBlockDurationHours": hours,
        "UpfrontFee": usd,
    }


def of(pool: sky.ComputePool, folder: Path) -> PoolInputs:
    stack = synthesized(folder, pool)
    return read(stack, stack.pools[0])


def on_sale(cloud: Cloud, *found: dict[str, Any]) -> list[dict[str, Any]]:
    """Offers these; what was asked for."""
    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"CapacityBlockOfferings": list(found)}

    cloud.answer("ec2", "DescribeCapacityBlockOfferings", answer)
    return asked


def sold(cloud: Cloud) -> list[dict[str, Any]]:
    """Sells whatever is asked for; the purchases."""
    made: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        made.append(request)
        return {"CapacityReservation": {"CapacityReservationId": "cr-0b10c4", "State": "payment-pending"}}

    cloud.answer("ec2", "PurchaseCapacityBlock", answer)
    return made


def test_blocks_on_sale_the_cheapest_first(cloud: Cloud, pool: Make, tmp_path: Path) -> None:
    dear, cheap, later = offering("cbo-1", "2500.5"), offering("cbo-2", "900", day=5), offering("cbo-3", "900", day=9)
    asked = on_sale(cloud, dear, later, cheap)
    inputs = of(pool("H100:8", nodes=3), tmp_path)
    found = blocks(inputs, days=1, session=cloud.session)
    assert [each.id for each in found] == ["cbo-2", "cbo-3", "cbo-1"]
    # It is sold in sizes.
    assert (asked[0]["InstanceType"], asked[0]["InstanceCount"], asked[0]["CapacityDurationHours"]) == (
        "p5.48xlarge",
        4,
        24,
    )
    assert found[2] == BLOCK and found[2].usd_per_hour == pytest.approx(2500.5 / 96)
    assert str(found[2]) == (
        "4 x p5.48xlarge in us-east-1c from 2027-01-02 11:30 UTC to 2027-01-03 11:30 UTC for $2,500.50"
    )
    assert "EndDateRange" not in asked[0]
    blocks(inputs, days=14, before=BEGINS, session=cloud.session)
    assert asked[1]["CapacityDurationHours"] == 336 and asked[1]["EndDateRange"].startswith("2027-01-16T11:30")


def test_blocks_in_other_zones_than_the_pool_are_none_for_it(cloud: Cloud, pool: Make, tmp_path: Path) -> None:
    on_sale(cloud, offering("cbo-1", "1", zone="us-east-1a"), offering("cbo-2", "2", zone="us-east-1c"))
    inputs = of(pool("H100:8", nodes=4, aws={"zones": ["us-east-1c"]}), tmp_path)
    assert [each.id for each in blocks(inputs, session=cloud.session)] == ["cbo-2"]


@pytest.mark.parametrize("days", [0, 15, 20, 183, 189])
def test_days_that_are_not_sold(cloud: Cloud, pool: Make, tmp_path: Path, days: int) -> None:
    with pytest.raises(InvalidField, match="1 to 14, or whole weeks, up to 182"):
        blocks(of(pool("H100:8"), tmp_path), days=days, session=cloud.session)


def test_a_purchase_has_the_names_of_its_pool(cloud: Cloud, pool: Make, tmp_path: Path) -> None:
    made = sold(cloud)
    assert buy(of(pool("H100:8", nodes=4), tmp_path), BLOCK, session=cloud.session) == "cr-0b10c4"
    (asked,) = made
    assert (asked["CapacityBlockOfferingId"], asked["InstancePlatform"]) == ("cbo-1", "Linux/UNIX")
    tags = {asked[f"TagSpecification.1.Tag.{n}.Key"]: asked[f"TagSpecification.1.Tag.{n}.Value"] for n in (1, 2, 3)}
    assert (tags["skyinfra:stack"], tags["skyinfra:pool"]) == ("s", "p") and len(tags["skyinfra:purchase"]) == 32


@pytest.mark.parametrize("there", [True, False])
def test_a_purchase_whose_answer_is_lost_is_not_made_again(
    cloud: Cloud, pool: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """It would be paid twice. By its tag it is found where it was made."""
    asked: list[str] = []

    def answer(_: dict[str, str], __: dict[str, list[str]], body: bytes) -> Any:
        asked.append(body.decode())
        if "Action=PurchaseCapacityBlock" in asked[-1]:
            return 500
        of_purchase = there and "purchase" in asked[-1]
        item = "<item><capacityReservationId>cr-9</capacityReservationId></item>" if of_purchase else ""
        return (
            '<DescribeCapacityReservationsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
            f"<capacityReservationSet>{item}</capacityReservationSet></DescribeCapacityReservationsResponse>"
        ).encode()

    inputs = of(pool("H100:8", nodes=4), tmp_path)
    with serving({"/": answer}) as rest:
        monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", rest.address)
        session = boto3.Session(region_name="us-east-1")
        if there:
            assert buy(inputs, BLOCK, session=session) == "cr-9"
        else:
            with pytest.raises(CloudRefused, match="did not say whether the block was bought") as error:
                buy(inputs, BLOCK, session=session)
            assert "What was bought is paid" in str(error.value)
    purchases = [each for each in asked if "Action=PurchaseCapacityBlock" in each]
    assert len(purchases) == 1
    (mark,) = {part.partition("=")[2] for part in asked[-1].split("&") if part.startswith("Filter.1.Value.1=")}
    assert mark in purchases[0]
    if not there:
        assert f"Name=tag:skyinfra:purchase,Values={mark}" in str(error.value)


def test_one_that_was_bought_and_is_not_declared_comes_first(cloud: Cloud, pool: Make, tmp_path: Path) -> None:
    """The program that bought it was ended before it said so, perhaps."""
    asked: list[dict[str, Any]] = []
    found = {"CapacityReservationId": "cr-1", "State": "scheduled"}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"CapacityReservations": [found]}

    cloud.answer("ec2", "DescribeCapacityReservations", answer)
    made = sold(cloud)
    inputs = of(pool("H100:8", nodes=4), tmp_path)
    with pytest.raises(InvalidField, match=r"was bought for this pool already, and is scheduled \(given: 'cr-1'\)"):
        buy(inputs, BLOCK, session=cloud.session)
    assert {asked[0][f"Filter.{n}.Name"]: asked[0][f"Filter.{n}.Value.1"] for n in (1, 2)} == {
        "tag:skyinfra:stack": "s",
        "tag:skyinfra:pool": "p",
    }
    assert made == []
    assert buy(inputs, BLOCK, again=True, session=cloud.session) == "cr-0b10c4"
    # One that is over, and the one that is declared, keep nobody from the next.
    found |= {"State": "expired"}
    buy(inputs, BLOCK, session=cloud.session)
    found |= {"State": "active", "CapacityReservationId": "cr-0b10c4"}
    buy(of(pool("H100:8", nodes=4, aws=DECLARED), tmp_path), BLOCK, session=cloud.session)
    assert len(made) == 3


def test_a_purchase_that_is_refused(cloud: Cloud, pool: Make, tmp_path: Path) -> None:
    inputs = of(pool("H100:8", nodes=4), tmp_path)
    cloud.refuse("ec2", "PurchaseCapacityBlock", "InvalidCapacityBlockOfferingId.NotFound", "it is sold")
    with pytest.raises(CloudRefused, match="NotFound: it is sold") as error:
        buy(inputs, BLOCK, session=cloud.session)
    assert "skyinfra capacity s/p lists it again" in str(error.value)
    cloud.refuse("ec2", "PurchaseCapacityBlock", "UnauthorizedOperation", status=403)
    with pytest.raises(CloudPermissionDenied, match="ec2:PurchaseCapacityBlock"):
        buy(inputs, BLOCK, session=cloud.session)


def reserved(cloud: Cloud, state: str) -> None:
    found = {"CapacityReservationId": "cr-0b10c4", "State": state, "StartDate": BEGINS}
    cloud.answer("ec2", "DescribeCapacityReservations", {"CapacityReservations": [found]})


def test_what_has_begun(cloud: Cloud, pool: Make, tmp_path: Path) -> None:
    """skypilot#4155: waiting for a block that has not begun is what people need at half past one in the night."""
    inputs = of(pool("H100:8", nodes=4, aws=DECLARED), tmp_path)
    for state in ("payment-pending", "scheduled"):
        reserved(cloud, state)
        assert begun(inputs, session=cloud.session) == f"cr-0b10c4 is {state}, and begins at 2027-01-02 11:30 UTC"
    reserved(cloud, "active")
    assert begun(inputs, session=cloud.session) is None
    for state in ("payment-failed", "expired", "cancelled", "failed"):
        reserved(cloud, state)
        with pytest.raises(CapacityUnavailable, match=f"cr-0b10c4 is {state}"):
            begun(inputs, session=cloud.session)
    cloud.refuse("ec2", "DescribeCapacityReservations", "InvalidCapacityReservationId.NotFound")
    with pytest.raises(CapacityUnavailable, match="is not there"):
        begun(inputs, session=cloud.session)
    with pytest.raises(InvalidField, match="declares no capacity block"):
        begun(of(pool("H100:8", nodes=4, name="q"), tmp_path), session=cloud.session)


@pytest.fixture
def run(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``run(pool, "--days", "2")``: the command for a pool of the stack `s`."""
    monkeypatch.setattr(api, "_session", lambda region, profile: cloud.session)
    monkeypatch.setattr(command, "_LOOK_S", 0.01)

    def run(pool: sky.ComputePool, *arguments: str) -> Any:
        monkeypatch.setattr(stacks, "synthesize", lambda name: synthesized(tmp_path, pool))
        return CliRunner().invoke(app, ["capacity", f"s/{pool.name}", *arguments])

    return run


def test_the_command_lists_and_buys(cloud: Cloud, pool: Make, run: Callable[..., Any]) -> None:
    on_sale(cloud, offering("cbo-1", "2500.5"))
    made = sold(cloud)
    wanted = pool("H100:8", nodes=4)
    listed = run(wanted)
    assert listed.exit_code == 0, listed.output
    for word in ("cbo-1", "4 x p5.48xlarge", "us-east-1c", "2027-01-02 11:30", "2,500.50", "26.05"):
        assert word in listed.stdout
    document = valid("capacity", run(wanted, "--json").stdout)
    assert document["blocks"][0]["begins"] == "2027-01-02T11:30:00+00:00"
    # Nobody can be asked, so nothing is bought.
    assert run(wanted, "--buy", "cbo-1").exit_code == 2 and made == []
    # A program would get sentences.
    refused = run(wanted, "--buy", "cbo-1", "--yes", "--json")
    assert refused.exit_code == 2 and made == []
    bought = run(wanted, "--buy", "cbo-1", "--yes")
    assert bought.exit_code == 0 and len(made) == 1
    assert "which is paid now, and which AWS does not take back" in bought.stderr
    assert 'sky.AWS(capacity=sky.CapacityBlock(id="cr-0b10c4"), zones=["us-east-1c"])' in bought.stdout
    assert isinstance(run(wanted, "--buy", "cbo-2", "--yes").exception, InvalidField) and len(made) == 1


def test_the_command_buys_nothing_above_the_declared_price(cloud: Cloud, pool: Make, run: Callable[..., Any]) -> None:
    on_sale(cloud, offering("cbo-1", "25000"))
    made = sold(cloud)
    refused = run(pool("H100:8", nodes=4, max_hourly_cost=100), "--buy", "cbo-1", "--yes")
    assert isinstance(refused.exception, InvalidField) and made == []
    assert "$260.42 an hour and machine" in str(refused.exception) and "max_hourly_cost" in str(refused.exception)


def test_the_command_waits(cloud: Cloud, pool: Make, run: Callable[..., Any]) -> None:
    lost = EndpointConnectionError(endpoint_url="https://ec2")
    states: list[str | Exception] = ["payment-pending", "scheduled", "scheduled", lost, lost, "active"]

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        if isinstance(state := states.pop(0), Exception):
            raise state
        found = {"CapacityReservationId": "cr-0b10c4", "State": state, "StartDate": BEGINS}
        return {"CapacityReservations": [found]}

    cloud.answer("ec2", "DescribeCapacityReservations", answer)
    waited = run(pool("H100:8", nodes=4, aws=DECLARED), "--wait")
    assert waited.exit_code == 0 and states == []
    assert waited.stdout.strip() == "cr-0b10c4 has begun"
    assert waited.stderr.count("is scheduled") == 1 and waited.stderr.count("is payment-pending") == 1
    assert waited.stderr.count("no answer to ec2:DescribeCapacityReservations") == 1
    # What will not begin, and a first look without an answer, end it.
    for ends, *earlier in ((lost,), ("expired", "scheduled")):
        states[:] = [*earlier, ends]
        ended = run(pool("H100:8", nodes=4, aws=DECLARED), "--wait")
        assert isinstance(ended.exception, CloudRefused) and states == []


def test_elsewhere_nothing_is_bought_ahead(run: Callable[..., Any]) -> None:
    elsewhere = sky.ComputePool(name="p", accelerator="L4", provider=sky.GCP(project="p", region="us-central1"))
    refused = run(elsewhere)
    assert "on AWS alone" in str(refused.exception) and "flex_start_hours" in str(refused.exception)
