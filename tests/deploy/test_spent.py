"""What fleets have cost: a day worked out by hand, and what others got wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from front_ends.schemas import valid
from terraform_projects.synthesized import document_of, synthesized
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.deploy.cost import cost_of
from skyinfra.deploy.spending import PricedHours, fleet_spent, pool_spent, priced_hours, so_far, summed, with_kept
from skyinfra.errors import InvalidField
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode
from skyinfra.protocol.readings import FleetHours, MachineRun, SlotUse
from skyinfra.terminal.plans import show_cost
from skyinfra.terminal.spent import begin_of, day_of, show_spent
from skyinfra.terraform.state import Resource

DAY = datetime(2026, 11, 20, tzinfo=UTC).timestamp()
HOUR = 3600.0
H100 = 55.04  # p5.48xlarge in us-east-1, on demand: skyinfra/offers/offers.json, 2026-07-20


def choices(accelerator: Any = "H100:8", **fields: Any) -> dict[str, Any]:
    pool = sky.ComputePool(name="p", provider=fields.pop("provider", sky.AWS()), accelerator=accelerator, **fields)
    found: dict[str, Any] = document_of("s", (pool,))["//"]["skyinfra"]["pools"][0]
    return found


def manifest(*nodes: tuple[str, str | None], **fields: Any) -> Manifest:
    """The first node is the head."""
    made = tuple(
        ManifestNode(name, name, "10.0.0.1", machine_type=machine, head=number == 0)
        for number, (name, machine) in enumerate(nodes)
    )
    return Manifest(1, "s", "p", "aws", Endpoint("10.0.0.1", 8786), made, (), "x" * 32, **fields)


def run(node: str, begin: float, hours: float, machine: str = "") -> MachineRun:
    return MachineRun(node, machine or f"m-{node}", DAY + begin * HOUR, hours * HOUR)


def use(submitter: str, kind: Any, name: str, slots: float, nodes: float, day: str = "2026-11-20") -> SlotUse:
    return SlotUse(day, submitter, kind, name, slots * HOUR, nodes * HOUR)


def ledger(*runs: MachineRun, uses: tuple[SlotUse, ...] = (), at: float = 24, ledger: str = "l1") -> FleetHours:
    return FleetHours(1, ledger, DAY + at * HOUR, runs, uses)


TWO = manifest(("p-0", "p5.48xlarge"), ("p-1", "p5.48xlarge"))


def test_a_day_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes of eight GPUs: p-0 all day, p-1 from 6:00 to 18:00 and again, as another machine, from 20:00.

    By hand: p-0 24 h, p-1 12 h and 4 h: 40 node hours, 40 x 55.04 = 2,201.60 USD. Ann's job had eight slots for ten
    hours, ten node hours, 550.40 USD; Bob's tasks had one of eight slots for 16 hours, 2 node hours, 110.08 USD. Nobody
    had 28 node hours, 1,541.12 USD; the three are the whole.
    """
    pool = choices(nodes=2, budget=sky.Budget(usd=4000))
    runs = run("p-0", 0, 24), run("p-1", 6, 12), run("p-1", 20, 4, "another")
    uses = use("ann@desk", "job", "nightly", 80, 10), use("bob@lap", "task", "train", 16, 2)
    now = priced_hours(ledger(*runs, uses=uses), pool, TWO)
    found = pool_spent("s/p", (now,), pool=pool, manifest=TWO)
    assert (found["hours"], found["usd"], found["estimated"]) == (40, pytest.approx(2201.60), False)
    assert [(each["node"], each["hours"], each["usd"], each["ended"]) for each in found["nodes"]] == [
        ("p-0", 24, pytest.approx(24 * H100), None),
        ("p-1", 12, pytest.approx(12 * H100), DAY + 18 * HOUR),
        ("p-1", 4, pytest.approx(4 * H100), None),
    ]
    assert found["nodes"][0]["price"] == {
        "usd_per_hour": H100,
        "region": "us-east-1",
        "date": "2026-07-20",
        "basis": "listed",
    }
    assert found["submitters"] == [
        {"submitter": "ann@desk", "slot_hours": 80, "hours": 10, "usd": pytest.approx(550.40)},
        {"submitter": "bob@lap", "slot_hours": 16, "hours": 2, "usd": pytest.approx(110.08)},
    ]
    assert [(each["kind"], each["name"], each["usd"]) for each in found["jobs"]] == [
        ("job", "nightly", pytest.approx(550.40)),
        ("task", "train", pytest.approx(110.08)),
    ]
    assert found["idle"] == {"hours": 28, "usd": pytest.approx(1541.12)}
    assert found["usd"] == pytest.approx(550.40 + 110.08 + 1541.12)
    assert found["budget"] == {"usd": 4000, "action": "warn", "spent_usd": pytest.approx(2201.60), "fraction": 0.5504}
    assert "pricing_aws.go" in found["nodes"][0]["source"]
    assert found["not_counted"] == ["disks", "public addresses", "traffic"] and found["unknown"] == []
    assert so_far(found) == "about $2,201.60 for 40.0 node hours, 55% of its budget of $4,000.00"
    stack = summed("s", [found])
    valid("cost", json.dumps({"schema_version": 1, "since": None, "stacks": [stack]}))
    show_spent([stack], None)
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "s/p: $2,201.60, 40.00 node hours",
        "job job nightly of ann@desk 10.00 $550.40",
        "idle no task 28.00 $1,541.12",
        "node p-1 (ended) p5.48xlarge 12.00 $660.48 $55.04/h in us-east-1, 2026-07-20",
        "Not known, and not in the sum: disks; public addresses; traffic.",
        "Budget: $4,000.00, of which this fleet has spent 55%.",
    ):
        assert text in out, out


def test_since_a_day() -> None:
    # skypilot-org/skypilot#1646 asked for a time frame.
    pool = choices()
    uses = use("ann@desk", "job", "a", 8, 1, "2026-11-19"), use("ann@desk", "job", "b", 16, 2)
    now = priced_hours(ledger(run("p-0", -12, 36), run("p-1", -12, 6), uses=uses), pool, TWO)
    found = pool_spent("s/p", (now,), pool=pool, manifest=TWO, since=DAY)
    assert (found["hours"], found["usd"]) == (24, pytest.approx(24 * H100))
    assert [each["node"] for each in found["nodes"]] == ["p-0"]
    assert [(each["name"], each["hours"]) for each in found["jobs"]] == [("b", 2)]
    assert found["idle"]["hours"] == 22
    # Of one machine that was stopped and started, each run by itself.
    twice = priced_hours(ledger(run("p-0", -12, 6), run("p-0", -3, 5)), pool, TWO)
    assert pool_spent("s/p", (twice,), pool=pool, since=DAY)["hours"] == 2


def test_days_as_they_are_given() -> None:
    assert begin_of("2026-11-20") == DAY and day_of(DAY) == "2026-11-20"
    assert begin_of(None) == 0
    assert begin_of("0d") == begin_of(day_of(begin_of("0d"))) and begin_of("7d") == begin_of("0d") - 7 * 24 * HOUR
    for wrong in ("yesterday", "7", "-3d", "2026-13-01", "99999d", "24h", "\u0667d", "", "2026-11-20T10:00"):
        with pytest.raises(InvalidField, match="--since: a day such as 2026-11-20, or 7d"):
            begin_of(wrong)


def test_spot_machines_cost_what_spot_costs() -> None:
    # skypilot-org/skypilot#847, infracost/infracost#104: the price on demand was counted.
    pool = choices("L4", spot=True)
    fleet = manifest(("p-head", "m6i.large"), ("p-0", "g6.xlarge"))
    found = pool_spent("s/p", (priced_hours(ledger(run("p-0", 0, 10)), pool, fleet),), pool=pool)
    assert found["usd"] == pytest.approx(10 * pool["prices"]["g6.xlarge"]["usd_per_hour"]) and found["usd"] < 8
    # The declaration was changed since: what the state has counts.
    aws = {"instance_type": "g6.xlarge", "arn": "arn:aws:ec2:us-east-1:1:instance/i-1", "instance_lifecycle": "spot"}
    state = (Resource("p", "aws_instance", "head", "", aws),)
    known = priced_hours(ledger(run("p-0", 0, 10)), choices("L4"), fleet, state)
    assert pool_spent("s/p", (known,))["usd"] == found["usd"]


def test_a_price_that_is_not_known_is_not_nothing() -> None:
    # infracost/infracost#29, #84: unknown resources cost $0.
    pool = choices(None, provider=sky.AWS(instance_types=["c7i.large"]))
    found = pool_spent(
        "s/p", (priced_hours(ledger(run("p-0", 0, 10)), pool, manifest(("p-0", "c7i.large"))),), pool=pool
    )
    assert (found["hours"], found["usd"], found["idle"]["usd"]) == (10, None, None)
    assert found["unknown"] == ["the price of c7i.large, whose hours are in no sum of USD"]
    assert so_far(found) == "10.0 node hours at a price that is not known"
    assert summed("s", [found])["usd"] is None
    both = priced_hours(
        ledger(run("p-0", 0, 10), run("p-1", 0, 1)), choices(), manifest(("p-0", "c9x.new"), ("p-1", None))
    )
    mixed = pool_spent("s/p", (both,))
    assert mixed["usd"] == pytest.approx(H100) and mixed["nodes"][0]["usd"] is None
    assert mixed["unknown"] == ["the price of c9x.new, whose hours are in no sum of USD"]


@pytest.mark.parametrize("group", [{"group_nodes": 2}, {"group_nodes": 0, "max_nodes": 8}])
def test_the_head_of_a_group_costs_and_runs_no_task(group: dict[str, int]) -> None:
    # skypilot-org/skypilot#2312: the price shown was that of the controller.
    pool = choices("L4", spot=True, nodes=2)
    fleet = manifest(("p-head", "m6i.large"), **group)
    runs = run("p-head", 0, 24), run("p-i-1", 0, 10), run("p-i-2", 0, 10)
    uses = (use("ann@desk", "task", "f", 5, 5),)
    found = pool_spent("s/p", (priced_hours(ledger(*runs, uses=uses), pool, fleet),), pool=pool, manifest=fleet)
    price = pool["prices"][pool["machine_types"][0]]["usd_per_hour"]
    assert found["usd"] == pytest.approx(24 * 0.096 + 20 * price)
    assert found["submitters"][0]["usd"] == pytest.approx(5 * price)
    assert found["idle"] == {"hours": 15, "usd": pytest.approx(15 * price)}
    assert found["estimated"], "which of its types a machine of the group is, nobody says"


@pytest.mark.parametrize("scaled", [True, False])
def test_a_head_of_the_type_of_its_spot_workers_has_a_price_of_its_own(scaled: bool) -> None:
    pool = choices("L4", spot=True, nodes=2, provider=sky.AWS(head_instance_type="g6.xlarge"))
    assert pool["machine_types"][0] == pool["head"] == "g6.xlarge"
    fleet = manifest(("p-head", "g6.xlarge"), group_nodes=2)
    override = {"launch_template": [{"override": [{"instance_type": "g6.xlarge"}]}]}
    share = {"instances_distribution": [{"on_demand_percentage_above_base_capacity": 0}]}
    arn = "arn:aws:autoscaling:us-east-1:1:autoScalingGroup:x"
    group = {"mixed_instances_policy": [{**override, **share}], "desired_capacity": 2, "arn": arn}
    head = {"instance_type": "g6.xlarge", "arn": "arn:aws:ec2:us-east-1:1:instance/i-1"}
    state = [Resource("p", "aws_instance", "head", "", head)]
    # A group at the least of 0 has no machine in the state.
    state[:0] = [Resource("p", "aws_autoscaling_group", "this", "", group)] if scaled else []
    priced = priced_hours(ledger(run("p-head", 0, 1), run("p-i-1", 0, 1)), pool, fleet, state)
    found = {each["node"]: each["usd"] for each in pool_spent("s/p", (priced,))["nodes"]}
    spot, on_demand = pool["prices"]["g6.xlarge"]["usd_per_hour"], choices("L4")["prices"]["g6.xlarge"]["usd_per_hour"]
    assert spot < on_demand
    assert found == {"p-head": pytest.approx(on_demand), "p-i-1": pytest.approx(spot)}


def test_nodes_that_said_nothing_are_named() -> None:
    # skypilot-org/skypilot#1751: machines that never were had a cost. One that is there and silent has an unknown one.
    found = pool_spent("s/p", (priced_hours(ledger(run("p-0", 0, 20.5)), choices(), TWO),), manifest=TWO)
    assert found["unknown"] == [
        "the last 3.5 hours of p-0, which has said nothing since",
        "the hours of p-1, which has not said any yet",
    ]
    assert found["hours"] == 20.5 and found["nodes"][0]["ended"] == DAY + 20.5 * HOUR


def test_a_fleet_that_was_made_anew_and_a_head_that_lost_its_ledger() -> None:
    pool = choices()
    first = priced_hours(ledger(run("p-0", -48, 10, "a"), ledger="l0", at=-38), pool, TWO)
    cheap = replace_price(first, 10.0)
    second = priced_hours(ledger(run("p-0", 0, 5, "b"), uses=(use("ann@desk", "job", "j", 8, 1),), at=5), pool, TWO)
    # Its head lost the file; the node says all of its hours to the next one.
    third = priced_hours(ledger(run("p-0", 0, 7, "b"), ledger="l2", at=7), pool, TWO)
    kept = [cheap, second._replace(live=False), third]
    found = pool_spent("s/p", kept, pool=pool, manifest=TWO)
    assert [(each["hours"], each["usd"]) for each in found["nodes"]] == [(10, 100), (7, pytest.approx(7 * H100))]
    assert found["jobs"][0]["hours"] == 1
    assert pool_spent("s/p", kept[:2])["source"] == "kept"


def test_a_machine_that_was_replaced_keeps_its_price() -> None:
    """An A100 until noon, an H100 after it, under one name; the deploy in between kept the hours with its price."""
    before = ledger(run("p-0", 0, 12, "old"), at=12)
    kept = priced_hours(before, choices("A100:8"), manifest(("p-0", "p4de.24xlarge")))
    after = ledger(run("p-0", 0, 12, "old"), run("p-0", 12, 12, "new"))
    now = priced_hours(after, choices(), manifest(("p-0", "p5.48xlarge")))
    (merged,) = with_kept(now, [kept._replace(live=False)])
    found = pool_spent("s/p", [merged])
    old = kept.machines["p-0/old"]["price"]["usd_per_hour"]
    assert [(e["machine_type"], e["usd"]) for e in found["nodes"]] == [
        ("p4de.24xlarge", pytest.approx(12 * old)),
        ("p5.48xlarge", pytest.approx(12 * H100)),
    ]
    assert old != H100


def replace_price(given: PricedHours, usd: float) -> PricedHours:
    machines = {key: {**each, "price": {**each["price"], "usd_per_hour": usd}} for key, each in given.machines.items()}
    return given._replace(machines=machines, live=False)


def test_nobody_pays_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    pool = choices(None, provider=sky.Local(), budget=sky.Budget(usd=1))
    local = replace(manifest(("p-0", None)), provider="local")
    found = pool_spent("s/p", (priced_hours(ledger(run("p-0", 0, 30)), pool, local),), pool=pool, manifest=local)
    assert (found["free"], found["usd"], found["not_counted"], so_far(found)) == (True, 0, [], "")
    assert found["budget"]["fraction"] == 0
    show_spent([summed("s", [found])], "2026-11-20")
    out = capsys.readouterr().out
    assert "s/p: free, 30.00 node hours since 2026-11-20, 0:00 UTC" in out
    assert "idle" in out and "$0.00" not in out


def test_nothing_is_known_of_a_fleet_whose_head_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    pool = choices(budget=sky.Budget(usd=100))
    found = pool_spent("s/p", (), pool=pool, manifest=TWO, problem="the head does not answer")
    assert (found["source"], found["usd"], found["nodes"]) == (None, None, [])
    assert found["budget"]["fraction"] is None, "not 0"
    assert pool_spent("s/p", (), pool=pool)["budget"]["fraction"] == 0, "there is no fleet"
    show_spent([summed("s", [found])], None)
    out = capsys.readouterr().out
    assert "s/p: unknown, 0.00 node hours; nobody knows its hours" in out and "the head does not answer" in out
    assert "Budget: $100.00, of which this fleet has spent nobody knows what." in out


def test_volumes_are_named() -> None:
    # dstackai/dstack#2498, skypilot-org/skypilot#1644: disks were in no cost, and nobody said so.
    pool = {**choices(), "volumes": [{"name": "data"}]}
    found = pool_spent("s/p", (priced_hours(ledger(run("p-0", 0, 1)), pool, TWO),), pool=pool)
    assert found["not_counted"][-1] == "volume data"


def test_hostile_names_are_printed_and_obeyed_by_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[bold]x[/]\x1b[2J\n$(rm -rf /)"
    uses = (use(name, "task", name, 1, 1),)
    node = MachineRun("p-0", "[red]m[/]", DAY, HOUR)
    found = pool_spent("s/p", (priced_hours(ledger(node, uses=uses), choices(), TWO),), problem=name)
    show_spent([summed("s", [found])], None)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "[bold]x[/]" in out


def test_a_few_values_for_status_and_the_page() -> None:
    pool = choices(budget=sky.Budget(usd=100))
    found = fleet_spent(TWO, pool, ledger(run("p-0", 0, 2)))
    assert found["text"] == "about $110.08 for 2.0 node hours, 110% of its budget of $100.00"
    assert found["budget"]["fraction"] == 1.1008
    assert found["unknown"][-1] == "the hours of p-1, which has not said any yet"


@pytest.mark.parametrize("usd", [0, -1, float("nan"), float("inf")])
def test_a_budget_is_an_amount(usd: float) -> None:
    with pytest.raises(InvalidField, match=r"Budget\.usd"):
        sky.Budget(usd=usd)


def test_a_budget_that_the_first_hour_spends_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"budget\.usd: the pool costs \$110\.08 an hour \(given: 110\.0\)"):
        choices(nodes=2, budget=sky.Budget(usd=110))
    assert choices(nodes=2, budget=sky.Budget(usd=110.08))["budget"] == {"usd": 110.08, "action": "warn"}
    with pytest.raises(InvalidField, match="the price of its machines is not known"):
        choices(None, provider=sky.AWS(instance_types=["c7i.large"]), budget=sky.Budget(usd=1000))
    # With the head of a group: 2 x 0.4104 + 0.096.
    with pytest.raises(InvalidField, match=r"the pool costs \$0\.92 an hour"):
        choices("L4", spot=True, nodes=2, budget=sky.Budget(usd=0.9))


def test_a_plan_says_for_how_long_a_budget_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    show_cost("s", cost_of([choices(nodes=2, budget=sky.Budget(usd=4000))]))
    out = capsys.readouterr().out
    assert "p: its budget of $4,000.00 lasts for 36.3 hours of all nodes." in out
    # The price of a month stands beside that of an hour: 720 hours (infracost/infracost#1663 counts 730).
    assert "$110.08" in out and "$79,257.60" in out


def test_a_budget_touches_no_node() -> None:
    from skyinfra.bootstrap import user_data
    from skyinfra.compiler import compile_pool, revision

    plain = sky.ComputePool(name="p", provider=sky.AWS(), accelerator="H100:8")
    bound = plain.model_copy(update={"budget": sky.Budget(usd=1000)})
    one, two = compile_pool(plain, "s"), compile_pool(bound, "s")
    # The head tells of the budget that it is made with. No machine is made anew for another one.
    assert revision(one) == revision(two) == user_data(two).revision
    assert user_data(one).worker == user_data(two).worker and user_data(one).head != user_data(two).head


def test_the_store_keeps_the_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyinfra.deploy import kept
    from skyinfra.terraform.stores import local_store
    from skyinfra.terraform.synthesized import SynthesizedStack

    monkeypatch.chdir(tmp_path)
    store = local_store(tmp_path, "s")
    stack = SynthesizedStack("s", tmp_path, (choices(),), {}, backend={"local": {"path": str(tmp_path / "none")}})
    first = ledger(run("p-0", 0, 1), uses=(use("ann@desk", "job", "j", 8, 1),))
    assert kept._keep_hours(store, stack, TWO, first) == "about $55.04 for 1.0 node hours"
    # Again, later: one ledger is there once.
    kept._keep_hours(store, stack, TWO, replace(first, runs=(run("p-0", 0, 3),)))
    kept._keep_hours(store, stack, TWO, ledger(run("p-0", 30, 2, "b"), ledger="l2"))
    (pool,) = kept.gone_spent(tmp_path, "s")["pools"]  # type: ignore[index]
    assert (pool["hours"], pool["usd"], pool["source"]) == (5, pytest.approx(5 * H100), "kept")
    assert pool["jobs"][0]["name"] == "j"
    assert kept.gone_spent(tmp_path, "s", "other") is None and kept.gone_spent(tmp_path, "never") is None
    # Where there is no project, as where a `with` block was.
    shown = json.loads(CliRunner().invoke(app, ["cost", "--json"]).stdout)
    assert [(each["stack"], each["usd"]) for each in shown["stacks"]] == [("s", pytest.approx(5 * H100))]
    # A project is that of the folders in it too.
    synthesized(tmp_path, sky.ComputePool(name="p", provider=sky.Local()), name="other")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    shown = json.loads(CliRunner().invoke(app, ["cost", "s", "--json"]).stdout)
    assert [each["stack"] for each in shown["stacks"]] == ["s"]
    file = tmp_path / ".skyinfra/.jobs/s/p/spent.json"
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    file.write_text("{")
    with pytest.raises(sky.ProjectError, match=r"spent\.json: cannot be read"):
        kept.gone_spent(tmp_path, "s")


def test_where_there_is_no_project_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(CliRunner().invoke(app, ["cost"]).exception, sky.ProjectNotFound)
