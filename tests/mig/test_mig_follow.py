"""Layouts that follow the work: the choice is pure, and no made-up fleet makes it touch what is in use."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.follow import GPUS, Job, simulate
from skyinfra import mig
from skyinfra.errors import InvalidField, InvalidLayout, LayoutDoesNotFit, UnknownProfile
from skyinfra.mig import grid
from skyinfra.mig.follow import Change, Follow, Gpu, Want, choose

H100 = mig.geometry("h100_80gb")
AMONG = ("1g.10gb*7", "3g.40gb*2", "4g.40gb+1g.10gb*3", "7g.80gb")
# The layouts that may stand: those declared, and some that are not.
STANDING = [mig.resolve(text, H100, 1)[0] for text in (*AMONG, "2g.20gb*3+1g.10gb", "3g.40gb+1g.10gb")]
NOW = 10_000.0


def gpu(layout: str, *, used: float = 0.0, changed: float = -math.inf, node: str = "n", index: int = 0) -> Gpu:
    existing = mig.resolve(layout, H100, 1)[0]
    return Gpu(node, index, existing, (used,) * len(existing), changed)


def selected(queue: list[Want], gpus: list[Gpu], *, keep: str | None = None, idle: float = 300.0) -> list[str]:
    return [each.layout for each in choose(Follow(AMONG, idle_seconds=idle, keep=keep), H100, queue, gpus, NOW)]


def waits(count: int, profile: str | None = None, memory_gb: float = 0.0, since: float = NOW) -> Want:
    return Want(profile, memory_gb, (since,) * count)


def test_a_gpu_without_work_takes_the_layout_that_the_queue_asks_for():
    (change,) = choose(Follow(AMONG), H100, [waits(2, "3g.40gb", since=NOW - 12)], [gpu("1g.10gb*7")], NOW)
    why = "2 tasks for 3g.40gb waited up to 12 s, and no idle slot takes them; 1g.10gb*7 had no task for 300 s"
    assert change == Change("n", 0, "1g.10gb*7", "3g.40gb*2", why)
    assert selected([waits(1, memory_gb=41)], [gpu("1g.10gb*7")]) == ["7g.80gb"]
    assert selected([waits(9)], [gpu("7g.80gb")]) == ["1g.10gb*7"], "tasks that any slot takes"
    assert selected([waits(1, "1g.10gb"), waits(1, "4g.40gb")], [gpu("7g.80gb")]) == ["4g.40gb+1g.10gb*3"]


@pytest.mark.parametrize(
    ("queue", "gpus"),
    [
        ([], [gpu("1g.10gb*7")]),
        ([waits(1, "3g.40gb")], [gpu("3g.40gb*2")]),
        ([waits(1, memory_gb=20)], [gpu("3g.40gb*2")]),
        ([waits(5, "2g.20gb")], [gpu("1g.10gb*7")]),
        ([waits(1, "7g.80gb")], [gpu("1g.10gb*7", used=math.inf)]),
        ([waits(1, "7g.80gb")], [gpu("1g.10gb*7", used=NOW - 299)]),
        ([waits(1, "7g.80gb")], [gpu("1g.10gb*7", changed=NOW - 299)]),
        ([waits(1, "7g.80gb")], [Gpu("n", 0, (), ())]),
        ([waits(1, "7g.80gb")], [Gpu("n", 0, (), (), NOW - 1, ("7g.80gb",)), gpu("1g.10gb*7", index=1)]),
    ],
    ids=["no queue", "stands", "fits", "not among", "in use", "used", "changed", "whole", "comes already"],
)
def test_nothing_changes(queue: list[Want], gpus: list[Gpu]):
    assert selected(queue, gpus) == []


def test_only_what_is_idle_goes():
    """A 1g is in use at one end of the GPU: the 3g comes where nothing is, the other partitions stay."""
    existing = gpu("1g.10gb*7").existing
    used = tuple(math.inf if place.start == 6 else 0.0 for place in existing)
    layouts = Follow(["3g.40gb+1g.10gb*3", "1g.10gb*7"])
    (change,) = choose(layouts, H100, [waits(1, "3g.40gb")], [Gpu("n", 0, existing, used)], NOW)
    assert change.why.endswith("1g.10gb*4 had no task for 300 s")


def test_those_that_wait_long_are_not_passed_over():
    queue = [waits(7, "1g.10gb"), waits(1, "7g.80gb")]
    assert selected(queue, [gpu("3g.40gb*2")]) == ["1g.10gb*7"]
    queue = [waits(7, "1g.10gb"), waits(1, "7g.80gb", since=NOW - 2000)]
    assert selected(queue, [gpu("3g.40gb*2")]) == ["7g.80gb"]


def test_the_change_that_destroys_less_is_taken():
    gpus = [gpu("1g.10gb*7"), gpu("3g.40gb*2", index=1)]
    (change,) = choose(Follow(AMONG), H100, [waits(1, "7g.80gb")], gpus, NOW)
    assert (change.index, change.before) == (1, "3g.40gb*2")


def test_each_gpu_changes_once_and_no_more_than_are_needed():
    gpus = [gpu("1g.10gb*7", node=f"n{i}") for i in range(50)]
    changes = choose(Follow(AMONG), H100, [waits(7, "3g.40gb"), waits(9, "7g.80gb")], gpus, NOW)
    assert Counter(each.layout for each in changes) == {"3g.40gb*2": 4, "7g.80gb": 9}
    assert len({each.node for each in changes}) == 13


def test_what_is_kept_stays():
    gpus = [gpu("1g.10gb*7"), gpu("1g.10gb*7", index=1)]
    queue = [waits(2, "7g.80gb")]
    assert selected(queue, gpus) == ["7g.80gb"] * 2
    assert selected(queue, gpus, keep="1g.10gb*2") == ["7g.80gb"]
    assert selected(queue, gpus, keep="1g.10gb*8") == []
    assert selected(queue, [gpu("3g.40gb*2")], keep="1g.10gb*8") == ["7g.80gb"], "there are none to keep"


def test_what_cannot_be_declared():
    for given_, error in [("1g.10gb*7", InvalidLayout), ([], InvalidLayout), ([3], InvalidLayout)]:
        with pytest.raises(error):
            Follow(given_)  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match="idle_seconds"):
        Follow(["7g.80gb"], idle_seconds=-1)
    with pytest.raises(UnknownProfile) as unknown:
        Follow(["7g.80gb", "9g.80gb"]).on(H100)
    assert unknown.value.field == "among[1]"
    with pytest.raises(LayoutDoesNotFit, match="no layout has what is to be kept"):
        Follow(["7g.80gb"], keep={"1g.10gb": 2}).on(H100)
    found = Follow(["2x>=20GB", {"7g.80gb": 1}, "7g.80gb*1"], keep=["1g.20gb"]).on(mig.geometry("h100_80gb"))
    assert (found.among, found.keep) == (("1g.20gb*2", "7g.80gb*1"), "1g.20gb*1")


times = st.one_of(st.just(math.inf), st.floats(NOW - 700, NOW), st.just(0.0))


@st.composite
def fleets(draw: st.DrawFn) -> list[Gpu]:
    gpus = []
    for index in range(draw(st.integers(1, 5))):
        if draw(st.integers(0, 9)) == 0:
            coming = draw(st.sampled_from([(), ("7g.80gb",), ("1g.10gb",) * 7]))
            gpus.append(Gpu("n", index, (), (), draw(times), coming))
            continue
        existing = draw(st.sampled_from(STANDING))
        used = tuple(draw(times) for _ in existing)
        changed = draw(st.one_of(st.just(-math.inf), st.floats(NOW - 700, NOW)))
        gpus.append(Gpu("n", index, existing, used, changed))
    return gpus


wants = st.builds(
    Want,
    st.one_of(st.none(), st.sampled_from([profile.name for profile in H100.profiles])),
    st.sampled_from([0.0, 10.0, 11.0, 40.0, 80.0, 96.0]),
    st.lists(st.floats(NOW - 2000, NOW), max_size=9).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(fleets(), st.lists(wants, max_size=5), st.sampled_from([0.0, 60.0, 300.0]), st.sampled_from(["", "1g.10gb*3"]))
def test_whatever_stands_and_waits(gpus: list[Gpu], queue: list[Want], idle: float, keep: str):
    policy = Follow(AMONG, idle_seconds=idle, keep=keep or None)
    changes = choose(policy, H100, queue, gpus, NOW)
    assert changes == choose(policy, H100, queue, gpus, NOW), "the same every time"
    assert len({(each.node, each.index) for each in changes}) == len(changes)
    after = {each.index: each.existing for each in gpus}
    for change in changes:
        before = gpus[change.index]
        assert change.layout in AMONG
        assert before.existing and not before.coming, "whole, or a change is not done"
        assert NOW - before.changed >= idle, "hysteresis"
        recent = {p.start for p, at in zip(before.existing, before.used, strict=True) if NOW - at < idle}
        busy = {p.start for p, at in zip(before.existing, before.used, strict=True) if at == math.inf}
        layout = mig.resolve(change.layout, H100, 1)[0]
        after[change.index] = mig.rearranged(layout, before.existing, H100, in_use=busy | recent)
        gone = {place.start for place in before.existing if place not in after[change.index]}
        assert not gone & (busy | recent), "in use, or had a task a moment ago"
        assert any(want.since for want in queue), "nothing waits"
    if keep:
        count = lambda layouts: sum(place.profile == "1g.10gb" for layout in layouts for place in layout)  # noqa: E731
        coming = sum(name == "1g.10gb" for each in gpus for name in each.coming)
        had = count(each.existing for each in gpus)
        assert count(after.values()) + coming >= min(3, had + coming)


@given(fleets(), st.lists(wants, max_size=5))
def test_what_was_chosen_is_enough(gpus: list[Gpu], queue: list[Want]):
    """Once the changes are done, the same queue asks for nothing more."""
    policy = Follow(AMONG, idle_seconds=0.0)
    made = {(each.node, each.index): each.layout for each in choose(policy, H100, queue, gpus, NOW)}
    done = []
    for each in gpus:
        text = made.get((each.node, each.index))
        if text is None:
            done.append(each)
            continue
        busy = {p.start for p, at in zip(each.existing, each.used, strict=True) if at == math.inf}
        layout = mig.rearranged(mig.resolve(text, H100, 1)[0], each.existing, H100, in_use=busy)
        done.append(Gpu(each.node, each.index, layout, tuple(math.inf if p.start in busy else 0.0 for p in layout)))
    assert choose(policy, H100, queue, done, NOW) == ()


def test_profiles_as_text():
    assert grid.written(sorted(["1g.10gb", "3g.40gb", "1g.10gb"], reverse=True)) == "3g.40gb+1g.10gb*2"


def test_the_simulation_makes_the_same_choices_and_runs_every_task():
    trace = [Job(float(i), 60.0, "1g.10gb") for i in range(70)] + [Job(200.0, 60.0, "7g.80gb") for _ in range(8)]
    found = simulate(trace, ["1g.10gb*7"] * GPUS, Follow(AMONG, idle_seconds=10.0))
    assert (len(found.waits), found.lost) == (len(trace), 0)
    assert found.changes == GPUS
    assert max(found.waits) < 200
    assert simulate(trace, ["1g.10gb*7"] * GPUS).lost == 8
    whole = simulate(trace, ["1g.10gb*7"] * GPUS, whole=True)
    assert found.wait < whole.wait
