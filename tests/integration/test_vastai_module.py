"""modules/vastai: which offers are taken, and that a node keeps its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import VASTAI, root, vastai_offers
from mock_provider.bed import Bed, served
from mock_provider.world import Failure

from skyinfra.terraform.cloud_errors import refusals


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    assert VASTAI.api is not None
    with served(tmp_path, "vastai") as made, VASTAI.api(made.world) as (_, variables):
        VASTAI.answers(made.world)
        made.environment |= variables
        declare(made)
        made.run("init", "-no-color")
        yield made


def declare(bed: Bed, **inputs: Any) -> None:
    bed.write(root(VASTAI, **{"node_count": 2, **inputs}), "main.tf.json")


def taken(bed: Bed) -> list[int]:
    return [each["offer_id"] for each in bed.world.asked("vastai_instance")]


def offer(bed: Bed, *ids: int) -> None:
    """From now on these alone."""
    found = [each for each in vastai_offers() if each["id"] in ids]
    bed.world.answer("data.vastai_gpu_offers", {"offers": found})


def test_the_cheapest_that_will_do_are_taken_and_kept(bed: Bed) -> None:
    bed.apply()
    # Of the cheaper ones each lacks something that is asked for.
    assert taken(bed) == [103, 102]
    offer(bed, 100, 101)
    assert bed.changes() == {}
    # One that comes later takes what is offered then; none is offered to a fourth.
    offer(bed, 100, 101, 102)
    declare(bed, node_count=3)
    bed.apply()
    assert taken(bed) == [103, 102, 100]
    offer(bed)
    assert bed.changes() == {}


def test_keys_of_the_account_that_the_provider_cannot_read_stop_the_plan(bed: Bed) -> None:
    says = "Could not list SSH keys: listing SSH keys: decoding response body: json: cannot unmarshal string"
    bed.world.fail(Failure("read", "data.vastai_ssh_keys", says))
    said = bed.apply(code=1)
    assert says in said and bed.world.existing("vastai_instance") == {}
    [found] = refusals([("module.train.vastai_instance.head", said)])
    assert found.cause == "CloudRefused" and "manage-keys" in found.hint


@pytest.mark.parametrize(
    ("inputs", "first"),
    [
        ({"min_reliability": 0.8}, 200),
        ({"disk_gb": 5}, 202),
        ({"min_vcpus": 1}, 203),
        ({"min_memory_gb": 1}, 204),
        ({"min_cuda": None}, 205),
        ({"countries": []}, 206),
        ({"spot": True, "bid": 0.5}, 103),
    ],
)
def test_what_is_not_asked_for_may_lack(bed: Bed, inputs: dict[str, Any], first: int) -> None:
    declare(bed, node_count=1, **inputs)
    bed.apply()
    assert taken(bed) == [first]


def test_no_offer_is_said_as_such(bed: Bed) -> None:
    offer(bed)
    bed.world.fail(
        Failure("create", "vastai_instance", "Missing offer_id: offer_id is required when creating an instance.")
    )
    printed = bed.apply(code=1)
    found = refusals([("module.train.vastai_instance.head", printed)])
    assert [each.cause for each in found] == ["CapacityUnavailable"]
    # The next apply looks at what is offered then.
    bed.world.fail()
    offer(bed, 101, 102)
    bed.apply()
    assert taken(bed) == [102, 101]


def test_a_bid_changes_in_place_and_the_purchase_does_not(bed: Bed) -> None:
    declare(bed, spot=True, bid=0.5)
    bed.apply()
    assert [each["bid_price"] for each in bed.world.asked("vastai_instance")] == [0.5, 0.5]
    declare(bed, spot=True, bid=0.6)
    changed = {address: action for address, action in bed.changes().items() if "vastai_instance" in address}
    assert set(changed.values()) == {"update"} and len(changed) == 2
    declare(bed)
    assert "replace" in bed.changes().values()
    declare(bed, spot=True)
    bed.run("plan", "-no-color", code=1)
    assert "an interruptible instance needs one" in bed.printed[-1]
