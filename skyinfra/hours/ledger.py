"""The ledger of a fleet, on its head: the runs of all machines, and whose tasks had their slots.

One file beside the jobs, so that it lives as long as they do. Nodes say all that they have measured: of their hours the
ledger is a copy, which outlives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from skyinfra.errors import SkyinfraError, StateDirectoryError
from skyinfra.node.folder import replace_file, writing
from skyinfra.protocol import rpc, services
from skyinfra.protocol.nodeconfig import NodeBudget
from skyinfra.protocol.readings import HOURS_VERSION, FleetHours, MachineRun, SlotUse

logger = logging.getLogger("skyinfra.runner")

# In the folder of the jobs, where no job begins with a dot.
FILE = ".hours.json"
_INTERVAL_S = 60.0
# A machine that has said its hours within that long still runs, as far as is known.
_RUNS_S = 150.0
# Machines, and lines of uses. Of more, the machines that ended first and the uses that come last lose their names: no
# hour is lost.
MOST = 10_000
_OTHERS = "others"
# Characters of a name of somebody or of a task.
_LONGEST = 100


class Ledger:
    """The ledger in *folder*, that of the jobs, until that is *lost*. ``handlers``: take what nodes say, and answer
    clients."""

    def __init__(self, folder: Path, lost: Callable[[], bool] = lambda: False) -> None:
        self._folder = folder
        self._lost = lost
        self._file = folder / FILE
        self._id = uuid.uuid4().hex[:12]
        self._runs: dict[tuple[str, str], list[MachineRun]] = {}
        self._uses: dict[tuple[str, ...], SlotUse] = {}
        self._drain: Callable[[], Iterable[SlotUse]] = tuple
        self._saving: asyncio.Task[None] | None = None
        # Gets a node that has a machine of which nothing was known.
        self.on_machine: Callable[[str], object] = lambda node: None
        self.handlers = rpc.handlers(services.machine_runs.by(self.take), services.hours.by(self.hours))

    def load(self) -> None:
        """Reads the file. One that cannot be read is put aside: nodes say their hours again."""
        if not self._file.exists():
            return
        try:
            found = FleetHours.load(self._file)
        except SkyinfraError as error:
            logger.warning("the ledger of the hours begins anew: %s", error)
            with contextlib.suppress(OSError):
                self._file.replace(self._file.with_name(f"{FILE}.unread"))
            return
        self._id = found.ledger
        for run in found.runs:
            self._runs.setdefault((run.node, run.machine), []).append(run)
        self._add(found.uses)

    def start(self, drain: Callable[[], Iterable[SlotUse]]) -> None:
        """Writes the file from now on. drain: gives the uses since it was called last."""
        self._drain = drain
        self._saving = asyncio.create_task(self._save_often(), name="ledger")

    async def stop(self) -> None:
        """Writes the file a last time, before the scheduler ends."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
            await self._save()
        self._saving, self._drain = None, tuple

    def take(self, node: str, runs: Sequence[MachineRun]) -> None:
        """Takes all runs of the machine of *node*, the last of which goes on: it ends now, by the clock of the head."""
        machines: dict[tuple[str, str], list[MachineRun]] = {}
        if runs:
            runs = [*runs[:-1], replace(runs[-1], began=time.time() - runs[-1].seconds)]
        for run in runs[-MOST:]:
            if run.node == node and run.seconds >= 0:
                machines.setdefault((run.node, run.machine), []).append(run)
        if machines and not machines.keys() & self._runs.keys():
            self.on_machine(node)
        self._runs |= machines
        while len(self._runs) > MOST:
            first = min((key for key in self._runs if key[0] != _OTHERS), key=lambda key: self._runs[key][-1].ended)
            for run in self._runs.pop(first):
                whole = self._runs.get((_OTHERS, _OTHERS), [replace(run, node=_OTHERS, machine=_OTHERS, seconds=0.0)])
                self._runs[_OTHERS, _OTHERS] = [replace(whole[0], seconds=whole[0].seconds + run.seconds)]

    def spent(self, head: str, budget: NodeBudget) -> float:
        """Returns what all machines have cost until now, in USD, by the prices of *budget*. head: the node of that name
        has a price of its own."""
        now, spent = time.time(), 0.0
        for (node, _), runs in self._runs.items():
            since = now - runs[-1].ended
            seconds = sum(run.seconds for run in runs) + (since if 0 < since < _RUNS_S else 0.0)
            spent += seconds / 3600 * (budget.head if node == head else budget.node)
        return spent

    def hours(self, uses: bool = True) -> FleetHours:
        """Returns what the head knows now; without the *uses* of slots, which may be thousands of lines."""
        self._add(self._drain())
        runs = tuple(run for runs in self._runs.values() for run in runs)
        lines = tuple(self._uses[key] for key in sorted(self._uses)) if uses else ()
        return FleetHours(HOURS_VERSION, self._id, time.time(), runs, lines)

    def _add(self, uses: Iterable[SlotUse]) -> None:
        for use in uses:
            named = replace(use, submitter=use.submitter[:_LONGEST], name=use.name[:_LONGEST])
            key = named.day, named.submitter, named.kind, named.name
            if key not in self._uses and len(self._uses) >= MOST:
                named, key = replace(use, submitter=_OTHERS, name=_OTHERS), (use.day, _OTHERS, use.kind, _OTHERS)
            before = self._uses.get(key, replace(named, slot_seconds=0.0, node_seconds=0.0))
            slots, nodes = before.slot_seconds + use.slot_seconds, before.node_seconds + use.node_seconds
            self._uses[key] = replace(named, slot_seconds=slots, node_seconds=nodes)

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self._save()

    async def _save(self) -> None:
        if self._lost():
            return
        try:
            await asyncio.to_thread(self._write, self.hours())
        except StateDirectoryError as error:  # the memory has it
            logger.warning("%s", error)

    def _write(self, hours: FleetHours) -> None:
        with writing(self._file):
            # As the journal makes it.
            self._folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(self._file, json.dumps(hours.to_json()) + "\n", durable=True)
