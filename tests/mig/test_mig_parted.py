from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from skyinfra import InvalidLayout, LayoutDoesNotFit, UnknownProfile, mig

H100 = mig.geometry("h100_80gb")
ENTRY: dict[str, Any] = {"devices": "all", "mig-enabled": True, "mig-devices": {"3g.40gb": 2}}


def document(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"version": "v1", "mig-configs": {"one": list(entries)}}


def read(*entries: dict[str, Any]) -> tuple[mig.PartedEntry, ...]:
    return mig.read_parted(document(*entries))["one"]


IDS = st.integers(0, 2**32 - 1).map(lambda n: f"0x{n:08X}")
FILTERS = st.one_of(IDS, st.tuples(IDS, IDS).map(":".join), st.lists(IDS, min_size=1, max_size=3))
COUNTS = st.dictionaries(st.sampled_from(["1g.10gb", "1g.10gb+me", "1c.3g.40gb", "7g.80gb"]), st.integers(0, 7))
ENTRIES = st.fixed_dictionaries(
    {
        "devices": st.one_of(st.just("all"), st.lists(st.integers(0, 9))),
        "mig-enabled": st.just(True),
        "mig-devices": COUNTS,
    },
    optional={"device-filter": FILTERS},
) | st.fixed_dictionaries({"devices": st.just("all"), "mig-enabled": st.just(False)}, optional={"mig-devices": COUNTS})
LABELS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["yes", "on", "null", "1", "a: b", "~"])
DOCUMENTS = st.fixed_dictionaries(
    {"version": st.just("v1"), "mig-configs": st.dictionaries(LABELS, st.lists(ENTRIES, max_size=3), max_size=3)}
)


@settings(max_examples=40)
@given(DOCUMENTS)
def test_round_trip_without_loss(written: dict[str, Any]) -> None:
    configs = mig.read_parted(written)
    assert mig.parted_document(configs) == written
    text = mig.parted_text(configs)
    assert yaml.safe_load(text) == written
    assert text.isascii() and mig.parted_text(copy.deepcopy(configs)) == text


def test_the_text() -> None:
    filtered = {"device-filter": "0x233010DE", "devices": [0, 2], "mig-enabled": True, "mig-devices": {}}
    off = {"devices": "all", "mig-enabled": False}
    assert mig.parted_text(mig.read_parted(document(ENTRY, filtered, off))) == (
        "version: v1\n"
        "mig-configs:\n"
        "  one:\n"
        "    - devices: all\n"
        "      mig-enabled: true\n"
        "      mig-devices:\n"
        '        "3g.40gb": 2\n'
        '    - device-filter: "0x233010DE"\n'
        "      devices: [0, 2]\n"
        "      mig-enabled: true\n"
        "      mig-devices: {}\n"
        "    - devices: all\n"
        "      mig-enabled: false\n"
    )


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"version": "v2"}, "version"),
        ({"version": None}, "version"),
        ({"more": 1}, "more"),
        ({"mig-configs": []}, "mig-configs"),
        ({"mig-configs": {1: []}}, "mig-configs.1"),
        ({"mig-configs": {"a": {}}}, "mig-configs.a"),
        ({"mig-configs": {"a": ["x"]}}, "mig-configs.a[0]"),
    ],
)
def test_a_document_of_another_shape(changed: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidLayout) as caught:
        mig.read_parted({**document(ENTRY), **changed})
    assert caught.value.field == path


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"device": "all"}, "device"),
        ({"devices": 7}, "devices"),
        ({"devices": [True]}, "devices"),
        ({"devices": [-1]}, "devices"),
        ({"devices": None}, "devices"),
        ({"mig-enabled": "yes"}, "mig-enabled"),
        ({"mig-enabled": None}, "mig-enabled"),
        ({"mig-devices": None}, "mig-devices"),
        ({"mig-devices": ["3g.40gb"]}, "mig-devices"),
        ({"mig-devices": {"3g.40gb": -1}}, "mig-devices.3g.40gb"),
        ({"mig-devices": {"3g.40gb": True}}, "mig-devices.3g.40gb"),
        ({"mig-devices": {"huge": 1}}, "mig-devices"),
        ({"device-filter": 590352606}, "device-filter"),
        ({"device-filter": "0x2330"}, "device-filter"),
        ({"device-filter": []}, "device-filter"),
    ],
)
def test_an_entry_that_is_wrong_is_named_by_its_path(changed: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidLayout) as caught:
        read(ENTRY, {**ENTRY, **changed})
    assert caught.value.field == f"mig-configs.one[1].{path}"
    if path == "device":
        assert "Did you mean devices" in str(caught.value)


def test_what_is_needed_where_mig_is_enabled() -> None:
    with pytest.raises(InvalidLayout, match="needed"):
        read({"devices": "all", "mig-enabled": True})


def test_a_label_is_chosen_by_name() -> None:
    configs = mig.read_parted(document(ENTRY))
    assert mig.choose_config(configs, "one") == read(ENTRY)
    with pytest.raises(InvalidLayout, match="Did you mean one"):
        mig.choose_config(configs, "ones")


def test_layouts_of_a_node() -> None:
    entries = read(
        {**ENTRY, "devices": [0, 1]},
        {**ENTRY, "devices": [2], "mig-devices": {"7g.80gb": 0}},
        {"devices": [3], "mig-enabled": False},
        {**ENTRY, "device-filter": "0x20B510DE", "mig-devices": {"1g.10gb": 7}},
    )
    found, warnings = mig.layouts_from_parted(entries, H100, 5)
    two = mig.place(["3g.40gb"] * 2, H100)
    assert found == {0: two, 1: two, 2: (), 3: None}
    assert [each.field for each in warnings] == ["GPU 4"]


def test_a_filter_is_compared_with_the_model() -> None:
    matching = read({**ENTRY, "device-filter": ["0x20b510de", "0x233010de:0x16c110de"]})
    found, warnings = mig.layouts_from_parted(matching, H100, 1)
    assert set(found) == {0}
    assert [each.field for each in warnings] == ["[0].device-filter"]
    assert mig.layouts_from_parted(read({**ENTRY, "device-filter": "0x20B510DE"}), H100, 1)[0] == {}


@pytest.mark.parametrize(
    ("changed", "error", "path"),
    [
        ({"devices": [1]}, InvalidLayout, "[0].devices"),
        ({"mig-devices": {"3c.4g.40gb": 1}}, UnknownProfile, "[0].mig-devices"),
        ({"mig-devices": {"1c.3g.40gb": 7}}, LayoutDoesNotFit, "[0].mig-devices"),
        ({"mig-devices": {"4g.40gb": 2}}, LayoutDoesNotFit, "[0].mig-devices"),
        ({"mig-devices": {"1g.10gb": 10**9}}, LayoutDoesNotFit, "[0].mig-devices"),
        ({"mig-devices": {"3g.20gb": 2}}, UnknownProfile, "[0].mig-devices"),
        ({"mig-enabled": False}, InvalidLayout, "[0].mig-devices"),
    ],
)
def test_what_the_node_cannot_be(changed: dict[str, Any], error: type[Exception], path: str) -> None:
    with pytest.raises(error) as caught:
        mig.layouts_from_parted(read({**ENTRY, **changed}), H100, 1)
    assert caught.value.field == path  # type: ignore[attr-defined]


def test_two_entries_may_agree_but_not_disagree() -> None:
    assert len(mig.layouts_from_parted(read(ENTRY, ENTRY), H100, 2)[0]) == 2
    with pytest.raises(InvalidLayout, match="another entry"):
        mig.layouts_from_parted(read(ENTRY, {**ENTRY, "mig-devices": {"7g.80gb": 1}}), H100, 2)


@given(st.lists(st.sampled_from([None, (), *mig.layouts(H100)]), min_size=1, max_size=4))
def test_layouts_come_back_or_a_warning_says_why_not(node: list[mig.Layout | None]) -> None:
    given_layouts = dict(enumerate(node))
    entries, warnings = mig.parted_from_layouts(given_layouts, H100, len(node))
    document = yaml.safe_load(mig.parted_text({"node": entries}))
    found, none = mig.layouts_from_parted(mig.read_parted(document)["node"], H100, len(node))
    assert none == ()
    warned = {each.field for each in warnings}
    for gpu, layout in given_layouts.items():
        back = found[gpu]
        if layout is None:
            assert back is None
            continue
        assert back is not None
        assert sorted(p.profile for p in back) == sorted(p.profile for p in layout)
        assert back == layout or f"GPU {gpu}" in warned


def test_the_warning_is_only_where_a_placement_is_lost() -> None:
    entries, warnings = mig.parted_from_layouts({0: mig.fill("3g.40gb", H100), 1: mig.fill("1g.10gb", H100)}, H100, 3)
    assert warnings == ()
    assert [(e.devices, e.mig_devices) for e in entries] == [((0,), (("3g.40gb", 2),)), ((1,), (("1g.10gb", 7),))]
    entries, warnings = mig.parted_from_layouts({0: mig.place(["3g.40gb"], H100)}, H100, 1)
    assert "no placements" in str(warnings[0])
    assert entries[0].devices is None
