from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyinfra import DriverTooOld, InvalidField, LayoutDoesNotFit, MigNotSupported, UnknownProfile, mig
from skyinfra.mig.drivers import rules, version

A100 = mig.geometry("a100_40gb")
H100 = mig.geometry("h100_80gb")
RTX = mig.geometry("rtx_pro_6000_96gb")
PLACEABLE = [model for model in mig.models() if any(p.starts for p in mig.geometry(model).profiles)]


def kinds(model: str, which: str) -> list[str]:
    """Names of a model's profiles: the plain ones, with double memory, with +me."""
    geometry = mig.geometry(model)
    wanted = {"plain": (0, 1, 2, 3, 4), "double": (0, 1, 2, 3, 4, 9), "me": (0, 1, 2, 3, 4, 7, 8, 9)}[which]
    return [p.name for p in geometry.profiles if p.nvml_enum in wanted]


@pytest.mark.parametrize(
    ("model", "which", "states", "maximal", "sets", "maximal_sets"),
    [
        ("a100_40gb", "plain", 297, 19, 37, 12),
        ("a100_80gb", "plain", 297, 19, 37, 12),
        ("h100_80gb", "plain", 297, 19, 37, 12),
        ("h100_80gb", "double", 722, 78, 77, 28),
        ("a100_40gb", "me", 2318, 239, 127, 44),
        ("h100_80gb", "me", 2318, 239, 127, 44),
        ("a30_24gb", "plain", 25, 5, 9, 4),
        ("a30_24gb", "me", 75, 17, 19, 8),
        ("rtx_pro_6000_96gb", "plain", 25, 5, 9, 4),
    ],
)
def test_number_of_layouts(model: str, which: str, states: int, maximal: int, sets: int, maximal_sets: int) -> None:
    geometry, names = mig.geometry(model), kinds(model, which)
    every, complete = mig.layouts(geometry, names), mig.maximal_layouts(geometry, names)
    assert (len(every), len(complete)) == (states, maximal)
    assert len(mig.multisets(every, geometry)) == sets
    assert len(mig.maximal_multisets(geometry, names)) == maximal_sets


def test_before_r510_four_and_three_slices_did_not_stand_together() -> None:
    names = kinds("a100_40gb", "plain")
    old, new = (set(mig.maximal_layouts(A100, names, driver=driver)) for driver in ("R470", "510.47.03"))
    assert (len(old), len(new)) == (18, 19)
    assert [p.profile for layout in new - old for p in layout] == ["4g.20gb", "3g.20gb"]
    assert len(mig.maximal_multisets(A100, names, driver="R470")) == 11
    assert len(mig.layouts(A100, names, driver="R470")) == 296


def test_an_old_driver_lacks_profiles() -> None:
    held = {name for layout in mig.layouts(A100, driver="450.80.02") for name in (p.profile for p in layout)}
    assert held == set(kinds("a100_40gb", "plain"))
    with pytest.raises(DriverTooOld, match=r"525\.85\.12"):
        mig.layouts(H100, driver="R510")


@pytest.mark.parametrize("model", [*PLACEABLE])
def test_the_walk_finds_what_the_search_accepts(model: str) -> None:
    """Two programs: the walk makes layouts unit by unit, the search places a wanted combination."""
    geometry = mig.geometry(model)
    every = mig.layouts(geometry)
    assert len(set(every)) == len(every)
    found = {frozenset(Counter(names).items()) for names in mig.multisets(every, geometry)}
    for held in mig.multisets(mig.maximal_layouts(geometry), geometry):
        mig.place(held, geometry)
        for extra in geometry.profiles:
            larger = Counter([*held, extra.name])
            assert (frozenset(larger.items()) in found) == (not mig.attempt(larger, geometry).missing)


@given(st.data())
@settings(max_examples=60)
def test_a_maximal_layout_has_no_room_and_every_other_has(data: st.DataObject) -> None:
    geometry = mig.geometry(data.draw(st.sampled_from(["a30_24gb", "a100_40gb", "rtx_pro_6000_96gb"])))
    maximal = set(mig.maximal_layouts(geometry))
    layout = data.draw(st.sampled_from(mig.layouts(geometry)))
    assert (mig.fitting(layout, geometry) == ()) == (layout in maximal)


def test_the_same_layouts_in_the_same_order() -> None:
    names = [p.name for p in RTX.profiles]
    assert mig.layouts(RTX, names) == mig.layouts(RTX, list(reversed(names)))
    assert mig.multisets(mig.layouts(A100, ["3g.20gb"]), A100) == (("3g.20gb",), ("3g.20gb", "3g.20gb"))


def test_plain_profiles() -> None:
    for model in PLACEABLE:
        assert sorted(mig.plain_profiles(mig.geometry(model))) == sorted(kinds(model, "plain"))


def test_what_fits_where_they_stand_and_what_fits_placed_anew() -> None:
    (layout,) = mig.resolve("3g.40gb@0+2g.20gb+1g.10gb", H100, 1)
    assert mig.fitting(layout, H100) == ()
    assert mig.joinable(["3g.40gb", "2g.20gb", "1g.10gb"], H100) == ("1g.10gb", "1g.10gb+me")
    assert mig.joinable({"3g.40gb": 2}, H100) == ()


def test_nearest_combinations_have_most_of_what_is_wanted() -> None:
    near = mig.nearest({"3g.40gb": 2, "2g.20gb": 1}, H100)
    assert near[0] == ("3g.40gb", "3g.40gb")
    assert near[1:] == (("3g.40gb", "2g.20gb", "2g.20gb"), ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"))
    assert mig.nearest({"1g.20gb": 4, "1g.10gb": 3}, H100, limit=1) == (("1g.20gb",) * 4,)
    assert mig.nearest({"7g.79gb": 2}, mig.geometry("a100_80gb"), limit=1) == (("7g.80gb",),)


def test_unknown_input_is_refused() -> None:
    with pytest.raises(UnknownProfile):
        mig.layouts(H100, ["3g.20gb"])
    with pytest.raises(MigNotSupported):
        mig.maximal_layouts(mig.geometry("rtx_pro_5000_48gb"))
    with pytest.raises(InvalidField, match=r"535\.161\.07"):
        mig.layouts(H100, driver="newest")


@pytest.mark.parametrize(
    ("model", "profiles", "driver"),
    [
        ("a100_40gb", ["4g.20gb", "3g.20gb"], "510"),
        ("a100_40gb", ["4g.20gb", "2g.10gb"], "450.80.02"),
        ("a100_40gb", ["1g.5gb+me"], "470"),
        ("a100_40gb", ["1g.10gb", "1g.5gb+me"], "525"),
        ("a100_80gb", ["1g.10gb"], "450.80.02"),
        ("a100_80gb", ["1g.20gb"], "525"),
        ("a30_24gb", ["2g.12gb+me"], "525"),
        ("h100_80gb", ["4g.40gb", "3g.40gb"], "525.85.12"),
        ("gh200_96gb", ["1g.12gb"], None),
    ],
)
def test_the_driver_that_a_layout_needs(model: str, profiles: list[str], driver: str | None) -> None:
    geometry = mig.geometry(model)
    assert mig.required_driver(profiles, geometry) == driver
    layout = mig.place(profiles, geometry)
    mig.check_driver(layout, geometry, driver or "1")
    if driver is not None:
        with pytest.raises(DriverTooOld, match=f"needs driver {driver} or later"):
            mig.check_driver(layout, geometry, "450.80.01")


def test_a_branch_is_older_than_its_releases() -> None:
    assert version("R510") < version("510.47.03") < version("525")
    assert version("525.85.12") > version("525.9")
    for wrong in ("", "510.", "R", "new", "5-1"):
        with pytest.raises(InvalidField):
            version(wrong)


@pytest.mark.parametrize("model", mig.models())
def test_driver_rules_name_profiles_of_the_part_and_stand_in_its_source(model: str) -> None:
    geometry = mig.geometry(model)
    words = mig.geometry("a100_40gb" if geometry.min_driver_detail == "as A100-40" else model).min_driver_detail
    for together, driver in rules(model):
        assert together <= {p.name for p in geometry.profiles}
        assert f"R{driver}" in (words or "")


def test_the_error_says_what_was_asked_for() -> None:
    with pytest.raises(LayoutDoesNotFit, match=r"at most 7 of 1g\.10gb .*1g\.10gb\*9"):
        mig.resolve("1g.10gb*9", H100, 1)


def test_a_gpu_whose_profiles_are_not_known_has_no_layouts_to_list() -> None:
    unknown = mig.geometry("a100_64gb")
    for listed in (mig.layouts, mig.maximal_layouts, mig.plain_profiles):
        with pytest.raises(MigNotSupported, match="the profiles of a100_64gb are not known"):
            listed(unknown)
