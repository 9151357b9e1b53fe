from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyinfra import MigNotSupported, mig
from skyinfra.mig import palette
from skyinfra.mig.drawing import boxes, compute_bar, labels, tone

H100 = mig.geometry("h100_80gb")
PLACEABLE = [model for model in mig.models() if any(p.starts for p in mig.geometry(model).profiles)]


def test_the_picture_of_a_gpu() -> None:
    layout = mig.place(["3g.40gb", "2g.20gb", "1g.10gb"], H100)
    assert mig.render(mig.picture(layout, H100)) == "\n".join(
        [
            "memory   0       1       2       3       4       5       6       7",
            "slices  +---------------+-------+-------+-------------------------------+",
            "        |2g.20gb        |1g.10gb|free   |3g.40gb                        |",
            "        |20 GB          |10 GB  |       |40 GB                          |",
            "        |2 slices       |1 slice|       |3 slices                       |",
            "        |32 SM          |16 SM  |       |60 SM                          |",
            "        +---------------+-------+-------+-------------------------------+",
            "compute |2g.20gb        |1g.10gb|3g.40gb                |free   |",
            "slices  |2              |1      |3                      |1      |",
            "compute  6 of 7 slices (2 + 1 + 3), 108 SM",
            "memory   7 of 8 slices, 70 GB in partitions",
            "fits     1g.10gb, 1g.10gb+me",
            "driver   525.85.12 or later",
        ]
    )


def test_an_empty_gpu_is_free_room_that_takes_every_profile() -> None:
    shown = mig.picture((), H100)
    assert [(s.start, s.size, s.profile) for s in shown.segments] == [(0, 8, None)]
    assert shown.fitting == tuple(p.name for p in H100.profiles)
    assert (shown.compute_used, shown.memory_used, shown.memory_used_gb) == (0, 0, 0)


def test_unknown_sms_are_left_out_and_expected_places_are_marked() -> None:
    unseen = mig.geometry("h20_96gb")
    text = mig.render(mig.picture(mig.fill("3g.48gb", unseen), unseen))
    assert "SM" not in text
    assert "expected from the driver's source" in text
    assert "expected" not in mig.render(mig.picture(mig.fill("3g.40gb", H100), H100))


def test_what_is_known_of_b200_is_shown() -> None:
    b200 = mig.geometry("b200_180gb")
    text = mig.render(mig.picture(mig.place(["3g.90gb", "2g.45gb", "1g.23gb"], b200), b200))
    assert "|? SM " in text and "|36 SM " in text and "|18 SM " in text
    assert "54 SM in 2 of 3 partitions, unknown in the others" in text


def test_attributes_are_marked() -> None:
    card = mig.geometry("rtx_pro_6000_96gb")
    kinds = {"1g.24gb": "", "1g.24gb+me": "media", "1g.24gb-me": "no media", "1g.24gb+gfx": "graphics"}
    shown = mig.picture(mig.place(list(kinds), card), card)
    last = [column[-1] for column in labels(shown)]
    assert {p.name: word for p, word in zip(shown.placed, last, strict=True)} == kinds
    assert "units   +" in mig.render(shown), "the grid of this GPU has other units than its memory slices"
    pills = [e.text for e in _texts(mig.svg([("t", shown, ())])) if e.get("class") == "pill"]
    assert sorted(filter(None, pills)) == ["graphics", "media", "no media"]
    plain = mig.picture(mig.fill("3g.40gb", H100), H100)
    assert not any(e.get("class") == "pill" for e in _texts(mig.svg([("t", plain, ())])))


def _texts(document: str) -> list[ET.Element]:
    return list(ET.fromstring(document).iter("{http://www.w3.org/2000/svg}text"))


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_svg_names_its_bars_and_is_readable_on_light_and_on_dark_screens() -> None:
    shown = mig.picture(mig.place(["3g.40gb", "1g.10gb"], H100), H100)
    document = mig.svg([("t", shown, ())])
    assert {"memory slices", "5 of 8", "compute slices", "4 of 7"} <= {e.text for e in _texts(document)}
    named = [
        e for e in ET.fromstring(document).iter() if e.get("fill") and e.get("class") not in (None, "box", "label")
    ]
    light = {e.get("class", "").split()[-1]: e.get("fill", "") for e in named}
    dark = dict(re.findall(r"\.(\w+) { fill: (#[0-9a-f]{6}); }", document))
    assert set(light) <= set(dark)
    assert {e.get("fill") for e in _texts(document) if e.get("class") == "label"} == {palette.ink()}
    for colours in (light, dark):
        assert colours["ink"] != colours["ground"]
        for ink, fill in (("ink", "ground"), ("pale", "free")):
            bright, deep = sorted(map(_luminance, (colours[ink], colours[fill])), reverse=True)
            assert (bright + 0.05) / (deep + 0.05) >= 4.5, (ink, fill)


@given(st.data())
def test_every_picture_covers_the_grid_in_lines_of_one_width(data: st.DataObject) -> None:
    geometry = mig.geometry(data.draw(st.sampled_from(PLACEABLE)))
    names = data.draw(st.lists(st.sampled_from([p.name for p in geometry.profiles]), min_size=1, max_size=6))
    tried = mig.attempt(names, geometry)
    shown = mig.picture(tried.layout, geometry)
    units = [unit for segment in shown.segments for unit in range(segment.start, segment.start + segment.size)]
    assert units == list(range(geometry.placement_units or 0))
    assert [p.name for p in shown.placed] == [p.profile for p in tried.layout]
    _, *rows = ["".join(text for text, _ in line) for line in boxes(shown)]
    assert len({len(row) for row in rows}) == 1
    for profile in shown.placed:
        assert profile.name in rows[1]
        assert tone(profile, geometry).compute == profile.compute_slices
    compute = ["".join(text for text, _ in line) for line in compute_bar(shown)]
    assert len(set(map(len, compute))) == 1
    assert sum(map(int, re.findall(r"\d+", compute[1]))) == geometry.compute_slices
    assert mig.svg([("one", shown, ())]) == mig.svg([("one", shown, ())])


def test_a_layout_that_fails_is_kept_as_far_as_it_got() -> None:
    tried = mig.attempt("3g.40gb*2+2g.20gb+1g.10gb*3", H100)
    assert [p.profile for p in tried.layout] == ["3g.40gb", "3g.40gb"]
    assert tried.missing == (("2g.20gb", 1), ("1g.10gb", 3))
    assert tried.why == "compute slices: 8 of 7"
    assert tried.fitting == ()


def test_a_count_beyond_any_gpu_is_tried_at_once() -> None:
    tried = mig.attempt("1g.10gb*999999999", H100)
    assert len(tried.layout) == 7
    assert tried.missing == (("1g.10gb", 999999992),)
    assert tried.why == "at most 7 of 1g.10gb on one GPU"


def test_a_whole_layout_misses_nothing_and_says_what_still_fits() -> None:
    tried = mig.attempt({"3g.40gb": 1}, H100)
    assert (tried.missing, tried.why) == ((), "")
    assert "7g.80gb" not in tried.fitting
    assert "4g.40gb" in tried.fitting
    assert len(mig.attempt("3g.40gb", H100).layout) == 2


def test_without_known_places_there_is_no_picture() -> None:
    with pytest.raises(MigNotSupported, match="not known"):
        mig.picture((), mig.geometry("rtx_pro_5000_48gb"))


def test_svg_has_a_box_for_every_segment_and_every_compute_slice() -> None:
    shown = mig.picture(mig.place(["3g.40gb", "1g.10gb"], H100), H100)
    tree = ET.fromstring(mig.svg([("H100 <&>", shown, [("missing", "x < y")])]))
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"H100 <&>", "3g.40gb", "1g.10gb", "40 GB", "60 SM", "free", "missing", "x < y"} <= set(texts)
    boxes_drawn = [e for e in tree.iter("{http://www.w3.org/2000/svg}rect") if e.get("class", "").startswith("box")]
    assert len(boxes_drawn) == len(shown.segments) + 7
    grid = boxes_drawn[: len(shown.segments)]
    assert [float(e.get("width") or 0) for e in grid] == [90.0 * s.size for s in shown.segments]
    assert sum(e.get("fill") == "#ffffff" for e in boxes_drawn) == 1 + 3


def test_svg_grows_with_the_number_of_gpus() -> None:
    shown = mig.picture((), H100)
    one, two = (int(ET.fromstring(mig.svg([("t", shown, ())] * n)).get("height") or 0) for n in (1, 2))
    assert two > one
