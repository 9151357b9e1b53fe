"""Deploys that clouds refuse for want of capacity, by a real Terraform and providers of the mock bed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.failing_clouds import (
    AMAZON,
    AWS_MACHINE,
    EAST,
    GOOGLE_MACHINE,
    NO_AWS,
    NO_ROOM,
    ZONE_A,
    ZONE_B,
    Deploys,
    everywhere,
    exhausted,
)
from mock_provider.world import Failure
from moto import mock_aws
from moto_aws.account import Cloud

import skyinfra as sky
from skyinfra.deploy.apply import planned
from skyinfra.deploy.last_run import last_run
from skyinfra.failover.live_places import Known
from skyinfra.places.choices import NAME
from skyinfra.preflight.report import Line
from skyinfra.terraform.synthesized import SynthesizedStack


def test_zone_then_region_then_cloud(deploys: Deploys) -> None:
    deploys.bed.world.fail(*map(exhausted, ("us-central1-a", "us-central1-b", "us-east1-b")))
    assert deploys.failover().deploy() is not None
    assert deploys.machines() == {AWS_MACHINE: 1}
    # Networks that were made before the refusals are gone with the places.
    assert deploys.modules() == {"t__aws-us-east-1"}
    assert not deploys.bed.world.existing("google_compute_network")
    assert deploys.choice()["place"] == AMAZON and deploys.choice()["first"] == ZONE_A
    assert [each["where"].get("zone") for each in deploys.choice()["refused"]] == [
        *("us-central1-a", "us-central1-b", "us-east1-b")
    ]
    assert deploys.asked[-1] == "t: go on with aws us-east-1, p4d.24xlarge, at $21.96/h in place of $29.39/h?"
    assert any("us-central1-a p refuses: The zone 'projects/p/zones/us-central1-a'" in each for each in deploys.said)
    # It stands there from now on.
    with planned(deploys.synthesize()) as (_, plan):
        assert plan.empty
    assert deploys.failover().deploy() is not None and deploys.machines() == {AWS_MACHINE: 1}


@pytest.mark.slow
def test_a_place_more_changes_nothing_of_a_fleet_that_stands(deploys: Deploys) -> None:
    deploys.places = lambda: everywhere()[0]
    alone = deploys.synthesize()
    assert deploys.failover().deploy() is not None
    deploys.places = everywhere
    several = deploys.synthesize()
    assert several.modules == alone.modules
    with planned(several) as (_, plan):
        assert plan.empty
    assert not (deploys.project / NAME).exists()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["before what was made is removed", "after it"])
def test_a_process_that_was_killed_between_two_places_goes_on(deploys: Deploys, at: str) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> Any:
        raise Killed

    deploys.bed.world.fail(exhausted("us-central1-a"))
    first = deploys.failover()
    if at == "after it":
        first.synthesize = killed
    else:
        first._remove = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.deploy()
    left = deploys.modules()
    assert left == (set() if at == "after it" else {"t"})
    assert deploys.choice()["place"] == ZONE_B
    assert deploys.failover().deploy() is not None
    assert deploys.modules() == {"t__gcp-us-central1-us-central1-b-p"} and deploys.machines() == {GOOGLE_MACHINE: 1}
    removed = "t: remove what gcp us-central1 us-central1-a p has left?"
    assert (removed in deploys.asked) is bool(left)


@pytest.mark.slow
def test_refused_in_every_place(deploys: Deploys) -> None:
    deploys.bed.world.fail(*map(exhausted, ("us-central1-a", "us-central1-b", "us-east1-b")), NO_AWS)
    with pytest.raises(sky.CapacityUnavailable) as caught:
        deploys.failover().deploy()
    text = str(caught.value)
    for place in (ZONE_A, ZONE_B, EAST, AMAZON):
        assert f"\n{place}: refused at " in text, text
    assert "tried again from" in text and "skyinfra destroy s" in text
    assert deploys.machines() == {} and deploys.modules() == {"t__aws-us-east-1"}
    # Whoever deploys again has them all tried again, from the first on.
    deploys.bed.world.fail()
    assert deploys.failover().deploy() is not None
    assert any("every place has refused; they are tried again" in each for each in deploys.said)
    assert deploys.modules() == {"t"} and deploys.machines() == {GOOGLE_MACHINE: 1}


@pytest.mark.slow
def test_an_answer_that_leaves_open_what_was_made_moves_nothing(deploys: Deploys) -> None:
    timeout = "Error waiting for instance to create: timeout while waiting for state to become 'DONE'"
    deploys.bed.world.fail(Failure("create", GOOGLE_MACHINE, timeout, leaves="tainted", times=1))
    with pytest.raises(sky.TerraformFailed) as caught:
        deploys.failover().deploy()
    assert not isinstance(caught.value, sky.CloudRefused) and not deploys.asked
    assert not (deploys.project / NAME).exists() and deploys.machines() == {GOOGLE_MACHINE: 1}
    # The next one looks first: what was made is replaced, and not made twice.
    assert deploys.failover().deploy() is not None
    assert deploys.machines() == {GOOGLE_MACHINE: 1} and deploys.modules() == {"t"}


@pytest.mark.slow
def test_a_run_of_hcp_terraform_moves_nothing(deploys: Deploys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SynthesizedStack, "runs_elsewhere", True)
    deploys.bed.world.fail(exhausted("us-central1-a"))
    with pytest.raises(sky.CapacityUnavailable) as caught:
        deploys.failover().deploy()
    assert "name another place in skyinfra.places.json" in str(caught.value)
    assert not deploys.asked and not (deploys.project / NAME).exists() and deploys.modules() == {"t"}
    assert not any("cannot be tried" in each for each in deploys.said)


@pytest.mark.slow
def test_credentials_that_are_refused_are_no_want_of_capacity(deploys: Deploys) -> None:
    deploys.places = lambda: everywhere()[::-1]
    says = "operation error EC2: RunInstances, api error AuthFailure: AWS was not able to validate the credentials"
    deploys.bed.world.fail(Failure("create", AWS_MACHINE, says))
    with pytest.raises(sky.CloudCredentialsRefused):
        deploys.failover().deploy()
    assert not deploys.asked and not (deploys.project / NAME).exists()


@pytest.mark.slow
def test_a_fleet_that_serves_stays(deploys: Deploys) -> None:
    deploys.nodes = 1
    assert deploys.failover().deploy() is not None
    deploys.nodes = 2
    deploys.bed.world.fail(exhausted("us-central1-a"))
    with pytest.raises(sky.CapacityUnavailable, match="has nodes that serve, and stays where it is"):
        deploys.failover().deploy()
    assert deploys.machines() == {GOOGLE_MACHINE: 1} and not deploys.asked


@pytest.mark.slow
def test_who_says_no_keeps_the_file(deploys: Deploys) -> None:
    deploys.answer = False
    deploys.bed.world.fail(exhausted("us-central1-a"))
    with pytest.raises(sky.CapacityUnavailable, match=f"{NAME} is as it was"):
        deploys.failover().deploy()
    assert not (deploys.project / NAME).exists()


@pytest.mark.slow
def test_a_locked_state_moves_nothing(deploys: Deploys) -> None:
    deploys.bed.world.fail(exhausted("us-central1-a"))

    def locked(_: object, again: bool = False) -> Any:
        raise sky.StateLocked("the state is locked")

    with pytest.raises(sky.StateLocked):
        deploys.failover(attempt=locked).deploy()
    assert not deploys.asked and not (deploys.project / NAME).exists()


@pytest.mark.slow
def test_what_a_place_has_left_that_cannot_be_removed_is_for_the_next_deploy(deploys: Deploys) -> None:
    """A destroy of the stack would end all its other fleets."""
    says = "Error waiting for Deleting Network: it is in use"
    deploys.bed.world.fail(exhausted("us-central1-a"), Failure("delete", "google_compute_network", says))
    with pytest.raises(sky.TerraformFailed, match="it is in use") as caught:
        deploys.failover().deploy()
    assert "run `skyinfra deploy s` again." in str(caught.value) and "skyinfra destroy" not in str(caught.value)
    run = last_run(deploys.synthesize())
    assert run is not None and run.verb == "deploy" and "it is in use" in str(run.message)
    assert deploys.choice()["place"] == ZONE_B
    deploys.bed.world.fail()
    assert deploys.failover().deploy() is not None
    assert deploys.machines() == {GOOGLE_MACHINE: 1} and last_run(deploys.synthesize()) is None


@pytest.mark.slow
def test_missing_credentials_of_a_later_place_are_said_first(deploys: Deploys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    deploys.accelerator = "A100:8"
    deploys.places = lambda: [everywhere()[0], sky.RunPod()]
    said: list[str] = []

    def attempt(stack: SynthesizedStack, again: bool = False) -> Any:
        said.extend(deploys.said)
        raise sky.StateLocked("the state is locked")

    with pytest.raises(sky.StateLocked):
        deploys.failover(attempt=attempt).deploy()
    assert [each for each in said if "runpod cannot be tried: no credentials: RUNPOD_API_KEY not set" in each]


@pytest.mark.slow
def test_zones_and_accelerators_are_tried_in_order(deploys: Deploys) -> None:
    deploys.accelerator = ["A100-80GB:8", "A100-40GB:8"]
    deploys.places = lambda: everywhere()[0]
    machine = {"machine_type": "a2-ultragpu-8g"}
    zones = ("us-central1-a", "us-central1-b")
    deploys.bed.world.fail(
        *(Failure("create", GOOGLE_MACHINE, NO_ROOM.format(zone), {"zone": zone, **machine}) for zone in zones)
    )
    assert deploys.failover().deploy() is not None
    assert deploys.choice()["place"] == f"{ZONE_A} A100-40GB:8" and deploys.choice()["first"] == f"{ZONE_A} A100:8"
    assert deploys.modules() == {"t__gcp-us-central1-us-central1-a-p-a100-40gb-8"}
    # With one accelerator again it stays where it stands.
    deploys.accelerator = "A100-40GB:8"
    with planned(deploys.synthesize()) as (_, plan):
        assert plan.empty


@pytest.mark.slow
def test_a_list_of_accelerators_changes_nothing_of_a_fleet_that_has_moved(deploys: Deploys) -> None:
    deploys.bed.world.fail(exhausted("us-central1-a"))
    assert deploys.failover().deploy() is not None
    assert deploys.choice()["place"] == ZONE_B
    deploys.accelerator = ["A100-40GB:8", "A100-80GB:8"]
    with planned(deploys.synthesize()) as (_, plan):
        assert plan.empty


@pytest.mark.slow
def test_the_cheapest_begins_at_the_price_of_now_and_never_above_the_limit(deploys: Deploys) -> None:
    asked: list[str] = []

    def look(stack: SynthesizedStack, pool: Any) -> dict[str, Known]:
        asked.append(pool["name"])
        dear = Line("t", "price", "fail", "costs $99.00/h now; max_hourly_cost is $50.00")
        return {AMAZON: Known(99.0, (dear,)), ZONE_A: Known(14.0), ZONE_B: Known(16.0)}

    deploys.places = lambda: sky.cheapest(everywhere())
    deploys.bed.world.fail(exhausted("us-central1-a"))
    assert deploys.failover(look=look).deploy() is not None
    assert asked == ["t"] and deploys.said[0] == f"t: {ZONE_A} is the cheapest now, at $14.00/h"
    assert deploys.asked == [f"t: go on with {ZONE_B}, a2-highgpu-8g, at $16.00/h in place of $29.39/h?"]
    assert deploys.modules() == {"t__gcp-us-central1-us-central1-b-p"} and deploys.choice()["first"] == "none"
    # It stands there, whatever the prices become, and nobody asks for them.
    assert deploys.failover(look=look).deploy() is not None
    assert asked == ["t"] and deploys.machines() == {GOOGLE_MACHINE: 1}


@pytest.mark.slow
def test_where_every_place_is_too_dear_nothing_is_made(deploys: Deploys) -> None:
    dear = Known(99.0, (Line("t", "price", "fail", "costs $99.00/h now; max_hourly_cost is $50.00"),))
    deploys.places = lambda: sky.cheapest(everywhere())
    with pytest.raises(sky.FleetError, match="no place costs as little as is declared"):
        deploys.failover(look=lambda stack, pool: dict.fromkeys((AMAZON, ZONE_A, ZONE_B, EAST), dear)).deploy()
    assert not (deploys.project / NAME).exists() and not (deploys.project / "s.tfstate").exists()


@pytest.fixture
def ec2(deploys: Deploys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """EC2 as boto3 asks it, with the instances of the bed."""

    def instances(_: object) -> dict[str, Any]:
        state = json.loads((deploys.project / "s.tfstate").read_text())
        named = (each for each in state["resources"] if (each["type"], each["name"]) == ("aws_security_group", "nodes"))
        groups = [{"GroupId": each["attributes"]["id"]} for found in named for each in found["instances"]]
        found = [
            {"InstanceId": each["id"], "Placement": {"AvailabilityZone": "us-east-1a"}, "SecurityGroups": groups}
            for each in deploys.bed.world.existing(AWS_MACHINE).values()
        ]
        return {"Reservations": [{"Instances": found}]}

    with mock_aws():
        cloud = Cloud(tmp_path / "aws")
        cloud.answer("ec2", "DescribeInstances", instances)
        monkeypatch.setattr("skyinfra.preflight.api._session", lambda region, profile: cloud.session)
        yield cloud


@pytest.mark.slow
@pytest.mark.parametrize("places", [sky.AWS, lambda: [sky.AWS(), everywhere()[0]]], ids=["one place", "several"])
def test_a_machine_whose_answer_never_came_is_found_before_another_is_made(
    deploys: Deploys, ec2: Cloud, places: Callable[[], Any]
) -> None:
    deploys.places = places
    timeout = "creating EC2 Instance: operation error EC2: RunInstances, request send failed: context deadline exceeded"
    deploys.bed.world.fail(Failure("create", AWS_MACHINE, timeout, leaves="outside", times=1))
    with pytest.raises(sky.TerraformFailed) as caught:
        deploys.failover().deploy()
    [stray] = [each["id"] for each in deploys.bed.world.existing(AWS_MACHINE).values()]
    ending = f"aws ec2 terminate-instances --region us-east-1 --instance-ids {stray}"
    assert f"s/t: the machine {stray} in us-east-1a is there, and in no state. End it with: {ending}" in str(
        caught.value
    )
    for _ in range(2):
        with pytest.raises(sky.StrayMachine) as refused:
            deploys.failover().deploy()
        assert ending in str(refused.value) and deploys.machines() == {AWS_MACHINE: 1} and not deploys.asked
    # Where nobody may look, it is said, and the deploy goes on.
    ec2.refuse("ec2", "DescribeInstances", "UnauthorizedOperation", status=403)
    assert deploys.failover().deploy() is not None
    assert any("whether an earlier deploy has left a machine is not known" in each for each in deploys.said)
    asked = ec2.asked["DescribeInstances"]
    # A fleet that stands is not looked for.
    assert deploys.failover().deploy() is not None and ec2.asked["DescribeInstances"] == asked
