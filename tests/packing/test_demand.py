from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyinfra import InvalidDemand, UnknownProfile, mig
from skyinfra.packing import Demand, read, text

NAMES = sorted({p.name for model in mig.models() for p in mig.geometry(model).profiles if p.memory_gb})


def test_parts() -> None:
    assert read("1g.10gb*20, 3g.40gb*4, >=18GB*6") == (
        Demand("3g.40gb", 4, 40, named=True),
        Demand(">=18GB", 6, 18, named=False),
        Demand("1g.10gb", 20, 10, named=True),
    )
    assert read("6x>=18GB") == read(">= 18 gb * 6") == read({">=18GB": 6})
    assert read("2x1g.10gb, 1G.10GB") == read({"1g.10gb": 3})
    assert read("1g.10gb+me*2")[0].attributes == "+me"
    assert read("1g.24gb+me.all, 1g.24gb-me")[0].attributes == "+me.all"


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(NAMES), st.integers(1, 999).map(lambda gb: f">={gb}GB")),
        st.integers(1, 1000),
        min_size=1,
        max_size=8,
    ),
    st.randoms(),
)
def test_the_text_reads_as_the_same_whatever_the_order(wanted: dict[str, int], random: object) -> None:
    demands = read(wanted)
    assert {each.wanted: each.count for each in demands} == wanted
    assert read(text(demands)) == demands
    shuffled = list(wanted.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert read(dict(shuffled)) == demands
    assert read(",".join(f" {count}x {name} " for name, count in shuffled)) == demands


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        ",",
        "1g.10gb*",
        "1g.10gb*0",
        "1g.10gb*-1",
        "2x1g.10gb*3",
        "1g.10gb+2g.20gb",
        "1g.10gb*2+2g.20gb*3",
        ">=18",
        ">=0GB",
        "18GB",
        "H100",
        "1g.10gb*1000001",
        {},
        {"1g.10gb": True},
        {"1g.10gb": 1.5},
        {3: 1},
        ["1g.10gb"],
        None,
    ],
)
def test_what_cannot_be_read(wrong: object) -> None:
    with pytest.raises(InvalidDemand) as caught:
        read(wrong)  # type: ignore[arg-type]
    assert caught.value.field == "demand" and caught.value.exit_code == 2


@pytest.mark.parametrize("count", ["1000001", "9" * 20])
def test_more_than_can_be_counted_says_so(count: str) -> None:
    with pytest.raises(InvalidDemand, match=r"more than 1,000,000 partitions"):
        read(f"1g.10gb*{count}")


def test_a_size_of_any_number_of_digits_is_one() -> None:
    assert read(">=18000GB") == read({">=18000GB": 1})


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(written: str) -> None:
    with contextlib.suppress(InvalidDemand, UnknownProfile):
        assert read(written)


def test_a_profile_that_no_gpu_has() -> None:
    with pytest.raises(UnknownProfile, match=r"nearest are 1g\.10gb, 1g\.12gb"):
        read("1g.11gb")
    with pytest.raises(UnknownProfile):
        read("1g.0gb")  # of a GPU that has no memory of its own
    assert read("3g.39gb")[0].memory_gb == 39  # what other drivers call 3g.40gb
