"""Packings against an independent check, and against trying everything."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal

import pytest
from checks import packing as checks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import skyinfra as sky
from skyinfra import (
    DemandDoesNotFit,
    InvalidDemand,
    InvalidField,
    NotOffered,
    NotSupported,
    UnknownProfile,
    mig,
    packing,
    providers,
)
from skyinfra.compiler import compile_pool
from skyinfra.offers import Offer, Price, load
from skyinfra.packing.supply import Gpu

NAMES = ("1g.5gb", "1g.6gb", "1g.10gb", "2g.10gb", "2g.12gb", "3g.20gb", "4g.24gb", "1g.24gb", "2g.48gb", "7g.40gb")
SIZES = (">=6GB", ">=12GB", ">=18GB", ">=24GB", ">=40GB")


def machine(name: str, accelerator: str, memory_gb: int, count: int, usd: float, **more: bool) -> Offer:
    price = Price(usd, "here", "2026-01-01")
    return Offer("test", name, accelerator, count, memory_gb, on_demand=price, regions=("here",), **more)  # type: ignore[arg-type]


def test_the_example_of_the_documentation() -> None:
    found = sky.mig.pack("1g.10gb*20, 3g.40gb*4, >=18GB*6", provider="aws")
    checks.check(found, {"1g.10gb": 20, "3g.40gb": 4, ">=18GB": 6})
    assert (found.status, found.gap, found.bound) == ("optimal", 0, found.cost_per_hour)
    (only,) = found.machines
    assert (only.offer.machine_type, only.nodes, only.region) == ("p4de.24xlarge", 1, "us-east-1")
    assert found.cost_per_hour == 27.44705
    assert found.waste.bought == 640 and found.waste.asked == 468
    assert found.left_out == {
        "not an NVIDIA GPU": 20,
        "no longer sold to everybody": 3,
        "a share of a GPU": 5,
        "price not known": 1,
    }


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize(
    ("wanted", "provider"),
    [
        ({"1g.10gb": 20, "3g.40gb": 4}, "aws"),
        ({"1g.10gb": 500, "2g.20gb": 200, "3g.40gb": 150, ">=18GB": 100, "7g.80gb": 50}, None),
        ({">=5GB": 7, ">=100GB": 2}, ["aws", "gcp"]),
        ({"1g.5gb": 100, "1g.10gb": 3}, "gcp"),
        ({"3g.71gb": 5, "1g.18gb": 9}, ["aws", "nebius"]),
    ],
)
def test_packings_of_the_shipped_offers(
    wanted: dict[str, int], provider: str | list[str] | None, spot: bool, exact: bool
) -> None:
    try:
        found = packing.pack(wanted, provider=provider, spot=spot, exact=exact)
    except NotOffered:
        assert spot or exact
        return
    checks.check(found, wanted, exact=exact)
    assert found.status == "optimal"


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[list[Offer], dict[str, int]]:
    kinds = [("A30", 24), ("A100", 40), ("RTX PRO 6000", 96), ("L4", 24), ("T4", 16)]
    selected = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(1, 2)), min_size=1, max_size=3))
    cents = draw(st.lists(st.integers(20, 400), min_size=len(selected), max_size=len(selected)))
    offers = [
        machine(f"m{index}", name, memory, count, usd / 100)
        for index, (((name, memory), count), usd) in enumerate(zip(selected, cents, strict=True))
    ]
    wanted = draw(st.dictionaries(st.sampled_from(NAMES + SIZES), st.integers(1, 5), min_size=1, max_size=3))
    return offers, wanted


LIMITS = st.sampled_from([None, None, 1, 2])


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(small_problems(), st.booleans(), LIMITS)
def test_nothing_is_cheaper(problem: tuple[list[Offer], dict[str, int]], exact: bool, max_nodes: int | None) -> None:
    nothing_is_cheaper(*problem, exact, max_nodes)


@pytest.mark.slow
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(small_problems(), st.booleans(), LIMITS)
def test_nothing_is_cheaper_in_many(
    problem: tuple[list[Offer], dict[str, int]], exact: bool, max_nodes: int | None
) -> None:
    nothing_is_cheaper(*problem, exact, max_nodes)


def nothing_is_cheaper(offers: list[Offer], wanted: dict[str, int], exact: bool, max_nodes: int | None) -> None:
    try:
        found = packing.pack(wanted, offers=offers, exact=exact, max_nodes=max_nodes)
    except (NotOffered, DemandDoesNotFit):
        assert checks.cheapest(offers, wanted, machines=max_nodes or 3, exact=exact) is None
        return
    checks.check(found, wanted, exact=exact)
    assert found.status == "optimal"
    most = min(max_nodes or 5, max(5, found.nodes))
    claimed = Decimal(str(found.cost_per_hour)), found.nodes
    best = checks.cheapest(offers, wanted, machines=most, exact=exact, up_to=claimed)
    assert best == (claimed if found.nodes <= most else None)


def test_exact_serves_a_profile_by_itself_alone() -> None:
    offers = [machine("a30", "A30", 24, 1, 1), machine("a100", "A100", 40, 1, 5)]
    loose = packing.pack("1g.5gb*4", offers=offers)
    assert [(each.profile, each.gpu) for each in loose.given] == [("1g.6gb", "A30")]
    strict = packing.pack("1g.5gb*4", offers=offers, exact=True)
    assert [(each.profile, each.gpu) for each in strict.given] == [("1g.5gb", "A100-40GB")]
    assert strict.cost_per_hour > loose.cost_per_hour


def test_a_name_that_several_gpus_have_is_served_by_any_of_them_even_exactly() -> None:
    offers = [machine("h100", "H100", 80, 1, 2), machine("a100", "A100", 80, 1, 1)]
    assert packing.pack("1g.10gb*7", offers=offers, exact=True).given[0].gpu == "A100"
    # With less compute than any that has the name: 14 SMs for the 30 that 2g has at least, in as much memory.
    double = packing.pack("2g.20gb*4", offers=[machine("a100", "A100", 80, 1, 1)])
    assert double.nodes == 2 and double.given[0].profile == "2g.20gb"


def test_whole_gpus_serve_sizes_and_those_with_mig_serve_profiles_too() -> None:
    l4, closed = machine("l4", "L4", 24, 1, 1), machine("pod", "H100", 80, 1, 1, divisible=False)
    assert packing.pack(">=18GB*2", offers=[l4]).given[0].profile is None
    with pytest.raises(NotOffered):
        packing.pack("1g.10gb", offers=[l4])
    assert packing.pack("1g.10gb*2, 7g.80gb", offers=[closed]).nodes == 3
    with pytest.raises(NotOffered):
        packing.pack(">=18GB", offers=[l4, closed], exact=True)


def test_media_engines_and_graphics_that_are_asked_for() -> None:
    offers = [machine("rtx", "RTX PRO 6000", 96, 1, 1)]
    me = packing.pack("1g.24gb+me*2, 1g.24gb*2", offers=offers)
    assert me.nodes == 2
    assert {(each.wanted, each.profile) for each in me.given} == {("1g.24gb+me", "1g.24gb+me"), ("1g.24gb", "1g.24gb")}
    gfx = packing.pack("2g.48gb+gfx*2, 1g.24gb-me*3", offers=offers)
    assert {each.profile for each in gfx.given if each.wanted == "2g.48gb+gfx"} == {"2g.48gb+gfx"}
    # All of a GPU has all of its engines.
    assert packing.pack("1g.10gb+me", offers=[machine("pod", "H100", 80, 1, 1, divisible=False)]).nodes == 1


def test_the_gpus_of_one_machine_may_differ_and_layouts_are_kept_maximal() -> None:
    found = packing.pack("7g.40gb, 1g.5gb*7", offers=[machine("two", "A100", 40, 2, 3)])
    assert set(found.machines[0].layouts) == {"7g.40gb*1", "1g.5gb*7"}
    assert found.machines[0].accelerator.startswith("A100-40GB:2/") and "|" in found.machines[0].accelerator
    spare = packing.pack("3g.20gb", offers=[machine("one", "A100", 40, 1, 3)])
    assert spare.machines[0].layouts == ("4g.20gb+3g.20gb",)
    assert [(each.profile, each.count) for each in spare.spare] == [("4g.20gb", 1)]


def test_of_equal_cost_the_fewest_machines() -> None:
    offers = [machine("one", "A30", 24, 1, 1), machine("eight", "A30", 24, 8, 8)]
    assert [each.offer.machine_type for each in packing.pack("1g.6gb*32", offers=offers).machines] == ["eight"]
    mixed = packing.pack("1g.6gb*36", offers=offers)
    assert sorted((each.offer.machine_type, each.nodes) for each in mixed.machines) == [("eight", 1), ("one", 1)]


def test_the_order_of_demand_and_offers_means_nothing() -> None:
    parts = ["1g.10gb*9", ">=18GB*2", "3g.40gb*2", "1g.10gb*4"]
    first = packing.pack(", ".join(parts), provider=["aws", "gcp"])
    assert packing.pack(", ".join(reversed(parts)), provider=["gcp", "aws"]) == first
    assert (
        packing.pack({"3g.40gb": 2, ">=18GB": 2, "1g.10gb": 13}, offers=reversed(load()), provider=["aws", "gcp"])
        == first
    )


def test_the_same_in_another_process() -> None:
    program = (
        "import skyinfra as sky\nprint(sky.mig.pack('1g.10gb*33, 3g.40gb*7, >=18GB*11', provider=['aws', 'lambda']))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_a_limit_of_machines() -> None:
    offers = [machine("one", "A30", 24, 1, 1), machine("four", "A30", 24, 4, 5)]
    assert packing.pack("1g.6gb*16", offers=offers).cost_per_hour == 4
    limited = packing.pack("1g.6gb*16", offers=offers, max_nodes=2)
    assert (limited.cost_per_hour, limited.nodes) == (5, 1)
    with pytest.raises(DemandDoesNotFit) as caught:
        packing.pack("1g.6gb*33", offers=offers, max_nodes=2)
    assert caught.value.hint == "At least 3 are needed, for $11.00/h; the cheapest set is 9 machines for $9.00/h."


@pytest.mark.parametrize(
    ("demand", "arguments", "says"),
    [
        (">=300GB", {}, r">=300GB: The largest there is 7g\.269gb of B300 with 288 GB\."),
        (
            "7g.180gb*2, 1g.10gb",
            {"provider": "azure"},
            r"can hold 7g\.180gb\n7g\.180gb: Offered: \w+ \S+.* \(B200:\d\) at \$",
        ),
        ("1g.16gb", {"exact": True}, r"Without exact, 1g\.18gb of H200 would serve\. It is a profile of h100_64gb"),
        ("4g.40gb", {"provider": "aws", "region": "eu-west-3"}, r"no offer of aws in eu-west-3 with a known on-demand"),
        (">=30GB", {"provider": "lambda", "spot": True}, r"with a known spot price"),
    ],
)
def test_what_nobody_offers(demand: str, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(NotOffered, match=says):
        packing.pack(demand, **arguments)  # type: ignore[arg-type]


def test_wrong_arguments() -> None:
    with pytest.raises(UnknownProfile, match=r"nearest are 7g\.94gb"):
        packing.pack("9g.90gb")
    with pytest.raises(InvalidField, match="Did you mean aws"):
        packing.pack("1g.10gb", provider="awss")
    with pytest.raises(InvalidField, match=r"Did you mean .*us-east-1"):
        packing.pack("1g.10gb", provider="aws", region="us-est-1")
    with pytest.raises(InvalidField, match="max_nodes"):
        packing.pack("1g.10gb", max_nodes=0)
    with pytest.raises(InvalidDemand):
        packing.pack("")


def test_pools_declare_the_machines() -> None:
    found = packing.pack("1g.10gb*500, 3g.40gb*40, >=18GB*60", provider="aws")
    pools = found.pools()
    assert [pool.nodes for pool in pools] == [each.nodes for each in found.machines]
    assert len({pool.name for pool in pools}) == len(pools)
    for pool, machines in zip(pools, found.machines, strict=True):
        (accelerator,) = pool.accelerators
        assert isinstance(pool.provider, sky.AWS) and pool.provider.region == machines.region
        assert (accelerator.name, accelerator.memory_gb) == (machines.offer.accelerator, machines.offer.memory_gb)
        assert accelerator.count == machines.offer.count
        assert accelerator.layouts() == (machines.placements if any(machines.layouts) else ())
        # The pool compiles to this very machine, at this price.
        selection = compile_pool(pool, "packed").selection
        assert selection.machine_types == (machines.offer.machine_type,)
        assert selection.hourly_cost == machines.price.usd_per_hour
    space: dict[str, object] = {}
    exec(found.source(), space)
    assert space["pools"] == pools


def test_pools_of_a_provider_that_cannot_be_deployed_to() -> None:
    found = packing.pack(">=40GB*2", provider="coreweave")
    with pytest.raises(NotSupported, match=r"coreweave: .*no machine resource(.|\n)*deploys to: aws"):
        found.pools()
    space: dict[str, object] = {}
    exec(found.source(), space)
    text = found.source()
    assert space["pools"] == [] and "no machine resource" in text.replace("\n    # ", " ")
    assert max(map(len, text.splitlines())) <= 80
    spot = packing.pack("1g.10gb*2", provider="aws", spot=True)
    assert spot.spot and spot.pools()[0].spot and "spot=True" in spot.source()


def test_only_machines_that_can_be_deployed_are_chosen() -> None:
    found = packing.pack("1g.10gb*20, 3g.40gb*4")
    assert {each.offer.provider for each in found.machines} <= set(providers.deployable())
    assert found.left_out["a provider that cannot be deployed to"] >= 13  # CoreWeave's at least
    assert all(providers.refuses(each.offer) is None for each in found.machines)
    # Among all others it is found when it is asked for.
    assert packing.pack(">=40GB", offers=load()).left_out.get("a provider that cannot be deployed to") is None


def test_only_machines_that_are_sold_on_demand_are_chosen_but_for_spot() -> None:
    found = sky.pack("1g.35gb*4", provider="gcp", spot=True, exact=True)
    assert [each.offer.machine_type for each in found.machines] == ["a3-ultragpu-8g"]
    with pytest.raises(sky.NotOffered):
        sky.pack("1g.35gb*4", provider="gcp", exact=True)


def test_what_a_provider_needs_besides_is_given_or_said() -> None:
    found = packing.pack("1g.10gb*7", provider="verda")
    with pytest.raises(sky.InvalidField, match=r"Verda\.ssh_public_key"):
        found.pools()
    (pool,) = found.pools(sky.AWS(), sky.Verda(ssh_public_key="ssh-ed25519 AAAA", image="ubuntu", region="FIN-03"))
    assert isinstance(pool.provider, sky.Verda)
    assert (pool.provider.region, pool.provider.image) == (found.machines[0].region, "ubuntu")
    assert pool.provider.instance_types == (found.machines[0].offer.machine_type,)
    assert "    # To be added: Verda.ssh_public_key: is needed" in found.source()
    assert "To be added" not in packing.pack("1g.10gb*7", provider="aws").source()


def test_prices_of_another_region_are_kept_as_they_are() -> None:
    found = packing.pack("1g.10gb*7", provider="aws", region="eu-west-2")
    assert {each.region for each in found.machines} == {"eu-west-2"}
    assert {each.price.region for each in found.machines} == {"us-east-1"}
    # It is not offered where its price is from.
    (b300,) = packing.pack("7g.269gb", provider="aws").machines
    assert (b300.price.region, b300.region) == ("us-east-1", "us-west-2")


def test_without_scipy_the_install_command_is_said() -> None:
    program = (
        "import sys; sys.modules['scipy'] = None\n"
        "import skyinfra as sky\n"
        "try: sky.mig.pack('1g.10gb')\n"
        "except sky.MissingDependency as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install "skyinfra[pack]"' in result.stdout


def test_importing_mig_brings_neither_packing_nor_a_solver() -> None:
    program = (
        "import sys, json, skyinfra.mig; print(json.dumps([m for m in sys.modules if 'packing' in m or 'scipy' in m]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
    with pytest.raises(AttributeError):
        sky.mig.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("attributes", [frozenset(), frozenset({"+me"}), frozenset({"+me", "+gfx", "-me", "+me.all"})])
def test_the_layouts_of_each_gpu_are_all_that_are_maximal(attributes: frozenset[str]) -> None:
    for model in mig.models():
        geometry = mig.geometry(model)
        if not geometry.profiles or any(profile.starts is None for profile in geometry.profiles):
            continue
        names = [each.name for each in geometry.profiles if not each.attributes or each.attributes in attributes]
        gpu = Gpu(model, 80, True, model)
        assert set(gpu.layouts(attributes)) == set(mig.maximal_multisets(geometry, names)), model
