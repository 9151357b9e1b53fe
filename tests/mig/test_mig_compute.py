"""Compute instances that share a GPU instance: read, packed, placed, drawn, and as others take them."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from skyinfra import InvalidDemand, InvalidLayout, LayoutDoesNotFit, NotSupported, UnknownProfile, mig
from skyinfra.mig.grid import Compute, compute_refusal, divide
from skyinfra.mig.layout_tag import read_tag, write_tag
from skyinfra.protocol.fleet import FleetLayout

H100 = mig.geometry("h100_80gb")
A30 = mig.geometry("a30_24gb")


def place(declared: mig.Declared, geometry: mig.Geometry = H100) -> mig.Layout:
    return mig.resolve(declared, geometry, 1)[0]


def kinds(layout: mig.Layout) -> list[tuple[str, tuple[int, ...]]]:
    return [each.kind for each in layout]


@pytest.mark.parametrize(
    ("declared", "canonical", "instances"),
    [
        ("1c.3g.40gb*3", "1c.3g.40gb*3", [("3g.40gb", (1, 1, 1))]),
        ("1c.3g.40gb*4+2c.3g.40gb", "1c.3g.40gb*4+2c.3g.40gb", [("3g.40gb", (2, 1)), ("3g.40gb", (1, 1, 1))]),
        (["1c.3g.40gb", "1c.3g.40gb"], "1c.3g.40gb*2", [("3g.40gb", (1, 1))]),
        ({"2c.7g.80gb": 2, "3c.7g.80gb": 1}, "2c.7g.80gb*2+3c.7g.80gb", [("7g.80gb", (3, 2, 2))]),
        ("1c.3g.39gb*1", "1c.3g.40gb*1", [("3g.40gb", (1,))]),
        ("3c.3g.40gb*2", "3g.40gb*2", [("3g.40gb", ())] * 2),
        ("1c.1g.10gb", "1g.10gb", [("1g.10gb", ())] * 7),
        ("1c.2g.20gb", "1c.2g.20gb", [("2g.20gb", (1, 1))] * 3),
        ("2c.7g.80gb", "2c.7g.80gb", [("7g.80gb", (2, 2, 2))]),
        ("1c.3g.40gb@4*2+2c.3g.40gb@0", "1c.3g.40gb@4*2+2c.3g.40gb@0", [("3g.40gb", (2,)), ("3g.40gb", (1, 1))]),
        ("3g.40gb+1c.3g.40gb*2", "3g.40gb+1c.3g.40gb*2", [("3g.40gb", ()), ("3g.40gb", (1, 1))]),
    ],
)
def test_what_is_declared(declared: mig.Declared, canonical: str, instances: list[object]) -> None:
    assert mig.text(declared, H100) == canonical
    assert kinds(place(declared)) == instances
    assert place(canonical) == place(declared)
    assert read_tag(write_tag(canonical), "h100_80gb", 1) == (place(declared),)


@pytest.mark.parametrize(
    ("declared", "error", "says"),
    [
        ("3c.4g.40gb", UnknownProfile, "1c.4g.40gb, 2c.4g.40gb"),
        ("5c.7g.80gb", UnknownProfile, "1c.7g.80gb, 2c.7g.80gb, 3c.7g.80gb, 4c.7g.80gb"),
        ("2c.1g.10gb", UnknownProfile, "none"),
        ("1c.3g.20gb", UnknownProfile, "3g.40gb"),
        ("1c.3g.40gb*7", LayoutDoesNotFit, "at most 2 of 3g.40gb"),
        ("1c.3g.40gb*8", LayoutDoesNotFit, "at most 7 of 1c.3g.40gb"),
        (f"1c.3g.40gb*{10**8}", LayoutDoesNotFit, "at most 7 of 1c.3g.40gb"),
        ("1c.3g.40gb@4*4", LayoutDoesNotFit, "3 compute slices"),
        ("3g.40gb@4+1c.3g.40gb@4", LayoutDoesNotFit, "another partition is there"),
        ("1g.10gb@4*2", InvalidLayout, "only compute instances share one"),
    ],
)
def test_what_is_refused(declared: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        place(declared)
    assert says in str(caught.value)


def test_nothing_is_known_of_those_beside_graphics() -> None:
    geometry = mig.geometry("rtx_pro_6000_96gb")
    graphics = [profile for profile in geometry.profiles if "gfx" in profile.attributes]
    assert graphics and all(profile.compute_sizes == () for profile in graphics)
    assert geometry.profile("4g.96gb").compute_sizes == (1, 2)


SHARED = [f"{size}c.{p.name}" for g in (H100, A30) for p in g.profiles for size in p.compute_sizes]


def every_sharing(profile: mig.Profile) -> list[tuple[int, ...]]:
    """Every set of compute instances of one GPU instance, largest first."""
    found: list[tuple[int, ...]] = []
    for count in range(1, profile.compute_slices + 1):
        ways = itertools.combinations_with_replacement(sorted(profile.compute_sizes, reverse=True), count)
        found += [way for way in ways if sum(way) <= profile.compute_slices]
    return found


def every_place(profile: mig.Profile, sizes: tuple[int, ...]) -> list[tuple[Compute, ...]]:
    """Every way to place them, by trying all sets of places."""
    options = [Compute(start, size) for size in set(sizes) for start in profile.compute_starts(size)]
    tried = itertools.combinations(sorted(options, key=lambda each: each.start), len(sizes))
    found = [some for some in tried if tuple(sorted((each.size for each in some), reverse=True)) == sizes]
    return [some for some in found if not compute_refusal(profile, some)]


@pytest.mark.parametrize("name", ["2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"])
def test_a_change_of_sharing_destroys_what_it_must(name: str) -> None:
    """All pairs, from each place in which the first may stand, with each of its compute instances in use."""
    profile = H100.profile(name)
    start = (profile.starts or ())[-1]
    sharings = every_sharing(profile)
    ways = {sizes: every_place(profile, sizes) for sizes in sharings}
    assert all(ways.values()), "what has no more slices than there are has a place"

    def layout(compute: tuple[Compute, ...]) -> mig.Layout:
        return (mig.Placement(name, start, profile.size or 0, compute=compute),)

    for before, after in itertools.permutations(sharings, 2):
        for stood in ways[before][: 1 if len(sharings) > 10 else 4]:
            for used in (None, *stood):
                in_use = [] if used is None else [(start, used.start)]
                desired = (mig.Placement(name, start, profile.size or 0, compute=divide(profile, after) or ()),)
                (selected,) = mig.rearranged(desired, layout(stood), H100, in_use=in_use)
                assert selected.kind == (name, after) and not compute_refusal(profile, selected.compute)
                costs = [((used not in way) if used else 0, len({*stood} - {*way})) for way in ways[after]]
                assert ((used not in selected.compute) if used else 0, len({*stood} - {*selected.compute})) == min(
                    costs
                )


def test_a_gpu_instance_stays_where_its_compute_instances_change() -> None:
    existing = place("1c.3g.40gb*3+2g.20gb")
    after = mig.rearranged(place("2c.3g.40gb+1c.3g.40gb+1g.10gb*2"), existing, H100, in_use=[(4, 2)])
    assert {(p.profile, p.start) for p in existing} & {(p.profile, p.start) for p in after} == {("3g.40gb", 4)}
    assert after[-1].compute == (Compute(0, 2), Compute(2, 1))


def test_the_sharing_goes_where_nothing_is_in_use() -> None:
    existing, desired = place("3g.40gb*2"), place("3g.40gb+1c.3g.40gb*3")
    for used, divided in ((0, 4), (4, 0)):
        after = mig.rearranged(desired, existing, H100, in_use=[used])
        assert [each.start for each in after if each.compute] == [divided]


def test_what_shares_otherwise_is_not_the_same() -> None:
    apart = place("1c.3g.40gb@0+1c.3g.40gb@4")
    assert not mig.carries(apart, place("1c.3g.40gb*2"))
    assert mig.carries(apart, place("1c.3g.40gb@4+1c.3g.40gb@0"))
    moved = (mig.Placement("3g.40gb", 0, 4, compute=(Compute(1, 1), Compute(2, 1))),)
    assert mig.rearranged(place("1c.3g.40gb*2"), moved, H100) == moved


LISTS = st.lists(st.sampled_from(sorted({*SHARED, *(p.name for g in (H100, A30) for p in g.profiles)})), max_size=7)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([H100, A30]), LISTS)
def test_any_layout_is_written_placed_and_comes_back(geometry: mig.Geometry, names: list[str]) -> None:
    """Through the canonical text, the places, mig-parted's file, the tag and the JSON of a node."""
    known = []
    for name in names:
        try:
            geometry.divided(name)
            place([*known, name], geometry)
        except (UnknownProfile, LayoutDoesNotFit):
            continue
        known.append(name)
    if not known:
        return
    layout = place(known, geometry)
    assert Counter(part.name for part in mig.parts(layout)) == Counter(known)
    assert mig.together(mig.parts(layout)) == layout
    for each in layout:
        assert not compute_refusal(geometry.profile(each.profile), each.compute)
    written = mig.text(known, geometry)
    assert place(written, geometry) == layout and mig.text(written, geometry) == written
    stays = place(mig.placed_text(layout), geometry)
    assert stays == layout and all(each.fixed for each in stays)
    assert read_tag(write_tag(written), geometry.model, 1) == (layout,)
    fleet = FleetLayout(1, geometry.model, (layout,))
    assert FleetLayout.read(json.loads(json.dumps(fleet.to_json()))).layouts == (layout,)
    entries, warnings = mig.parted_from_layouts({0: layout}, geometry, 1)
    assert not any("share" in str(each) for each in warnings)
    document = yaml.safe_load(mig.parted_text({"one": entries}))
    (back,) = mig.layouts_from_parted(mig.read_parted(document)["one"], geometry, 1)[0].values()
    assert back is not None and sorted(kinds(back)) == sorted(kinds(layout))
    assert geometry.model in mig.models() and mig.render(mig.picture(layout, geometry))


def test_mig_parted_does_not_say_what_shares_what() -> None:
    entries, warnings = mig.parted_from_layouts({0: place("1c.3g.40gb@0+1c.3g.40gb@4")}, H100, 1)
    assert entries[0].mig_devices == (("1c.3g.40gb", 2),)
    assert ["would share others" in str(each) for each in warnings] == [True]


def test_the_picture_says_who_shares_what() -> None:
    shown = mig.picture(place("1c.3g.40gb*2+2c.3g.40gb"), H100)
    text = mig.render(shown)
    assert "2 slots share the 40 GB of 3g.40gb at 0: 2c+1c" in text
    assert "1 slot has the 40 GB of 3g.40gb at 4: 1c; 2 of its compute slices in no slot" in text
    assert "|2c       |1c  |1c  |idle     |free|" in text
    drawing = mig.svg([("", shown, ())])
    assert ">2c+1c<" in drawing and drawing.count(">1c<") == 3 and ">2c<" in drawing
    assert "1c.3g.40gb*3" in mig.draw(place("1c.3g.40gb*3"), H100)


def test_what_others_take() -> None:
    declared = mig.gres_declared(["1c.3g.40gb", "1c.3g.40gb", "1g.10gb"])
    assert "Gres=gpu:3g.40gb:2,gpu:1g.10gb:1\n" in declared, "as AutoDetect=nvml calls them"
    assert "does not tell 1c.3g.40gb from" in declared
    assert "does not tell" not in mig.gres_declared(["1g.10gb"])
    for names in (["1c.3g.40gb"] * 2, ["1c.3g.40gb", "1g.10gb"]):
        with pytest.raises(NotSupported, match="no compute instances"):
            mig.device_plugin([names])


def test_what_has_no_compute_instances() -> None:
    with pytest.raises(InvalidDemand, match="no compute instances") as caught:
        mig.pack("1c.3g.40gb*4", provider="aws")
    assert "Ask for 3g.40gb" in str(caught.value)
    follow = mig.Follow(among=["1c.3g.40gb*3", "7g.80gb"])
    with pytest.raises(InvalidLayout, match="do not follow the work") as refused:
        follow.on(H100)
    assert refused.value.field == "among[0]"
