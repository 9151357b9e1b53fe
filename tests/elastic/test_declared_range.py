"""Sizes that follow the work, as they are declared: what compiles, and what is refused where."""

from __future__ import annotations

from typing import Any

import pytest
from terraform_projects.synthesized import document_of

import skyinfra as sky
from skyinfra.bootstrap import user_data
from skyinfra.compiler import Deployment, compile_pool, compile_pools
from skyinfra.errors import InvalidField, NotSupported, SkyinfraError
from skyinfra.places.choices import Choice
from skyinfra.providers import kinds, read
from skyinfra.stack import describe, module_inputs


def test_the_head_has_the_bounds_and_the_nodes_the_time() -> None:
    pool = sky.ComputePool(provider=sky.Local(), nodes=sky.Range(0, 4), idle_seconds=30)
    made = compile_pool(pool, "demo")
    assert (made.head.min_nodes, made.head.max_nodes, made.head.node_idle_seconds) == (0, 4, 0)
    assert made.head.scheduler_only and not made.head.ends_itself
    assert (made.worker.min_nodes, made.worker.max_nodes, made.worker.node_idle_seconds) == (0, 0, 30)
    assert made.worker.ends_itself and not made.worker.scheduler_only
    inputs = module_inputs(made, "..")
    assert (inputs["min_nodes"], inputs["node_count"]) == (0, 4)
    assert (describe(made)["min_nodes"], describe(made)["nodes"]) == (0, 4)


def test_without_a_time_it_is_ten_minutes() -> None:
    pool = sky.ComputePool(provider=sky.AWS(), nodes=sky.Range(1, 8))
    made = compile_pool(pool, "demo")
    assert made.worker.node_idle_seconds == 600 and made.selection.separate_head
    assert module_inputs(made, "..")["shutdown_terminates"] is True


def test_a_fixed_number_says_nothing_of_it() -> None:
    made = compile_pool(sky.ComputePool(provider=sky.Local(), nodes=2), "demo")
    assert "min_nodes" not in module_inputs(made, "..") and "min_nodes" not in describe(made)
    assert "nodes" not in made.head.dumps().replace("node_", "") and "node_idle" not in made.worker.dumps()


@pytest.mark.parametrize(
    ("least", "most", "said"),
    [(4, 2, "more than the least, 4"), (4, 4, "A fixed number is nodes=4."), (-1, 4, "greater"), (0, 0, "greater")],
)
def test_bounds_that_are_none(least: int, most: int, said: str) -> None:
    with pytest.raises(InvalidField, match=said):
        sky.Range(least, most)


def test_a_fixed_number_with_a_time_would_end_and_start_for_ever() -> None:
    # https://github.com/dstackai/dstack/issues/3128
    with pytest.raises(InvalidField, match=r"fixed number.*\n.*sky.Range\(0, 2\)"):
        sky.ComputePool(provider=sky.Local(), nodes=2, idle_seconds=600)


@pytest.mark.parametrize(("provider", "least"), [(sky.Local(), 5), (sky.AWS(), 300)])
def test_a_time_that_is_shorter_than_a_boot(provider: sky.Local, least: int) -> None:
    pool = sky.ComputePool(provider=provider, nodes=sky.Range(0, 4), idle_seconds=least - 1)
    with pytest.raises(InvalidField, match=rf"takes to boot .*\nAt least {least}\."):
        compile_pool(pool, "demo")


@pytest.mark.parametrize("nodes", [0, -1, True, 1.5, "4", (0, 4), sky.Range])
def test_what_is_no_number_of_nodes(nodes: object) -> None:
    with pytest.raises(InvalidField, match=r"(?s)^ComputePool\.nodes: .*"):
        sky.ComputePool(provider=sky.Local(), nodes=nodes)  # type: ignore[arg-type]


def test_other_places_refuse_and_name_those_that_can() -> None:
    places = [sky.GCP(project="my-project"), sky.RunPod()]
    for provider in places:
        pool = sky.ComputePool(provider=provider, nodes=sky.Range(0, 4))
        with pytest.raises(NotSupported, match=r"(?s)nodes: .*an apply alone.*sky\.AWS, .*, sky\.Local\."):
            compile_pool(pool, "demo")


def test_containers_follow_the_work_where_an_idle_time_asks_for_it() -> None:
    def compiled(nodes: sky.Range, **more: Any) -> Deployment:
        return compile_pool(
            sky.ComputePool(name="p", provider=sky.Container(image="python:3.12"), nodes=nodes, **more), "s"
        )

    with pytest.raises(NotSupported, match="Declare idle_seconds=600, with which it follows"):
        compiled(sky.Range(0, 4))
    assert compiled(sky.Range(1, 4)).scale == sky.Range(1, 4)
    found = compiled(sky.Range(1, 4), idle_seconds=60)
    inputs = module_inputs(found, "..")
    assert (inputs["node_count"], inputs["min_nodes"], found.scale) == (4, 1, None)
    assert found.head.scheduler_only and (found.head.min_nodes, found.head.max_nodes) == (1, 4)
    assert found.worker.node_idle_seconds == 60
    # The bounds reach the head while it runs; the idle time stands in what a container was made from.
    made, other, longer = (
        user_data(compiled(nodes, idle_seconds=seconds)).revision
        for nodes, seconds in ((sky.Range(1, 4), 60), (sky.Range(0, 9), 60), (sky.Range(1, 4), 61))
    )
    assert made == other != longer


def made(nodes: sky.Range, chosen: int | None = None, **more: Any) -> Deployment:
    pool = sky.ComputePool(name="p", provider=sky.Container(image="python:3.12"), nodes=nodes, **more)
    [found] = compile_pools([pool], "s", {"s/p": Choice(nodes=chosen)})
    return found


def test_elsewhere_the_number_is_that_of_the_file_and_the_least_without_one() -> None:
    declared = sky.Range(1, 4)
    for chosen, count in ((None, 1), (1, 1), (3, 3), (4, 4)):
        found = made(declared, chosen)
        assert module_inputs(found, "..")["node_count"] == describe(found)["nodes"] == count
        assert describe(found)["scale"] == [1, 4] and "min_nodes" not in describe(found)
        assert not found.head.max_nodes and not found.head.scheduler_only and not found.worker.node_idle_seconds
    # Another most, or a fixed number of the same, is the same fleet.
    fixed = compile_pool(sky.ComputePool(name="p", provider=sky.Container(image="python:3.12"), nodes=3), "s")
    for other in (made(declared, 3), made(sky.Range(2, 9), 3)):
        assert module_inputs(other, "..") == module_inputs(fixed, "..")


@pytest.mark.parametrize("chosen", [0, 5, -1])
def test_a_number_outside_of_the_range_is_named_with_its_file(chosen: int) -> None:
    with pytest.raises(
        InvalidField, match=r"(?s)skyinfra\.places\.json .*Range\(1, 4\).*skyinfra scale s/p N, from 1 to 4"
    ):
        made(sky.Range(1, 4), chosen)


def test_a_number_that_makes_all_nodes_anew_is_refused() -> None:
    def declare(nodes: sky.Range, **more: Any) -> Deployment:
        return compile_pool(
            sky.ComputePool(provider=sky.GCP(project="p"), accelerator="A100-40GB:8", nodes=nodes, **more), "s"
        )

    with pytest.raises(InvalidField, match=r"(?s)several are a group.*sky\.Range\(2, 4\)"):
        declare(sky.Range(1, 4), spot=True)
    assert declare(sky.Range(1, 4)).scale == sky.Range(1, 4)
    assert declare(sky.Range(2, 4), spot=True).selection.separate_head


def test_containers_share_the_gpus_of_the_most_so_that_each_keeps_its_own() -> None:
    def gpus(chosen: int) -> list[str]:
        provider = sky.Container(image="python:3.12", gpus=["0", "1", "2", "3"])
        pool = sky.ComputePool(name="p", provider=provider, accelerator="H100:2", nodes=sky.Range(1, 2))
        [found] = compile_pools([pool], "s", {"s/p": Choice(nodes=chosen)})
        return list(module_inputs(found, "..")["gpus"])

    assert (gpus(1), gpus(2)) == (["0", "1"], ["0", "1", "2", "3"])
    with pytest.raises(InvalidField, match="2 nodes would share the GPUs"):
        made(sky.Range(1, 2), accelerator="H100")
    # Where the head is a container besides them, it has none.
    provider = sky.Container(image="python:3.12", gpus=["0", "1", "2", "3"])
    pool = sky.ComputePool(name="p", provider=provider, accelerator="H100:2", nodes=sky.Range(0, 2), idle_seconds=60)
    inputs = module_inputs(compile_pool(pool, "s"), "..")
    assert (inputs["gpus"], inputs["node_count"]) == (["0", "1", "2", "3"], 2)


def test_nodes_that_cannot_follow_the_work_have_no_idle_time() -> None:
    pool = sky.ComputePool(name="p", provider=sky.RunPod(), nodes=sky.Range(1, 4), idle_seconds=600)
    with pytest.raises(NotSupported, match=r"(?s)idle_seconds: .*with an apply alone.*skyinfra scale s/p N"):
        compile_pool(pool, "s")


def test_a_number_of_the_file_says_nothing_to_a_pool_that_follows_the_work_or_is_fixed() -> None:
    for nodes in (sky.Range(0, 4), 2):
        pool = sky.ComputePool(name="p", provider=sky.Local(), nodes=nodes)
        [found] = compile_pools([pool], "s", {"s/p": Choice(nodes=3)})
        assert found.scale is None and found.pool.nodes == nodes


def test_each_place_that_can_has_a_source() -> None:
    able = {kind: found.source for kind in kinds() if (found := read(kind).elastic) is not None}
    assert set(able) == {"aws", "container", "gcp", "local"} and all(able.values())


def test_sick_nodes_that_follow_the_work_are_not_replaced() -> None:
    for provider in (sky.Local(), sky.AWS()):
        pool = sky.ComputePool(provider=provider, nodes=sky.Range(0, 4), idle_seconds=600, replace_sick=True)
        with pytest.raises(InvalidField, match=r"replace_sick: (nodes that follow|the nodes of a machine)"):
            compile_pool(pool, "demo")


def test_a_budget_holds_the_most() -> None:
    pool = sky.ComputePool(provider=sky.AWS(), accelerator="L4", nodes=sky.Range(0, 8), budget=sky.Budget(usd=2))
    with pytest.raises(InvalidField, match="costs"):
        compile_pool(pool, "demo")


def test_a_budget_may_last_an_hour_of_the_most_and_ends_head_and_nodes() -> None:
    budget = sky.Budget(usd=200, action="stop")
    pool = sky.ComputePool(provider=sky.AWS(), accelerator="L4", nodes=sky.Range(0, 8), budget=budget)
    made = compile_pool(pool, "demo")
    assert made.selection.hourly_cost is not None and made.selection.head_price is not None
    most = 8 * made.selection.hourly_cost + made.selection.head_price.usd_per_hour
    for config in (made.head, made.worker):
        assert config.budget is not None and config.budget.pool == pytest.approx(most) and config.ends_itself
    # Its nodes may not be held by the group when the head has ended.
    assert module_inputs(made, "..")["shutdown_terminates"] is True


def test_the_end_of_the_whole_fleet_holds_besides() -> None:
    pool = sky.ComputePool(
        provider=sky.AWS(), nodes=sky.Range(1, 8), idle_seconds=600, stop_after_idle="2h", max_lifetime="12h"
    )
    made = compile_pool(pool, "demo")
    assert (made.head.idle_seconds, made.head.lifetime_seconds, made.head.node_idle_seconds) == (7200, 43_200, 0)
    assert (made.worker.idle_seconds, made.worker.lifetime_seconds, made.worker.node_idle_seconds) == (
        7200,
        43_200,
        600,
    )


def test_a_node_that_would_end_after_its_fleet_is_refused() -> None:
    pool = sky.ComputePool(provider=sky.AWS(), nodes=sky.Range(1, 8), idle_seconds=7200, stop_after_idle="30m")
    with pytest.raises(InvalidField, match=r"(?s)idle_seconds: .*stop_after_idle=\"30m\".*"):
        compile_pool(pool, "demo")


def test_the_price_of_a_node_is_held_to_its_limit_and_the_plan_counts_the_most() -> None:
    pool = sky.ComputePool(provider=sky.AWS(), accelerator="H100:8", nodes=sky.Range(0, 8), max_hourly_cost=10)
    with pytest.raises(SkyinfraError, match="max_hourly_cost"):
        compile_pool(pool, "demo")
    made = compile_pool(sky.ComputePool(provider=sky.AWS(), accelerator="L4", nodes=sky.Range(0, 8)), "demo")
    assert made.usd_per_hour == pytest.approx(8 * made.selection.hourly_cost + made.selection.head_price.usd_per_hour)


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_no_place_takes_a_range_in_silence(kind: str) -> None:
    assert (read(kind).elastic is not None) == (kind in ("aws", "container", "gcp", "local"))


def test_of_several_places_the_one_that_cannot_is_named() -> None:
    places = [sky.AWS(), sky.GCP(project="my-project")]
    pool = sky.ComputePool(name="p", provider=places, accelerator="L4", nodes=sky.Range(0, 4))
    with pytest.raises(NotSupported, match=r"(?s)Google Cloud.*with an apply alone"):
        document_of("demo", [pool])
