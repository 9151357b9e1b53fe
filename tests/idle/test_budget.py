"""A budget that stops its fleet: what a node is declared, the account of the head, and the end of a real node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode, until
from servers.webhooks import webhook_server
from tasks_on_nodes.jobs import wait_for

import skyinfra as sky
from skyinfra.compiler import compile_pool, revision
from skyinfra.deploy.missing_nodes import ended_nodes
from skyinfra.engine.notifications import node_notice
from skyinfra.errors import InvalidField, InvalidNodeConfig, NotSupported
from skyinfra.hours.ledger import Ledger
from skyinfra.idle.meter import FILE, Meter
from skyinfra.idle.use import FleetUse
from skyinfra.protocol.nodeconfig import NodeBudget, NodeConfig
from skyinfra.protocol.readings import MachineRun
from skyinfra.stack import module_inputs
from skyinfra.tasks import Task
from skyinfra.terraform.program import Plan
from skyinfra.terraform.synthesized import SynthesizedStack

MakeNode = Callable[..., RunningNode]
HOUR = 3600.0
BUDGET = NodeBudget(usd=200.0, head=10.0, node=20.0, pool=50.0)
STOP = sky.Budget(usd=4000, action="stop")


def pool(provider: sky.Provider | None = None, **fields: object) -> sky.ComputePool:
    given = {"accelerator": "H100:8", "nodes": 2, "budget": STOP, **fields}
    return sky.ComputePool(provider=provider or sky.AWS(region="us-east-1"), **given)  # type: ignore[arg-type]


def test_a_node_gets_the_prices_and_the_time_that_all_nodes_have() -> None:
    made = compile_pool(pool(), "demo")
    assert made.worker.budget == made.head.budget == NodeBudget(4000.0, 55.04, 55.04, 110.08)
    assert made.worker.budget.seconds == pytest.approx(4000 / 110.08 * HOUR)
    placed = replace(made.worker, scheduler="10.0.0.1:1")
    assert NodeConfig.read(placed.to_json()) == placed
    # Such a machine is to be terminated when it shuts down, whatever else is declared.
    assert made.worker.ends_itself and module_inputs(made, ".")["shutdown_terminates"] is True
    for action in ("stop", "warn"):
        other = compile_pool(pool(budget=sky.Budget(usd=9999, action=action)), "demo")
        assert revision(other) == revision(made), "it replaces no node"
    # One that warns is the head's alone; a runner of the version before reads what a worker gets.
    assert other.head.warn_budget == NodeBudget(9999.0, 55.04, 55.04, 110.08)
    assert not other.head.ends_itself and other.head.budget is None and "budget" not in other.worker.dumps()
    placed = replace(other.head, scheduler="10.0.0.1:1")
    assert NodeConfig.read(placed.to_json()) == placed
    assert module_inputs(other, ".").get("shutdown_terminates") is None


def test_a_group_counts_with_the_dearest_machine_that_it_may_start() -> None:
    made = compile_pool(pool(sky.AWS(region="us-east-1"), accelerator="L4", spot=True), "demo")
    assert made.worker.budget is not None and made.selection.head_price is not None
    prices = [each.usd_per_hour for each in made.selection.prices.values()]
    assert len(set(prices)) > 1 and made.worker.budget.node == max(prices)
    assert made.worker.budget.head == made.selection.head_price.usd_per_hour
    assert made.worker.budget.pool == 2 * made.worker.budget.node + made.worker.budget.head


@pytest.mark.parametrize("usd", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_node_refuses_a_budget_that_is_none(usd: float) -> None:
    with pytest.raises(InvalidNodeConfig, match=r"budget\.usd"):
        read = replace(compile_pool(pool(), "demo").worker, scheduler="10.0.0.1:1").to_json()
        NodeConfig.read({**read, "budget": {**read["budget"], "usd": usd}})


def test_a_place_whose_nodes_cannot_end_is_refused_by_name() -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ test"
    places = (
        sky.GCP(project="p", region="us-central1", group=True),
        sky.Lambda(region="us-east-1", ssh_public_key=key),
    )
    for place, called in zip(places, ("Google Cloud", "Lambda"), strict=True):
        with pytest.raises(NotSupported, match=f"a node of {called}.* cannot end itself") as error:
            compile_pool(pool(place), "demo")
        assert error.value.field == "budget" and 'Declare action="warn"' in str(error.value)
    with pytest.raises(InvalidField, match=r"the pool costs \$110\.08 an hour"):
        compile_pool(pool(budget=sky.Budget(usd=110, action="stop")), "demo")
    # Nobody pays for it.
    assert compile_pool(pool(sky.Local(simulate=True)), "demo").worker.budget is None


def run(node: str, machine: str, ago: float, hours: float) -> MachineRun:
    """One that has run for so many *hours*, and ended so many seconds *ago*."""
    return MachineRun(node, machine, time.time() - ago - hours * HOUR, hours * HOUR)


def test_the_account_has_all_machines_that_there_ever_were(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.spent("n0", BUDGET) == 0
    ledger.take("n0", [run("n0", "a", 0, 4)])
    ledger.take("n1", [run("n1", "b", 90_000, 1), run("n1", "b", 0, 1)])
    # In place of n1, which was preempted.
    ledger.take("n1", [run("n1", "c", 0, 0.5)])
    # What runs on since it said so counts, for a while.
    assert ledger.spent("n0", BUDGET) == pytest.approx(4 * 10 + 2.5 * 20, abs=1)


def test_the_head_says_what_is_left_and_when_it_is_near() -> None:
    spent, said = 40.0, list[tuple[str, str]]()
    use = FleetUse(lambda: False, lambda: 1000.0)
    use.on_stops = lambda node, text: said.append((node, text))  # type: ignore[func-returns-value]
    use.spent = lambda head, budget: spent
    assert use.report("n0", 0.0, 0.0)[3] is None
    use.budget = "n0", BUDGET
    # 160 USD, of which all nodes need 50 an hour.
    assert use.report("n1", 0.0, 0.0)[3] == pytest.approx(3.2 * HOUR)
    assert not said and use.announced == {}
    spent = 101.0
    for _ in range(3):
        use.report("n1", 0.0, 0.0)
    assert said == [("n0", "ends once the budget of $200.00 is spent: 50% of it is")] and use.announced == {}
    spent = 170.0
    use.report("n0", 0.0, 0.0, stops="ends in 9m")
    use.report("n1", 0.0, 0.0)
    assert set(said[1:]) == {("n0", "ends once the budget of $200.00 is spent: 80% of it is"), ("n0", "ends in 9m")}
    assert use.announced == {"n0": "ends in 9m"}
    use.report("n0", 0.0, 0.0)
    assert use.announced == {"n0": "ends once the budget of $200.00 is spent: 80% of it is"}
    spent = 230.0
    assert use.report("n1", 0.0, 0.0)[3] == 0.0
    assert "100% of it is" in said[-1][1]
    # It was raised.
    use.budget = "n0", replace(BUDGET, usd=1000.0)
    assert use.report("n1", 0.0, 0.0)[3] == pytest.approx(770 / 50 * HOUR)
    assert use.announced == {}


def test_a_budget_that_warns_is_said_and_ends_nothing() -> None:
    amounts, said = [90.0], list[tuple[str, str]]()
    use = FleetUse(lambda: False, lambda: 1000.0)
    use.on_stops = lambda node, text: said.append((node, text))  # type: ignore[func-returns-value]
    use.spent = lambda head, budget: amounts[-1]
    use.budget, use.budget_stops = ("n0", BUDGET), False
    assert use.report("n0", 0.0, 0.0, ends=False)[3] is None and not said
    for amount in (101.0, 170.0, 230.0):
        amounts.append(amount)
        for _ in range(2):
            assert use.report("n0", 0.0, 0.0, ends=False)[3] is None
    assert [text for _, text in said] == [
        f"says that {part} of the budget of $200.00 is spent" for part in ("50%", "80%", "100%")
    ]
    assert use.announced == {"n0": "says that 100% of the budget of $200.00 is spent"} and not use.ends
    # What it is called where people are notified.
    assert node_notice("demo/mig", *said[-1]).text == f"node n0 on demo/mig: budget: {said[-1][1]}"
    assert node_notice("demo/mig", "n0", "stops in 3m").state == "stops"


def test_a_meter_counts_on_without_its_head_and_keeps_it(tmp_path: Path) -> None:
    meter = Meter(boot="a", at=100.0, served=True, config="c").heard(0.0, 0.0, True, 500.0)
    later = meter.advanced(boot="a", now=300.0, ready=True, config="c")
    assert later.budget_s == 300.0
    # A head of the version before says nothing of it; one that knows, whatever it is.
    assert later.heard(0.0, 0.0, True).budget_s == 300.0
    assert later.heard(0.0, 0.0, True, 800.0).budget_s == 800.0
    (tmp_path / FILE).write_text(later.dumps())
    assert Meter.find(tmp_path) == later
    assert later.advanced(boot="b", now=400.0, ready=False, config="d").budget_s == 0.0


def test_the_plan_says_that_a_spent_budget_ends_what_a_deploy_brings_back(tmp_path: Path) -> None:
    declared = {"name": "train", "provider": "aws", "budget": {"usd": 200.0, "action": "stop"}}
    gone = ("module.train.aws_instance.head",)
    plan = Plan(Path("plan"), changes=(("create", gone[0]),), gone=frozenset(gone), reasons={})
    (said,) = ended_nodes(SynthesizedStack("fleet", tmp_path, (declared,), {"train": {}}, backend={}), plan)
    assert "train: 1 node ended without a deploy, as its budget of $200.00 has it, probably; a deploy brings 1" in said
    assert "Where its budget is spent, they end again at once: raise it, or destroy the fleet before." in said
    warns = {**declared, "budget": {"usd": 200.0, "action": "warn"}}
    assert ended_nodes(SynthesizedStack("fleet", tmp_path, (warns,), {"train": {}}, backend={}), plan) == []


@pytest.mark.slow
def test_who_is_to_be_notified_hears_of_a_budget_that_warns(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node("n1", cpu_slots=1, warn_budget=NodeBudget(usd=0.2, head=36.0, node=36.0, pool=36.0))
    node.boot()
    with webhook_server() as server, node.pool() as pool:
        job = pool.detach(Task(wait_for, (str(tmp_path / "run"),)), "long", notify=[server.url("hook")])
        until(lambda: any("100% of" in body["text"] for _, body in server.received), "it is notified")
        texts = [body["text"] for _, body in server.received]
        assert texts[-1] == "node n1 on demo/mig: budget: says that 100% of the budget of $0.20 is spent"
        # Nothing ends, and the head says so to who asks.
        assert node.status().state == "ready" and not pool.look().state.ends
        assert pool.look().state.stops == {"n1": "says that 100% of the budget of $0.20 is spent"}
        job.cancel()


@pytest.mark.slow
def test_a_fleet_ends_once_its_budget_is_spent_and_a_deploy_gives_it_no_other(make_node: MakeNode) -> None:
    def budget(usd: float) -> NodeBudget:
        return NodeBudget(usd=usd, head=36.0, node=36.0, pool=36.0)  # a cent a second

    node = make_node("n1", cpu_slots=1, budget=budget(0.2))
    node.boot()
    until(lambda: node.directory.holder() is None, "the node has ended")
    assert node.status().stops == "the budget of $0.20 is spent"
    spent = Ledger(node.directory.jobs)
    spent.load()
    assert spent.spent("n1", budget(0.2)) > 0.15
    # Its life begins anew, and not its account.
    node.run("boot", check=False)
    until(lambda: node.directory.holder() is None, "it has ended again")
    assert node.status().stops == "the budget of $0.20 is spent"
    # It was raised.
    node.configure(budget=budget(1000.0))
    node.boot()
    assert node.status().state == "ready"
    until(lambda: (Meter.load(node.path / FILE).budget_s or 0) > 600, "it has heard the account")
