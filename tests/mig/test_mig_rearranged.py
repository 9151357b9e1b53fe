"""A change of a layout destroys as few partitions as any placement of the desired profiles allows."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from checks.layouts import every_layout, plain

from skyinfra import InvalidLayout, LayoutDoesNotFit, mig

H100 = mig.geometry("h100_80gb")
Place = tuple[str, int, int]


def places(layout: mig.Layout) -> set[Place]:
    return {(each.profile, each.start, each.size) for each in layout}


def by_profiles(geometry: mig.Geometry) -> dict[tuple[str, ...], list[mig.Layout]]:
    """Every legal layout of the plain profiles, by what it holds: by trying all sets of places."""
    found: dict[tuple[str, ...], list[mig.Layout]] = {}
    for layout in every_layout(geometry, plain(geometry)):
        if layout:
            found.setdefault(tuple(sorted(each.profile for each in layout)), []).append(layout)
    return found


@pytest.mark.parametrize("model", ["h100_80gb", "a30_24gb"])
def test_all_pairs_destroy_what_any_placement_must(model: str) -> None:
    """Nothing is in use, or one standing partition is: that one stays where any placement allows it."""
    geometry = mig.geometry(model)
    known = by_profiles(geometry)
    pairs = destroyed = 0
    for before, after in itertools.permutations(known, 2):
        existing, desired = mig.place(before, geometry), mig.place(after, geometry)
        ways = [places(way) for way in known[after]]
        selected = mig.rearranged(desired, existing, geometry)
        assert Counter(each.profile for each in selected) == Counter(after)
        assert places(selected) in ways
        gone = places(existing) - places(selected)
        assert len(gone) == min(len(places(existing) - way) for way in ways)
        pairs, destroyed = pairs + 1, destroyed + len(gone)
        for used in existing:
            selected = mig.rearranged(desired, existing, geometry, in_use={used.start})
            place = (used.profile, used.start, used.size)
            kept = [way for way in ways if place in way] or ways
            assert (place in places(selected)) == any(place in way for way in ways)
            assert len(places(existing) - places(selected)) == min(len(places(existing) - way) for way in kept)
    if model == "h100_80gb":
        # Placing the desired profiles as on an empty GPU destroys more.
        exact = sum(
            len(places(mig.place(before, geometry)) - places(mig.place(after, geometry)))
            for before, after in itertools.permutations(known, 2)
        )
        assert (pairs, destroyed) == (1332, 2728)
        assert exact > destroyed


def test_a_gpu_that_has_the_profiles_stays_as_it_is() -> None:
    states = 0
    for ways in by_profiles(H100).values():
        for existing in ways:
            desired = mig.place([each.profile for each in existing], H100)
            assert places(mig.rearranged(desired, existing, H100)) == places(existing)
            assert places(mig.rearranged(desired, existing, None)) == places(existing)
            states += 1
    assert states == 297


@pytest.mark.parametrize(
    ("model", "double_memory"), [("h100_80gb", False), ("h100_80gb", True), ("a30_24gb", False), ("b200_180gb", False)]
)
def test_an_empty_gpu_keeps_the_most_room(model: str, double_memory: bool) -> None:
    """No other placement of the same profiles lets more kinds of them fit."""
    geometry = mig.geometry(model)
    names = plain(geometry) + [p.name for p in geometry.profiles if double_memory and p.nvml_enum == 9]
    most: dict[tuple[str, ...], int] = {}
    for layout in every_layout(geometry, names):
        held = tuple(sorted(each.profile for each in layout))
        most[held] = max(most.get(held, 0), len(mig.fitting(layout, geometry)))
    for held, fits in most.items():
        if held:
            assert len(mig.fitting(mig.place(held, geometry), geometry)) == fits


def test_three_slices_leave_room_for_one_more() -> None:
    layout = mig.place(["3g.40gb", "2g.20gb", "1g.10gb"], H100)
    assert places(layout) == {("2g.20gb", 0, 2), ("1g.10gb", 2, 1), ("3g.40gb", 4, 4)}
    assert "1g.10gb" in mig.fitting(layout, H100)


def test_an_addition_leaves_the_partition_in_use() -> None:
    existing = mig.place(["1g.10gb"] * 3, H100)
    desired = mig.place(["3g.40gb", *["1g.10gb"] * 3], H100)
    selected = mig.rearranged(desired, existing, H100, in_use={existing[1].start})
    assert places(existing) < places(selected)


def test_an_explicit_place_is_kept_to() -> None:
    (layout,) = mig.resolve("3g.40gb@0+1g.10gb", H100, 1)
    assert ("3g.40gb", 0, True) in [(each.profile, each.start, each.fixed) for each in layout]
    existing = mig.place(["3g.40gb", "1g.10gb"], H100)
    assert ("3g.40gb", 4, 4) in places(existing)
    selected = mig.rearranged(layout, existing, H100)
    assert ("3g.40gb", 0, 4) in places(selected)
    assert [each.fixed for each in selected if each.profile == "3g.40gb"] == [True]
    assert places(mig.rearranged(layout, existing, None)) == places(layout)
    adopted = mig.rearranged(layout, mig.resolve("3g.40gb@0+1g.10gb@6", H100, 1)[0], H100)
    assert places(adopted) == {("3g.40gb", 0, 4), ("1g.10gb", 6, 1)}


@pytest.mark.parametrize(
    ("declared", "canonical"),
    [
        ("3g.40gb@4", "3g.40gb@4"),
        (" 3G.40GB @ 4 + 1g.10gb*2", "3g.40gb@4+1g.10gb*2"),
        ({"3g.40gb@0": 1, "1g.10gb": 1}, "3g.40gb@0+1g.10gb"),
        (["1g.10gb@6", "1g.10gb@0"], "1g.10gb@6+1g.10gb@0"),
        ("1g.10gb@6+1g.10gb", "1g.10gb@6+1g.10gb"),
    ],
)
def test_a_place_in_a_declaration(declared: mig.Declared, canonical: str) -> None:
    assert mig.text(declared) == canonical
    assert mig.text(canonical, H100) == canonical
    assert places(mig.resolve(canonical, H100, 1)[0]) == places(mig.resolve(declared, H100, 1)[0])


@pytest.mark.parametrize(
    ("declared", "error", "says"),
    [
        ("3g.40gb@2", LayoutDoesNotFit, "it starts at 0, 4"),
        ("3g.40gb@4+2g.20gb@4", LayoutDoesNotFit, "another partition is there"),
        ("1g.10gb@0+1g.10gb@0", LayoutDoesNotFit, "another partition is there"),
        ("2c.2g.20gb@0*3", InvalidLayout, "a place is that of one partition"),
        ("1g.10gb@0*2", InvalidLayout, "a place is that of one partition"),
        (">=20GB@0", InvalidLayout, "a place is that of one partition"),
        ({"1g.10gb@0": 2}, InvalidLayout, "a place is that of one partition"),
        ("3g.40gb@", InvalidLayout, "not the name of a profile"),
        ("3g.40gb@-1", InvalidLayout, "not the name of a profile"),
        ("4g.40gb@0+3g.40gb@0", LayoutDoesNotFit, "another partition is there"),
        ("3g.40gb@0+4g.40gb", LayoutDoesNotFit, "no free place for 4g.40gb"),
    ],
)
def test_a_place_that_is_refused(declared: mig.Declared, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        mig.resolve(declared, H100, 1)


def test_whole_and_partitioned_gpus_of_one_node() -> None:
    per_gpu = mig.per_gpu("off", "1g.10gb*7", " OFF ")
    assert str(per_gpu) == "off|1g.10gb*7|off"
    assert [len(layout) for layout in mig.resolve(per_gpu, H100, 3)] == [0, 7, 0]
    with pytest.raises(InvalidLayout, match="every GPU stays whole"):
        mig.per_gpu("off", "off")
    with pytest.raises(InvalidLayout, match="one GPU of several is"):
        mig.text("off")
