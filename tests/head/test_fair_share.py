"""Fair share: submitters take turns, and priorities come first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from skyinfra.head.fair_share import FairShare
from skyinfra.protocol.jobs import JobInfo


def candidate(who: str, priority: int, number: int) -> JobInfo:
    """The job that was submitted after *number* others."""
    return JobInfo(f"{who}{number}", str(number), "f", "function", who, priority, "queued", float(number))


def order(candidates: list[JobInfo]) -> list[JobInfo]:
    turns, left = FairShare(), list(candidates)
    found = []
    while (selected := turns.choose(left)) is not None:
        left.remove(selected)
        found.append(selected)
    return found


def test_submitters_take_turns_and_priorities_come_first() -> None:
    submitted = [("a", 0), ("a", 0), ("a", 0), ("b", 0), ("c", 5), ("b", -1), ("c", 0), ("a", 5)]
    named = [candidate(who, priority, n) for n, (who, priority) in enumerate(submitted)]
    assert [each.name for each in order(named)] == ["c4", "a7", "b3", "c6", "a0", "a1", "a2", "b5"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-2, 2)), max_size=40))
def test_turns_are_fair_whatever_is_submitted(submitted: list[tuple[str, int]]) -> None:
    named = [candidate(who, priority, n) for n, (who, priority) in enumerate(submitted)]
    found = order(named)
    assert sorted(found, key=lambda each: each.submitted) == named
    assert [each.priority for each in found] == sorted((each.priority for each in named), reverse=True)
    for position, each in enumerate(found):
        later = [other for other in found[position + 1 :] if other.priority == each.priority]
        assert all(other.submitted > each.submitted for other in later if other.submitter == each.submitter)
    for priority in {each.priority for each in named}:
        among = [each.submitter for each in found if each.priority == priority]
        for position in range(len(among)):
            had, left = Counter(among[:position]), set(among[position:])
            # All wait from the beginning: nobody is two turns ahead of another one.
            assert not left or max(had[who] for who in left) - min(had[who] for who in left) <= 1
