"""How many nodes a fleet is to have, as arithmetic: no clock, no network."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skyinfra import mig
from skyinfra.errors import counted
from skyinfra.idle.meter import span
from skyinfra.protocol.fleet import Lack
from skyinfra.protocol.instance import GPU_MEMORY, InstanceInfo
from skyinfra.protocol.manifest import SlotKind, slot_kind
from skyinfra.protocol.nodeconfig import NodeConfig

# Of a slot, as Dask has them, see `skyinfra.worker.process.resources`.
Resources = Mapping[str, float]

# After nodes that did not come: the first pause, and the longest.
_PAUSE_S, _LONGEST_S = 60.0, 900.0
# Machines that came and became no node cost as much as nodes: after so many tries in a row nothing is tried for long.
_TRIES, _STOPPED_S = 3, 6 * 3600.0
# A head that has just started hears of its nodes within that long. Nodes that are not there are asked for again after
# that: what was asked may be lost, and a node that ended at that moment has lowered the number.
_KNOWN_S = 60.0


@dataclass(frozen=True)
class Crowd:
    """A gang that wants so many *nodes* at once, with so many slots (*per_node*) that have *resources* each."""

    resources: Resources
    nodes: int
    per_node: int = 1


def fits(wanted: Resources, slot: Resources) -> bool:
    """Returns whether a *slot* has the resources that are *wanted*."""
    return all(slot.get(name, 0) >= amount for name, amount in wanted.items())


def lacking(waiting: Iterable[Resources], free: Sequence[Resources], each: Sequence[Resources], most: int) -> int:
    """Returns how many more nodes, at *most*, the tasks need that wait. *free*: the slots that no task has. *each*: the
    slots of a node that comes. What such a node cannot take counts for nothing."""
    kinds = Counter(frozenset(resources.items()) for resources in waiting)
    # Those that fewest slots take come first, and each has the smallest slot that it fits.
    left, nodes, coming = sorted(free, key=_memory_mb), 0, list[Resources]()
    for kind in sorted(kinds, key=lambda kind: _rank(dict(kind))):
        wanted = dict(kind)
        for _ in range(kinds[kind]):
            if _take(wanted, left) or _take(wanted, coming):
                continue
            if nodes == most or not any(fits(wanted, slot) for slot in each):
                break
            nodes += 1
            for slot in each:
                insort(coming, slot, key=_memory_mb)
            _take(wanted, coming)
    return nodes


def _memory_mb(resources: Resources) -> float:
    return resources.get(GPU_MEMORY, 0.0)


def _rank(wanted: Resources) -> tuple[bool, float, list[tuple[str, float]]]:
    named = any(name.startswith(("slot:", "node:", "profile:")) for name in wanted)
    return not named, -_memory_mb(wanted), sorted(wanted.items())


def _take(wanted: Resources, slots: list[Resources]) -> bool:
    """Takes the first that fits out of *slots*, which are ordered by their memory; False where none does."""
    first = bisect_left(slots, _memory_mb(wanted), key=_memory_mb)
    found = next((index for index in range(first, len(slots)) if fits(wanted, slots[index])), None)
    if found is not None:
        del slots[found]
    return found is not None


def lacking_for(crowd: Crowd, there: Iterable[Sequence[Resources]], each: Sequence[Resources]) -> int:
    """Returns how many more nodes *crowd* needs besides those that are *there*, by the slots of each."""
    having = sum(_enough(crowd, slots) for slots in there)
    return max(0, crowd.nodes - having) if _enough(crowd, each) else 0


def _enough(crowd: Crowd, slots: Iterable[Resources]) -> bool:
    return sum(fits(crowd.resources, slot) for slot in slots) >= crowd.per_node


def coming_slots(config: NodeConfig) -> tuple[InstanceInfo, ...]:
    """Returns the slots of a node that comes, as the *config* of the head declares them."""
    accelerator = config.accelerator
    if accelerator is None:
        kinds: list[tuple[SlotKind, int | None, str | None]] = [("cpu", None, None)] * config.cpu_slots
    else:
        whole = slot_kind(accelerator.vendor)
        kinds = []
        for gpu, layout in enumerate(accelerator.per_gpu):
            names = [part.name for part in mig.parts(layout)]
            kinds += [("partition", gpu, name) for name in names] or [(whole, gpu, None)]
    return tuple(
        InstanceInfo(
            config.node,
            index,
            f"{config.node}/{index}",
            kind,
            config.fleet,
            profile=profile,
            accelerator=None if accelerator is None else accelerator.name,
            gpu=gpu,
            memory_gb=_memory_gb(config, gpu, profile),
            simulated=config.simulate,
        )
        for index, (kind, gpu, profile) in enumerate(kinds)
    )


def _memory_gb(config: NodeConfig, gpu: int | None, profile: str | None) -> float | None:
    """Returns what the slot says of its memory once it is there; that of compute instances is of what they share."""
    accelerator = config.accelerator
    if accelerator is None or gpu is None or profile is None:
        return None if accelerator is None else accelerator.memory_gb
    if accelerator.mig_model is not None:
        return float(mig.geometry(accelerator.mig_model).divided(profile)[0].memory_gb)
    parts = len(mig.parts(accelerator.per_gpu[gpu]))
    return None if accelerator.memory_gb is None else round(accelerator.memory_gb / parts, 1)


@dataclass
class Sizing:
    """The number of nodes that a fleet was asked to have, observation by observation.

    size: that number. since, why: when it became that (seconds since 1970), and for what. problem: why they are not
    there. failed: tries in a row whose machines became no nodes; after the first of them one node is asked for at a
    time. where: the place says why nodes do not come. patience_s: for how long a node may take to come, boot_s: and how
    long it takes, as a rule: what no work has needed for so long is taken back.
    """

    patience_s: float
    boot_s: float = 0.0
    size: int = 0
    since: float = 0.0
    why: str = ""
    problem: str | None = None
    failed: int = 0
    where: str = ""
    _cause: str = ""
    _refusal: str | None = None
    _lack: tuple[Lack, float] = ("", 0.0)
    _there: int = 0
    _began: float | None = None
    # The number that the place has heard last, and when; since when nodes are waited for, and since when the work needs
    # fewer than the place has heard.
    _requested: int = 0
    _said: float | None = None
    _asked: float | None = None
    _spare: float | None = None
    # Whether the place is to hear a smaller number at once: it replaces machines that have failed, for as long as it
    # has not.
    _lower: bool = False
    # Whether a machine of this try has become no node.
    _counted: bool = False
    _tries: int = 0
    _retry: float = 0.0

    def observe(
        self, there: int, need: int, bounds: tuple[int, int], why: str, now: float, at: float, held: int | None = None
    ) -> bool:
        """Takes over what there is *now*, by a clock that never jumps; returns whether `size` is to be asked for.

        *there*: the nodes. *need*: how many more the work needs, and *why*. *at*: seconds since 1970. *held*: those
        that are there or start, where the place knows; another one replaces those that are lost.
        """
        least, most = bounds
        if self._began is None:
            # Nodes that a head before this one has asked for may come.
            self._began = self._asked = now
            self._requested = self.size
        self._count(there, most, now)
        if held is not None:
            self.size = max(there, min(self.size, held))
        if there < self.size and self._asked is not None and now - self._asked > self.patience_s:
            text = f"{self.size - there} of {self.size} nodes did not come within {span(self.patience_s)}"
            self.refused(f"{text}{self.where and f' ({self.where})'}", now)
        wanted = max(there, min(most, max(least, there + need), there + 1 if self.failed else most))
        if wanted <= there >= self.size:
            self.problem = None
        elif self.problem is None and now < self._retry:
            self.problem = self._refusal
        self._spare = None if wanted >= max(self.size, self._requested) else now if self._spare is None else self._spare
        waited = now - (self._began if self._said is None else self._said)
        if wanted > self.size and now >= self._retry:
            self._asked, self._counted = now, False
            self._change(wanted, why if there + need > least else f"{least} is the least", at)
        elif self._spare is not None and now - self._spare >= max(self.boot_s, _KNOWN_S):
            # Capacity may come in the night. Nodes that serve already stay, whatever the place is asked for.
            self._change(wanted, "no work needs more", at)
        elif not self._lower and (waited < _KNOWN_S or (self._said is not None and there >= self.size)):
            # Once also where all are there: whether the place takes it is known before it matters.
            return False
        self._said, self._requested, self._lower = now, self.size, False
        return True

    def _change(self, size: int, why: str, at: float) -> None:
        self.size, self.why, self.since, self._spare = size, why, at, None

    def _count(self, there: int, most: int, now: float) -> None:
        if there > self._there:
            self._tries, self.failed, self._retry, self._asked = 0, 0, 0.0, now
        elif there < self._there and self.size > there:
            self._asked = now
        self.size = max(there, min(self.size, most))
        self._requested = max(there, min(self._requested, most))
        self._there = there

    def refused(self, problem: str, now: float, pause: float | None = None) -> None:
        """Notes that the place gives no more nodes for now; it is asked again after a pause, which becomes longer."""
        pause = pause or min(_PAUSE_S * 2**self._tries, _LONGEST_S)
        self._tries, self._retry, self._asked = self._tries + 1, now + pause, None
        self.size, self._cause = self._there, problem
        self.problem = self._refusal = f"{problem}; asked again after {span(pause)}"

    def broken(self, why: str, now: float) -> bool:
        """Notes that a machine became no node, and *why*. Returns whether nothing is tried for long now, by that."""
        if self._counted:
            return False  # another one of the same try
        self.failed, self._lower, self._counted = self.failed + 1, True, True
        if self.failed < _TRIES:
            self.refused(why, now)
            return False
        text = f"{self.failed} tries in a row gave machines that became no nodes, the last one: {why}"
        self.refused(text, now, _STOPPED_S)
        return True

    def try_again(self) -> None:
        """Lets the place be asked at once for what the work needs: somebody has changed what nodes are made of."""
        self._tries = self.failed = 0
        self._retry = 0.0

    def lack(self, waits: bool, most: int, now: float) -> tuple[Lack, str]:
        """Returns why there is no node for work that *waits*, and that in a sentence; both are empty where there is."""
        found: Lack = "most" if waits and self._there >= most else ""
        if self.problem is not None:
            found = "stopped" if self.failed >= _TRIES and self._retry > now else "refused"
        elif self.size > self._there:
            found = "starting"
        if found != self._lack[0]:
            self._lack = found, now
        lasts = span(now - self._lack[1])
        again = f"the next try is in {span(self._retry - now)}" if self._retry > now else "they are asked for again now"
        count = self.size - self._there
        missing = f"{count} of {counted(self.size, 'node')} {'has' if count == 1 else 'have'}"
        return found, {
            "": "",
            "most": f"all {counted(most, 'node')} that there may be have been there and had tasks for {lasts}",
            "starting": f"{missing} been starting for {lasts}; one takes {span(self.boot_s)} as a rule",
            "refused": f"no more nodes have come for {lasts}: {self._cause}; {again}",
            "stopped": f"no more nodes have been started for {lasts}: {self._cause}; {again}, and at once after "
            "`skyinfra keep` or a deploy that changes what nodes are made of",
        }[found]

    def left(self, why: str, at: float) -> None:
        """Notes that a node ends which the head let go."""
        self.size, self._there, self._requested = (
            max(0, count - 1) for count in (self.size, self._there, self._requested)
        )
        self.since, self.why = at, why
