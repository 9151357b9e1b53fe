"""Fair share: submitters take turns, and priorities come first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from skyinfra.head.fair_share import FairShare, Needs
from skyinfra.protocol.jobs import JobInfo


@dataclass
class Waiting:
    """A job that waits, or does not."""

    info: JobInfo
    number: int
    needs: Needs = ()
    waits: bool = True


def candidate(who: str, priority: int, number: int, needs: Needs = ()) -> Waiting:
    """The job that was submitted after *number* others."""
    info = JobInfo(f"{who}{number}", str(number), "f", "function", who, priority, "queued", float(number))
    return Waiting(info, number, needs)


def chosen(turns: FairShare, fits: Needs | None = None) -> list[JobInfo]:
    """The jobs that are chosen one after the other, for the slots that have what *fits*."""
    found = []
    while (selected := turns.choose(lambda needs: fits is None or needs == fits)) is not None:
        selected.waits = False  # it runs
        found.append(selected.info)
    return found


def order(candidates: list[Waiting]) -> list[JobInfo]:
    turns = FairShare()
    for each in candidates:
        turns.add(each)
    return chosen(turns)


def test_submitters_take_turns_and_priorities_come_first() -> None:
    submitted = [("a", 0), ("a", 0), ("a", 0), ("b", 0), ("c", 5), ("b", -1), ("c", 0), ("a", 5)]
    named = [candidate(who, priority, n) for n, (who, priority) in enumerate(submitted)]
    assert [each.name for each in order(named)] == ["c4", "a7", "b3", "c6", "a0", "a1", "a2", "b5"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-2, 2)), max_size=40))
def test_turns_are_fair_whatever_is_submitted(submitted: list[tuple[str, int]]) -> None:
    named = [candidate(who, priority, n) for n, (who, priority) in enumerate(submitted)]
    found = order(named)
    assert sorted(found, key=lambda each: each.submitted) == [each.info for each in named]
    assert [each.priority for each in found] == sorted((each.info.priority for each in named), reverse=True)
    for position, each in enumerate(found):
        later = [other for other in found[position + 1 :] if other.priority == each.priority]
        assert all(other.submitted > each.submitted for other in later if other.submitter == each.submitter)
    for priority in {each.info.priority for each in named}:
        among = [each.submitter for each in found if each.priority == priority]
        for position in range(len(among)):
            had, left = Counter(among[:position]), set(among[position:])
            # All wait from the beginning: nobody is two turns ahead of another one.
            assert not left or max(had[who] for who in left) - min(had[who] for who in left) <= 1


def test_a_job_that_no_slot_takes_holds_up_no_other_and_comes_in_its_turn() -> None:
    large, small = (("profile:7g.80gb", 1),), (("slot", 1),)
    named = [candidate("a", 5, 0, large), candidate("a", 0, 1, small), candidate("b", 0, 2, large)]
    turns = FairShare()
    for each in named:
        turns.add(each)
    assert [each.name for each in chosen(turns, small)] == ["a1"]
    assert [each.name for each in chosen(turns)] == ["a0", "b2"]


def test_one_that_does_not_wait_any_more_is_left_out_and_comes_back_in_its_place() -> None:
    turns, named = FairShare(), [candidate("a", 0, number) for number in range(4)]
    for each in named:
        turns.add(each)
    named[0].waits = named[2].waits = False  # cancelled, or without its secret
    assert turns.choose(lambda needs: True) is named[1]
    named[0].waits = named[2].waits = True
    named[1].waits = False  # it runs
    for each in named[:3:2]:
        turns.add(each)
        turns.add(each)
    assert [each.name for each in chosen(turns)] == ["a0", "a2", "a3"]


def test_a_choice_looks_at_one_job_of_each_line_however_many_wait() -> None:
    looked: list[int] = []

    class Watched(Waiting):
        def __getattribute__(self, name: str) -> object:
            if name == "waits":
                looked.append(object.__getattribute__(self, "number"))
            return object.__getattribute__(self, name)

    turns = FairShare()
    for number in range(1000):
        of = candidate("ab"[number % 2], 0, number)
        turns.add(Watched(of.info, of.number, of.needs))
    for _ in range(10):
        turns.choose(lambda needs: True)
    assert len(looked) <= 10 * 2
