"""Advice on a fixed layout: what waits least in the simulation, what is refused, and the trace in a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path

import pytest

from skyinfra import mig
from skyinfra.errors import InvalidField, LayoutDoesNotFit, MigNotSupported, TooLittleMeasured, UnknownProfile
from skyinfra.mig.simulation import simulate

H100 = mig.geometry("h100_80gb")
TraceTask = mig.TraceTask


def arrivals(count: int, every: float, seconds: float, memory_gb: float, *, start: float = 0.0) -> list[mig.TraceTask]:
    return [TraceTask(start + i * every, seconds, None, memory_gb) for i in range(count)]


def layout(text: str) -> mig.Layout:
    return mig.resolve(text, H100, 1)[0]


def test_small_tasks_that_wait_for_whole_gpus_get_small_partitions() -> None:
    found = mig.advise(arrivals(60, 9, 60, 8.0), "h100_80gb")
    assert found.advised.layouts == ("1g.10gb*7",)
    assert found.declaration == 'mig="1g.10gb*7"'
    assert (found.keeps, found.tasks, found.seconds, found.unknown) == (False, 60, 531, 0)
    assert found.declared.layouts == found.whole.layouts == ("off",)
    assert found.declared == found.whole
    assert (found.advised.wait, found.advised.never) == (0.0, 0)
    assert found.whole.wait > 1000
    (carried,) = found.carried
    assert (carried.profile, carried.count, carried.tasks) == ("1g.10gb", 7, 1.0)
    assert 0.8 < carried.busy < 1
    assert (found.tried, found.possible) == (found.possible, found.possible), "few layouts: all were tried"


def test_what_waits_as_little_is_kept() -> None:
    trace = arrivals(30, 100, 60, 8.0)
    for declared in ("1g.10gb*7", "2g.20gb*3+1g.10gb", None):
        found = mig.advise(trace, H100, declared=declared)
        assert found.keeps, declared
        assert found.advised == found.declared
    assert mig.advise(trace, H100).declaration == "mig=None"


def test_a_layout_under_which_every_task_runs_comes_before_one_that_waits_less() -> None:
    trace = arrivals(40, 5, 60, 8.0) + arrivals(5, 60, 60, 70.0, start=3.0)
    found = mig.advise(trace, H100, gpus=2, declared="1g.10gb*7")
    assert (found.declared.never, found.advised.never) == (5, 0)
    assert sorted(found.advised.layouts) == ["1g.10gb*7", "off"]
    assert found.declaration in ('mig=sky.mig.per_gpu("off", "1g.10gb*7")', 'mig=sky.mig.per_gpu("1g.10gb*7", "off")')
    assert [(each.profile, each.count) for each in found.carried] == [("1g.10gb", 7), ("gpu", 1)]
    assert sum(each.tasks for each in found.carried) == pytest.approx(1.0, abs=0.001)
    declared = mig.per_gpu(*found.advised.layouts)
    assert mig.advise(trace, H100, gpus=2, declared=declared).keeps, "what is pasted is what was advised"


def test_tasks_that_ask_for_a_profile_get_it() -> None:
    trace = [TraceTask(i * 10.0, 30.0, "3g.40gb") for i in range(30)] + arrivals(30, 10, 60, 8.0)
    found = mig.advise(trace, H100, gpus=2)
    assert found.advised.never == 0
    assert any("3g.40gb" in each for each in found.advised.layouts)
    assert found.declared.never == 30, "a whole GPU is no 3g.40gb"
    assert found.whole.never == 0, "but for comparison it does their work"
    media = [TraceTask(i * 10.0, 5.0, "1g.10gb+me") for i in range(30)]
    assert "1g.10gb+me" in mig.advise(media, H100).advised.layouts[0]


def test_a_task_that_keeps_more_multiprocessors_busy_runs_longer_on_fewer() -> None:
    task = TraceTask(0.0, 60.0, None, 8.0, compute=2.0)
    assert simulate([task], [layout("1g.10gb*7")], H100).end == 120
    assert simulate([task], [layout("2g.20gb*3")], H100).end == simulate([task], [None], H100).end == 60
    busy = [TraceTask(i * 25.0, 60.0, None, 8.0, 3.0) for i in range(40)]
    idle = [TraceTask(i * 25.0, 60.0, None, 8.0, 0.5) for i in range(40)]
    for trace in (busy, idle):
        outcomes = {text: simulate(trace, [layout(text)], H100).wait for text in ("1g.10gb*7", "3g.40gb*2")}
        found = mig.advise(trace, H100, declared=None)
        assert found.advised.wait <= min(outcomes.values()) + 0.1


@pytest.mark.parametrize("seed", range(3))
def test_no_combination_waits_less_where_all_are_tried(seed: int) -> None:
    rng = random.Random(seed)
    trace = [
        TraceTask(rng.uniform(0, 900), rng.expovariate(1 / 60), None, rng.choice([8.0, 15.0, 38.0, 70.0]))
        for _ in range(60)
    ]
    found = mig.advise(trace, H100, gpus=2)
    texts = ["off", *(mig.text(each) for each in mig.maximal_multisets(H100, mig.plain_profiles(H100)))]

    def wait(pair: Sequence[str]) -> tuple[int, float]:
        outcome = simulate(trace, [None if each == "off" else layout(each) for each in pair], H100)
        return outcome.lost, outcome.mean

    lost, mean = min(map(wait, combinations_with_replacement(texts, 2)))
    assert found.advised.never == lost
    # What is declared is kept for a second more or less.
    assert found.advised.wait <= mean + 1.1 + 0.02 * mean


def test_a_node_of_eight_is_searched_and_never_worse_than_what_is_declared() -> None:
    trace = arrivals(120, 1, 60, 8.0) + arrivals(20, 6, 200, 38.0)
    found = mig.advise(trace, H100, gpus=8, declared="7g.80gb")
    assert found.tried < found.possible
    assert found.advised.wait < found.declared.wait
    assert len(found.advised.layouts) == 8
    again = mig.advise(trace, H100, gpus=8, declared="7g.80gb")
    assert again == found, "the same every time"


def test_more_nodes_carry_more() -> None:
    trace = arrivals(60, 1, 60, 8.0)
    one, two = mig.advise(trace, H100, declared="1g.10gb*7"), mig.advise(trace, H100, nodes=2, declared="1g.10gb*7")
    assert two.declared.wait < one.declared.wait
    assert [each.count for each in two.carried] == [14]


def test_too_little_is_refused() -> None:
    with pytest.raises(TooLittleMeasured, match="19 tasks measured, too few"):
        mig.advise(arrivals(19, 1, 60, 8.0), H100)
    with pytest.raises(TooLittleMeasured, match=r"^1 task measured, too few"):
        mig.advise(arrivals(1, 1, 60, 8.0), H100)
    with pytest.raises(TooLittleMeasured, match="0 tasks"):
        mig.advise([], H100)
    unknown = [TraceTask(float(i), 60.0) for i in range(40)]
    with pytest.raises(TooLittleMeasured, match="known for 33% of their time"):
        mig.advise(unknown + arrivals(20, 1, 60, 8.0), H100)
    assert mig.advise(unknown + arrivals(40, 1, 60, 8.0), H100).unknown == 40
    with pytest.raises(TooLittleMeasured, match="0%"):
        mig.advise(arrivals(20, 1, 0, 8.0), H100)


def test_what_cannot_be_asked() -> None:
    trace = arrivals(20, 1, 60, 8.0)
    with pytest.raises(InvalidField, match="gpus: a number from 1"):
        mig.advise(trace, H100, gpus=0)
    with pytest.raises(UnknownProfile) as unknown:
        mig.advise(trace, H100, declared="1g.5gb*7")
    assert unknown.value.field == "declared"
    with pytest.raises(LayoutDoesNotFit):
        mig.advise(trace, H100, declared="4g.40gb*2")
    with pytest.raises(MigNotSupported):
        mig.advise(trace, "b100")


def test_a_trace_in_a_file_is_the_same(tmp_path: Path) -> None:
    trace = [*arrivals(30, 2.5, 60, 8.25), TraceTask(7.0, 3.5, "1g.10gb"), TraceTask(80.0, 0.125, None, 0.0, 1.5)]
    file = tmp_path / "trace.csv"
    mig.write_trace(file, trace)
    assert file.read_text().splitlines()[:2] == ["arrival,duration,profile,memory_gb,compute", "0.0,60,,8.25,"]
    assert mig.read_trace(file) == trace
    assert mig.advise(file, H100) == mig.advise(str(file), H100) == mig.advise(trace, H100)
    file.write_text("arrival,duration\n1,2\n")
    assert mig.read_trace(file) == [TraceTask(1.0, 2.0)]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("arrival,duration\n1,\n", "line 2: duration"),
        ("arrival,duration\n1,2\nx,3\n", "line 3: arrival"),
        ("arrival,duration\n1,-2\n", "line 2: duration"),
        ("arrival,duration,memory_gb\n1,2,nan\n", "line 2: memory_gb"),
        ("start,end\n1,2\n", "line 2: arrival"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(InvalidField, match="a number") as wrong:
        mig.read_trace(file)
    assert wrong.value.field == f"{file}, {field}"
    with pytest.raises(InvalidField, match="cannot be read"):
        mig.read_trace(tmp_path / "absent.csv")
    with pytest.raises(InvalidField, match="cannot be written"):
        mig.write_trace(tmp_path / "no" / "trace.csv", [])
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidField, match="is no CSV"):
        mig.read_trace(file)


@pytest.mark.parametrize(
    ("head", "profile", "error", "says"),
    [
        ("", "3g.40gbb", UnknownProfile, "trace.csv, line 3: profile"),
        ("", "9c.3g.40gb", UnknownProfile, "no compute instance of 9 slices shares a 3g.40gb"),
        ("\ufeff", "3g.40gb", InvalidField, "begins with a byte order mark"),
    ],
)
def test_a_trace_is_refused_by_name(tmp_path: Path, head: str, profile: str, error: type[Exception], says: str) -> None:
    file = tmp_path / "trace.csv"
    rows = "".join(f"{at},60,{profile if at == 1 else '1c.3g.40gb'}\n" for at in range(30))
    file.write_text(f"{head}arrival,duration,profile\n{rows}", encoding="utf-8")
    with pytest.raises(error) as caught:
        mig.advise(file, H100)
    assert says in str(caught.value) and "trace.csv" in str(caught.value)


def test_compute_instances_are_slots_of_their_own() -> None:
    trace = arrivals(30, 100, 60, 8.0)
    found = mig.advise(trace, H100, declared="1c.7g.80gb*7")
    assert found.keeps, "each of the seven takes such a task"
    assert found.declared.layouts == ("1c.7g.80gb*7",)
    assert [(each.profile, each.count, each.tasks) for each in found.carried] == [("1c.7g.80gb", 7, 1.0)]
    assert found.declared.wait == 0
    # Each has a seventh of the memory to count on.
    assert mig.advise(arrivals(30, 100, 60, 12.0), H100, declared="1c.7g.80gb*7").declared.never == 30
    busy = mig.advise(arrivals(60, 9, 60, 8.0), H100, declared="2c.3g.40gb*1+1c.3g.40gb*1+3g.40gb")
    assert busy.declared.layouts == ("3g.40gb+2c.3g.40gb+1c.3g.40gb",)
    sizes = [H100.profile("3g.40gb").compute_slices, 2, 1]
    mine = simulate(arrivals(60, 9, 60, 8.0), [layout("2c.3g.40gb*1+1c.3g.40gb*1+3g.40gb")], H100)
    assert sum(mine.ran.values()) == 60 and len(mine.ran) == len(sizes)
