"""Watches fleets: keeps what their jobs need elsewhere, and finds out which have lost their nodes.

A fleet has lost its nodes where it has had no slot for long, or its head has not answered, and the cloud finds machines
of it no more; an elastic one where its head says why no node comes. A head that cannot be reached from here, and nodes
that boot, on machines that run, are no reason.
What a look has found is kept beside the jobs, so that each may be one of a schedule, on another machine.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from skyinfra.deploy.apply import planned
from skyinfra.deploy.missing_nodes import gone_nodes
from skyinfra.errors import BootFailed, CredentialsRefused, FleetUnreachable, counted
from skyinfra.providers import machines_of
from skyinfra.terraform.stores import Store
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client import Questions
    from skyinfra.submission.snapshot import Snapshot

VERSION = 1
_SEEN = "watch.json"
_CONNECT_S = 5.0
# Copying what jobs need takes so long at one look; the next goes on.
_KEEP_S = 300.0

# away: all machines are gone, and the next place is tried. again: some are, or it stands; a deploy brings them back.
Loss = Literal["away", "again"]


@dataclass(frozen=True)
class Seen:
    """A fleet as it was seen last.

    since: UNIX seconds since when it has no slot; None where it has one, or needs none. ends: why its nodes end
    themselves, as its head said last. waits: whether jobs had not ended. loss: what is being done about nodes that it
    has lost, from its begin to its end.
    """

    since: float | None = None
    ends: str = ""
    waits: bool = False
    loss: Loss | None = None

    @classmethod
    def read(cls, store: Store, pool: str) -> Seen:
        """Returns what was written last; nothing where that cannot be read. Raises what the store does."""
        if f"{pool}/{_SEEN}" not in store.names(pool):
            return cls()
        try:
            given = json.loads(store.read(f"{pool}/{_SEEN}"))
            if given.pop("version") != VERSION:
                return cls()
            return cls(**given)
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def write(self, store: Store, pool: str) -> Seen:
        """Writes it, and returns it."""
        text = json.dumps({"version": VERSION, **asdict(self)})
        store.write(f"{pool}/{_SEEN}", io.BytesIO(text.encode()))
        return self


@dataclass(frozen=True)
class Look:
    """A look at the fleet of *pool*. said: what there is, in words. silent: whether its head did not answer."""

    pool: str
    seen: Seen
    said: str
    silent: bool = False


def look(stack: SynthesizedStack, pool: str, store: Store) -> Look:
    """Looks at the fleet of *pool*, and copies what its jobs need to the *store*.

    Raises what connecting raises but `FleetUnreachable` and `CredentialsRefused`, and what the store raises.
    """
    from skyinfra.client import open_questions

    before = Seen.read(store, pool)
    if before.loss is not None:
        return Look(pool, before, "was being brought back")
    manifest = stack.fleets().get(pool)
    if manifest is None:
        return Look(pool, Seen(), "is not deployed")
    try:
        with open_questions(manifest, timeout=_CONNECT_S, patience=_CONNECT_S) as fleet:
            found, silent = _asked(fleet, pool, store, before), False
    except BootFailed as error:  # another place would boot the same
        found, silent = Look(pool, replace(before, since=None), f"is not set up: {error.message}"), False
    except (FleetUnreachable, CredentialsRefused) as error:  # its address may be somebody else's now
        since = before.since or time.time()
        found, silent = Look(pool, replace(before, since=since), error.message), True
    if found.seen != before:
        found.seen.write(store, pool)
    return replace(found, silent=silent)


def _asked(fleet: Questions, pool: str, store: Store, before: Seen) -> Look:
    from skyinfra.client.unfinished import keep_unfinished

    now = fleet.look()
    kept = keep_unfinished(fleet, store, time.monotonic() + _KEEP_S)
    state = now.state
    ends = "; ".join(sorted({*state.stops.values()})) if state is not None else ""
    empty = _empty(now)
    since = (before.since or time.time()) if empty else None
    words = empty or f"{counted(len(now.slots) + len(now.draining), 'slot')}"
    if kept.waiting:
        words += f", {counted(kept.waiting, 'job')} kept for another fleet"
    for job, why in kept.problems.items():
        words += f"; {job} cannot go on elsewhere: {why}"
    return Look(pool, Seen(since, ends, waits=kept.waiting > 0), words)


def _empty(now: Snapshot) -> str:
    """Says that a fleet which needs slots has none, and none comes; empty where one is there, comes, or need not."""
    state = now.state
    if now.slots or now.draining or (state is not None and state.failed):
        return ""
    size = state.size if state is not None else None
    if size is None:
        return "no slot is there"
    return f"no slot is there: {size.problem}" if size.wanted and size.problem else ""


def lost(stack: SynthesizedStack, found: Look, after_s: float) -> tuple[Loss | None, str]:
    """Returns what is to be done about the nodes of a fleet that has had no slot for *after_s* seconds, and why.

    The cloud is asked, by a plan, whether its machines are gone. Raises what `planned` raises.
    """
    seen, pool = found.seen, next((each for each in stack.pools if each["name"] == found.pool), None)
    if pool is None or seen.since is None:
        return None, ""
    minutes = (time.time() - seen.since) / 60
    if minutes * 60 < after_s:
        return None, f"for {minutes:.0f} of {after_s / 60:.0f} minutes"
    if seen.loss is not None:
        return seen.loss, found.said
    how = f"{'its head silent' if found.silent else 'no slot'} for {minutes:.0f} minutes"
    if not found.silent and pool.get("min_nodes") is not None:  # its machines are in no state
        return "away", how
    if seen.ends:
        return None, f"its nodes have ended themselves: {seen.ends}"
    if _may_end(pool) and not seen.waits:
        return None, "its nodes end themselves where nothing uses them, and no job waited"
    machines, gone = _machines(stack, found.pool)
    if not gone:
        way = ", or at the way from here" if found.silent else ""
        return None, f"its machines run: look at its nodes, `skyinfra doctor`{way}"
    why = f"{gone} of {counted(machines, 'machine')} gone, {how}"
    return ("away" if gone == machines else "again"), why


def _may_end(pool: Mapping[str, Any]) -> bool:
    budget = pool.get("budget") or {}
    return any(pool.get(name) for name in ("stop_after_idle", "max_lifetime")) or budget.get("action") == "stop"


def _machines(stack: SynthesizedStack, pool: str) -> tuple[int, int]:
    """Returns the number of machines that the state has of *pool*, and of those that are gone, by a plan.

    Of a group that is in no state: it counts as one machine, which is there, so that its head is brought back alone.
    """
    module, manifest = stack.module_of(pool), stack.fleets().get(pool)
    with planned(stack) as (_, plan):
        gone = gone_nodes(module, plan)
    bought = [each for each in stack.resources() if each.call == module]
    count = sum(machines_of(each.type, each.attributes) is not None for each in bought)
    return count or (manifest.node_count if manifest is not None else 0), gone
