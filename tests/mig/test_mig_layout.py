from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyinfra import InvalidLayout, LayoutDoesNotFit, UnknownProfile, mig

H100 = mig.geometry("h100_80gb")
RTX = mig.geometry("rtx_pro_6000_96gb")


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ("3g.40gb", ("3g.40gb",)),
        ("3g.40gb+2g.20gb+1g.10gb*2", ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")),
        ("1g.10gb*2 + 3g.40gb", ("3g.40gb", "1g.10gb", "1g.10gb")),
        ("1g.10gb+me+3g.40gb", ("3g.40gb", "1g.10gb+me")),
        ("1g.10gb+me*1+1g.10gb", ("1g.10gb", "1g.10gb+me")),
        ({"1g.10gb": 2, "3g.40gb": 1}, ("3g.40gb", "1g.10gb", "1g.10gb")),
        (["1g.20gb", "3g.40gb"], ("3g.40gb", "1g.20gb")),
        (("1g.10gb", "1g.20gb"), ("1g.20gb", "1g.10gb")),
        ("3g.39gb", ("3g.40gb",)),
    ],
)
def test_parse(declared: mig.Declared, names: tuple[str, ...]) -> None:
    assert mig.parse(declared, H100) == names


def test_attributes_of_workstation_gpus_are_part_of_the_name() -> None:
    declared = "1g.24gb+me.all+1g.24gb-me*2+2g.48gb+gfx"
    assert mig.parse(declared, RTX) == ("2g.48gb+gfx", "1g.24gb+me.all", "1g.24gb-me", "1g.24gb-me")


@pytest.mark.parametrize(
    ("declared", "part"),
    [
        ("", "''"),
        ("   ", "''"),
        ("3g.40gb+", "'3g.40gb+'"),
        ("+3g.40gb", "''"),
        ("3g.40gb++1g.10gb", "'3g.40gb+'"),
        ("3g.40gb+2g", "'2g'"),
        ("3g.40gb*0", "3g.40gb"),
        ("3g.40gb*-1", "'3g.40gb*-1'"),
        ("3g.40gb*two", "'3g.40gb*two'"),
        ("3g.40gb*2*2", "'3g.40gb*2*2'"),
        ("3g.40gb,1g.10gb", "'3g.40gb,1g.10gb'"),
        ("0c.3g.40gb", "0c.3g.40gb"),
        ("1c", "1c"),
        ({}, "empty"),
        ([], "empty"),
        ({"3g.40gb": 0}, "3g.40gb"),
        ({"3g.40gb": -2}, "3g.40gb"),
        ({"3g.40gb": True}, "3g.40gb"),
        ({"3g.40gb": 1.5}, "3g.40gb"),
        (["3g.40gb*2"], "'3g.40gb*2'"),
        ([3], "3"),
        (7, "7"),
    ],
)
def test_what_cannot_be_read_is_named(declared: object, part: str) -> None:
    with pytest.raises(InvalidLayout) as caught:
        mig.parse(declared, H100)  # type: ignore[arg-type]
    assert part in str(caught.value)


def test_a_profile_of_another_gpu() -> None:
    with pytest.raises(UnknownProfile, match=r"3g\.20gb"):
        mig.parse("3g.20gb", H100)


def test_counts_beyond_any_gpu_cost_nothing() -> None:
    with pytest.raises(LayoutDoesNotFit, match="at most 7 of"):
        mig.parse("1g.10gb*999999999", H100)
    with pytest.raises(LayoutDoesNotFit):
        mig.parse({"1g.10gb": 10**12}, H100)


@pytest.mark.parametrize(
    ("declared", "written"),
    [
        ("3G.40GB", "3g.40gb"),
        ("3g.40gb*1", "3g.40gb*1"),
        (["3g.40gb"], "3g.40gb*1"),
        ({"3g.40gb": 1}, "3g.40gb*1"),
        (["3g.40gb", "3g.40gb"], "3g.40gb*2"),
        ({"3g.40gb": 1, "1g.10gb+me": 1}, "3g.40gb+1g.10gb+me"),
        ("1g.10gb + 1g.10gb + 3g.40gb", "1g.10gb*2+3g.40gb"),
    ],
)
def test_text_of_a_declared_layout(declared: mig.Declared, written: str) -> None:
    assert mig.text(declared) == written


@given(st.dictionaries(st.sampled_from([p.name for p in RTX.profiles]), st.integers(1, 4), min_size=1))
def test_text_means_the_same_as_what_was_declared(counts: dict[str, int]) -> None:
    assert mig.parse(mig.text(counts), RTX) == mig.parse(counts, RTX)
    assert mig.text(mig.text(counts)) == mig.text(counts)


def test_per_gpu_holds_each_gpus_layout() -> None:
    layouts = mig.per_gpu("3g.40gb", {"7g.80gb": 1}, ["4g.40gb", "3g.40gb"])
    assert layouts.layouts == ("3g.40gb", "7g.80gb*1", "4g.40gb+3g.40gb")
    assert layouts == pickle.loads(pickle.dumps(layouts))
    assert len({layouts, mig.per_gpu("3g.40gb", ["7g.80gb"], "4g.40gb+3g.40gb")}) == 1


def test_per_gpu_names_the_gpu_whose_layout_cannot_be_read() -> None:
    with pytest.raises(InvalidLayout, match=r"^\[1\]: "):
        mig.per_gpu("3g.40gb", "junk")
    with pytest.raises(InvalidLayout):
        mig.per_gpu()
