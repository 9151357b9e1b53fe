from __future__ import annotations

import itertools
from collections import Counter

import pytest
from checks.layouts import every_layout, legal, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from skyinfra import InvalidLayout, LayoutDoesNotFit, MigNotSupported, mig

PLACEABLE = [model for model in mig.models() if any(p.starts for p in mig.geometry(model).profiles)]
UNPLACEABLE = [m for m in mig.models() if mig.geometry(m).profiles and m not in PLACEABLE]


@pytest.mark.parametrize(
    ("model", "double_memory", "states", "maximal", "multisets", "maximal_multisets"),
    [
        ("a100_40gb", False, 297, 19, 37, 12),
        ("h100_80gb", False, 297, 19, 37, 12),
        ("h100_80gb", True, 722, 78, 77, 28),
        ("a30_24gb", False, 25, 5, 9, 4),
        ("rtx_pro_6000_96gb", False, 25, 5, 9, 4),
    ],
)
def test_number_of_layouts(
    model: str, double_memory: bool, states: int, maximal: int, multisets: int, maximal_multisets: int
) -> None:
    """NVIDIA's guide draws 19 layouts of an A100."""
    geometry = mig.geometry(model)
    names = plain(geometry) + [p.name for p in geometry.profiles if double_memory and p.nvml_enum == 9]
    layouts = {frozenset(layout) for layout in every_layout(geometry, names)} - {frozenset()}
    largest = {a for a in layouts if not any(a < b for b in layouts)}
    kinds = {frozenset(Counter(p.profile for p in layout).items()) for layout in layouts}
    counters = [Counter(dict(kind)) for kind in kinds]
    most = [a for a in counters if not any(a < b for b in counters)]
    assert (len(layouts), len(largest), len(kinds), len(most)) == (states, maximal, multisets, maximal_multisets)
    for kind in counters:
        assert legal(mig.place(sorted(kind.elements()), geometry), geometry)


@given(st.data())
@settings(max_examples=200)
def test_place_is_legal_complete_and_indifferent_to_order(data: st.DataObject) -> None:
    geometry = mig.geometry(data.draw(st.sampled_from(PLACEABLE)))
    names = [p.name for p in geometry.profiles]
    wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=5))
    feasible = _feasible(geometry, Counter(wanted))
    try:
        layout = mig.place(wanted, geometry)
    except LayoutDoesNotFit:
        assert not feasible
        return
    assert feasible
    assert legal(layout, geometry)
    assert Counter(p.profile for p in layout) == Counter(wanted)
    assert list(layout) == sorted(layout, key=lambda p: p.start)
    assert mig.place(data.draw(st.permutations(wanted)), geometry) == layout


def _feasible(geometry: mig.Geometry, wanted: Counter[str]) -> bool:
    """Brute force: every choice of starts for every profile."""
    starts = {p.name: [(s, p.size or 0) for s in p.starts or ()] for p in geometry.profiles}
    choices = [itertools.combinations(starts[name], count) for name, count in wanted.items()]
    return any(
        legal([mig.Placement(n, *at) for n, ats in zip(wanted, selected, strict=True) for at in ats], geometry)
        for selected in itertools.product(*choices)
    )


@pytest.mark.parametrize("model", PLACEABLE)
def test_fill_is_legal_and_as_many_as_the_gpu_takes(model: str) -> None:
    geometry = mig.geometry(model)
    for profile in geometry.profiles:
        layout = mig.fill(profile.name, geometry)
        assert legal(layout, geometry)
        assert len(layout) == mig.max_count(profile.name, geometry) == profile.max_count


def test_three_and_four_slices_stand_together() -> None:
    geometry = mig.geometry("h100_80gb")
    assert mig.place(["3g.40gb", "4g.40gb"], geometry) == (
        mig.Placement("4g.40gb", 0, 4),
        mig.Placement("3g.40gb", 4, 4),
    )


def test_a_layout_whose_slices_add_up_but_has_no_place() -> None:
    geometry = mig.geometry("h100_80gb")
    with pytest.raises(LayoutDoesNotFit) as caught:
        mig.place(["1g.20gb"] * 4 + ["1g.10gb"] * 3, geometry)
    text = str(caught.value)
    assert "no free place for 1g.10gb" in text
    assert text.count("|1g.20gb") == 4
    assert "Would still fit: nothing." in text


@pytest.mark.parametrize(
    ("model", "wanted", "why"),
    [
        ("h100_80gb", ["4g.40gb", "4g.40gb"], "at most 1 of"),
        ("h100_80gb", ["4g.40gb", "3g.40gb", "1g.10gb"], "compute slices: 8 of 7"),
        ("h100_80gb", ["1g.10gb+me", "1g.10gb+me"], "at most 1 of"),
        ("a30_24gb", ["1g.6gb+me", "2g.12gb+me"], "only one partition of a GPU is"),
        ("rtx_pro_6000_96gb", ["1g.24gb+me.all", "1g.24gb"], "takes every media engine"),
        ("rtx_pro_6000_96gb", ["1g.24gb+me.all", "1g.24gb+me"], "takes every media engine"),
        ("rtx_pro_6000_96gb", ["2g.48gb+me.all", "2g.48gb+gfx"], "takes every media engine"),
    ],
)
def test_why_a_layout_does_not_fit(model: str, wanted: list[str], why: str) -> None:
    with pytest.raises(LayoutDoesNotFit) as caught:
        mig.place(wanted, mig.geometry(model))
    assert why in str(caught.value)


def test_instances_without_media_engines_stand_beside_the_one_with_all() -> None:
    geometry = mig.geometry("rtx_pro_6000_96gb")
    layout = mig.place(["1g.24gb-me", "2g.48gb+me.all", "1g.24gb-me"], geometry)
    assert [(p.profile, p.start) for p in layout] == [("2g.48gb+me.all", 0), ("1g.24gb-me", 6), ("1g.24gb-me", 9)]


def test_the_error_draws_how_far_it_got_and_says_what_still_fits() -> None:
    with pytest.raises(LayoutDoesNotFit) as caught:
        mig.place(["3g.40gb", "3g.40gb", "2g.20gb"], mig.geometry("h100_80gb"))
    assert caught.value.hint == (
        "memory   0   1   2   3   4   5   6   7\n        |3g.40gb        |3g.40gb        |\nWould still fit: nothing."
        "\nInstead: 3g.40gb*2 or 3g.40gb+2g.20gb*2 or 3g.40gb+2g.20gb+1g.10gb*2."
    )
    with pytest.raises(LayoutDoesNotFit, match=r"Would still fit: 1g\.10gb, 1g\.10gb\+me, 1g\.20gb, 2g\.20gb, 3g"):
        mig.place(["4g.40gb", "4g.40gb"], mig.geometry("h100_80gb"))


def test_the_error_says_what_would_fit_instead() -> None:
    with pytest.raises(LayoutDoesNotFit) as caught:
        mig.resolve("3g.40gb*2+2g.20gb", mig.geometry("h100_80gb"), 1)
    assert (caught.value.hint or "").splitlines()[-1].startswith("Instead: 3g.40gb*2 or 3g.40gb+2g.20gb*2 or ")


def test_drawing_shows_free_units() -> None:
    geometry = mig.geometry("h100_80gb")
    layout = (mig.Placement("3g.40gb", 0, 4), mig.Placement("1g.10gb", 5, 1))
    assert mig.draw(layout, geometry) == (
        "memory   0       1       2       3       4       5       6       7\n"
        "        |3g.40gb                        |       |1g.10gb|               |"
    )


@pytest.mark.parametrize("model", UNPLACEABLE)
def test_without_known_placements_nothing_is_placed(model: str) -> None:
    geometry = mig.geometry(model)
    for act in (mig.fill, mig.max_count):
        with pytest.raises(MigNotSupported, match="not known"):
            act(geometry.profiles[0].name, geometry)
    with pytest.raises(MigNotSupported, match="not known"):
        mig.place([geometry.profiles[0].name], geometry)


def test_some_models_are_unplaceable() -> None:
    assert set(UNPLACEABLE) == {"rtx_pro_5000_48gb", "rtx_pro_4500_32gb", "thor_igpu"}


def test_resolve_fills_for_a_single_name_and_is_exact_otherwise() -> None:
    geometry = mig.geometry("h100_80gb")
    two = (mig.Placement("3g.40gb", 0, 4), mig.Placement("3g.40gb", 4, 4))
    assert mig.resolve("3g.40gb", geometry, 2) == (two, two)
    one = (mig.Placement("3g.40gb", 4, 4),)
    for exact in ("3g.40gb*1", ["3g.40gb"], {"3g.40gb": 1}):
        assert mig.resolve(exact, geometry, 3) == (one, one, one)
    assert len(mig.resolve("1g.10gb+me", geometry, 1)[0]) == 1


def test_resolve_per_gpu() -> None:
    geometry = mig.geometry("h100_80gb")
    layouts = mig.resolve(mig.per_gpu("3g.40gb", {"7g.80gb": 1}), geometry, 2)
    assert [[p.profile for p in layout] for layout in layouts] == [["3g.40gb", "3g.40gb"], ["7g.80gb"]]
    with pytest.raises(InvalidLayout, match="2 layouts for 8 GPUs"):
        mig.resolve(mig.per_gpu("3g.40gb", "7g.80gb"), geometry, 8)
    with pytest.raises(LayoutDoesNotFit, match=r"^\[1\]: "):
        mig.resolve(mig.per_gpu("3g.40gb", "4g.40gb*2"), geometry, 2)
