"""What a stack costs: the sums, what is not in them, and where they are shown."""

from __future__ import annotations

from typing import Any

import pytest
from terraform_projects.synthesized import document_of

import skyinfra as sky
from skyinfra.deploy.cost import Cost, cost_of
from skyinfra.terminal.plans import show_cost


def pool(
    accelerator: Any = None, *, name: str = "p", aws: dict[str, Any] | None = None, **fields: Any
) -> sky.ComputePool:
    return sky.ComputePool(name=name, provider=sky.AWS(**(aws or {})), accelerator=accelerator, **fields)


def cost(*pools: sky.ComputePool) -> Cost:
    return cost_of(document_of("s", pools)["//"]["skyinfra"]["pools"])


def test_all_nodes_per_hour_and_per_30_days() -> None:
    found = cost(pool("H100:8", nodes=2), pool("Trainium1", name="t", nodes=3))
    assert [each.usd_per_hour for each in found.pools] == [110.08, pytest.approx(3 * 1.34375)]
    assert found.usd_per_hour == pytest.approx(110.08 + 3 * 1.34375)
    assert found.usd_per_30_days == pytest.approx(720 * found.usd_per_hour)
    assert found.unknown == ()
    document = found.to_json()["pools"][0]
    assert document["usd_per_30_days"] == 79257.6
    assert document["price"] == {"usd_per_hour": 55.04, "region": "us-east-1", "date": "2026-07-20", "basis": "listed"}


def test_prices_that_are_not_known_are_not_in_the_sum() -> None:
    block = pool("H100:8", name="b", aws={"capacity": sky.CapacityBlock(id="cr-0123"), "zones": ["us-east-1a"]})
    found = cost(pool("H100:8"), pool(name="cpu", aws={"instance_types": ["c7i.large"]}), block)
    assert (found.usd_per_hour, found.unknown) == (55.04, ("cpu", "b"))
    assert found.to_json()["pools"][1]["usd_per_hour"] is None
    assert "paid for when it was bought" in found.pools[2].note


def test_a_head_besides_the_nodes_is_in_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    named = pool("L4", name="named", spot=True, nodes=2, aws={"head_instance_type": "c7i.large"})
    found = cost(pool("L4", spot=True, nodes=2), named, pool("L4", name="one", spot=True))
    assert [each.head for each in found.pools] == ["m6i.large", "c7i.large", "m6i.large"]
    first, unknown, _ = found.pools
    assert first.usd_per_hour == pytest.approx(2 * 0.4104 + 0.096)
    assert unknown.usd_per_hour == pytest.approx(2 * 0.4104)
    assert first.to_json()["head"] == {
        "machine_type": "m6i.large",
        "price": {"usd_per_hour": 0.096, "region": "us-east-1", "date": "2026-07-20", "basis": "listed"},
    }
    assert cost(pool("L4")).pools[0].to_json()["head"] is None
    show_cost("s", found)
    out = capsys.readouterr().out
    head = (
        "p: its head, m6i.large on demand, a machine besides the nodes, is in the sum at $0.096/h in us-east-1, 2026-07"
    )
    assert head in out
    assert "named: its head, c7i.large on demand, a machine besides the nodes, is not in the sum, for its price" in out


def test_a_range_has_the_price_of_a_month_at_its_least_and_of_its_most(capsys: pytest.CaptureFixture[str]) -> None:
    found = cost(pool("L4", nodes=sky.Range(0, 8)), pool("L4", name="two", nodes=sky.Range(2, 4)), pool("L4", name="f"))
    least, two, fixed = found.pools
    assert least.price is not None and least.head_price is not None
    each, head = least.price.usd_per_hour, least.head_price.usd_per_hour
    assert (least.least_usd_per_hour, least.usd_per_hour) == (pytest.approx(head), pytest.approx(8 * each + head))
    assert two.least_usd_per_hour == pytest.approx(2 * each + head)
    assert fixed.least_usd_per_hour is None and "least" not in fixed.to_json()
    document = two.to_json()["least"]
    assert (document["nodes"], document["usd_per_30_days"]) == (2, pytest.approx(720 * (2 * each + head), abs=0.01))
    # The sum is what a bill can be.
    assert found.usd_per_hour == pytest.approx(12 * each + 2 * head + fixed.usd_per_hour)
    show_cost("s", found)
    out = " ".join(capsys.readouterr().out.split())
    assert "0 to 8" in out and f"${720 * head:,.2f} to ${720 * (8 * each + head):,.2f}" in out
    assert "The sum is that of the most nodes." in out


def test_machines_without_accelerators_have_prices() -> None:
    found = cost(pool(name="cpu", vcpus=8, nodes=2), pool(name="spot", spot=True))
    assert (found.pools[0].machine, found.pools[0].usd_per_hour) == ("m7i.2xlarge", 0.8064)
    assert found.unknown == ("spot",) and found.pools[1].note == "spot price not known"


def test_which_of_several_accelerators_is_taken_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show_cost("s", cost(pool(["H100:8", "A100-80GB:8"]), pool("L4", name="one")))
    out = capsys.readouterr().out
    assert "p: p5.48xlarge is taken, of H100:8, A100:8; a deploy that the cloud refuses tries the next." in out
    assert out.count("is taken") == 1


def test_this_machine_is_free() -> None:
    local = sky.ComputePool(name="l", provider=sky.Local(simulate=True), accelerator="H100", nodes=4)
    found = cost(local, pool("L4"))
    assert found.pools[0].free and found.pools[0].usd_per_hour == 0
    assert found.unknown == () and found.usd_per_hour == found.pools[1].usd_per_hour


def test_a_spot_pool_may_cost_what_its_dearest_machine_costs() -> None:
    (found,) = cost(pool("L4", spot=True, nodes=3)).pools
    assert (found.machine, found.others, found.estimated) == ("g6.xlarge", 3, True)
    assert found.dearest is not None and found.dearest[0] == "gr6.4xlarge"
    assert found.dearest[1].usd_per_hour <= 2 * 0.4104
    (single,) = cost(pool("L4")).pools
    assert single.dearest is None and not single.estimated


def test_the_table_says_what_a_reader_must_know(capsys: pytest.CaptureFixture[str]) -> None:
    local = sky.ComputePool(name="here", provider=sky.Local(simulate=True), accelerator="H100")
    show_cost(
        "s",
        cost(pool("H100:8", nodes=2), pool("L4", name="spot", spot=True, nodes=3), pool(name="cpu", spot=True), local),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["POOL", "NODES", "MACHINE", "PER", "HOUR", "PER", "30", "DAYS", "PRICE"]
    assert lines[1].split()[:5] == ["p", "2", "p5.48xlarge", "$110.08", "$79,257.60"]
    assert lines[1].rstrip().endswith("on-demand in us-east-1, 2026-07-20")
    assert "g6.xlarge or 3 more" in lines[2] and "~$1.33" in lines[2] and "2025-07-28" in lines[2]
    assert "unknown" in lines[3] and "price not known" in lines[3]
    assert lines[4].count("free") == 2 and "this machine" in lines[4]
    assert lines[5].split() == ["all", "~$111.41", "~$80,213.18"]
    assert lines[6] == "spot: the price is of 2025-07-28, more than 12 months ago."
    assert lines[7] == "spot: up to $2.08/h if all nodes are gr6.4xlarge."
    assert lines[8].startswith("spot: its head, m6i.large on demand")
    assert lines[9] == "Not in the sum, for its price is not known: cpu."
    assert lines[10] == "~ is an estimate, not a quote."
    assert "disks" in lines[11]


def test_a_price_of_another_region_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_cost("s", cost(pool("L4", aws={"region": "eu-central-1"})))
    assert "p: the price is that of us-east-1; none of eu-central-1 is known." in capsys.readouterr().out


def test_max_hourly_cost_is_of_one_node() -> None:
    assert cost(pool("H100:8", nodes=4, max_hourly_cost=55.04)).usd_per_hour == pytest.approx(4 * 55.04)
    with pytest.raises(sky.NotOffered, match=r"max_hourly_cost=55\.03"):
        cost(pool("H100:8", max_hourly_cost=55.03))
    # The price of the purchase that is asked for, and of every machine type that the pool falls back to.
    capped = cost(pool("L4", spot=True, nodes=3, max_hourly_cost=0.6)).pools[0]
    assert capped.dearest is None or capped.dearest[1].usd_per_hour <= 0.6
    with pytest.raises(sky.NotOffered):
        cost(pool("H100:8", spot=True, max_hourly_cost=26.0))
