"""From power-on to every slot registered, phase by phase, on nodes that boot: see tests/integration/boot.

The baseline of each phase is a machine of the same image that boots to the end of cloud-init with nothing to do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Result

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("", "helpers")]

from booted_nodes.fleet import Bed, filled  # noqa: E402
from booted_nodes.image import Unavailable  # noqa: E402
from booted_nodes.machine import Machine  # noqa: E402
from fake_nvml.build import build  # noqa: E402
from terraform_projects.commands import until  # noqa: E402

import skyinfra as sky  # noqa: E402

RUNS = 3
# In their order; the last one ends when the client counts the slots.
PHASES = ("operating system and user data", "Python, packages and runner", "partitions", "workers registered")


def run() -> Iterator[Result]:
    try:
        bed = Bed(build(ROOT / "build" / "fake-nvml"))
    except Unavailable as error:
        print(f"boot: {error}", file=sys.stderr)
        return
    try:
        base = statistics.median(_empty(bed) for _ in range(RUNS))
        yield from _results("one node", [_phases(bed, bed.declare()) for _ in range(RUNS)], base)
        indexed = bed.declare().model_copy(update={"image": sky.Image(index=_index(bed))})
        yield from _results("one node, index", [_phases(bed, indexed) for _ in range(RUNS)], base, aim="<= 20 s")
        yield from _results("3 nodes", [_phases(bed, bed.declare(3)) for _ in range(RUNS)], base, aim="")
    finally:
        bed.close()


def _index(bed: Bed) -> str:
    """The URL of a package index with what the bed's wheelhouse has, on this machine: no network is measured."""
    top = bed.packages / "simple"
    for wheel in bed.packages.glob("*.whl"):
        project = top / wheel.name.partition("-")[0].lower().replace("_", "-").replace(".", "-")
        project.mkdir(parents=True, exist_ok=True)
        (project / wheel.name).symlink_to(wheel)
    return f"{bed.index}simple/"


def _results(what: str, runs: list[list[float]], base: float, aim: str = "<= 10 s") -> Iterator[Result]:
    baseline = f"nothing to set up: {base:.1f} s"
    for index, phase in enumerate(PHASES):
        seconds = statistics.median(run[index] for run in runs)
        yield Result(f"boot of {what}: {phase}", baseline, seconds, seconds / base)
    total = statistics.median(sum(run) for run in runs)
    yield Result(f"boot of {what}: power-on to slots", baseline, total, total / base, aim)


def _empty(bed: Bed) -> float:
    fleet = bed.fleet(bed.declare())
    try:
        fleet.head.metadata.user_data = filled("#cloud-config\n{}\n", {})
        start = time.monotonic()
        fleet.boot(ready=False)
        _until_done(fleet.head, "cloud-final")
        return time.monotonic() - start
    finally:
        fleet.close()


def _phases(bed: Bed, declared: sky.ComputePool) -> list[float]:
    """Seconds of each phase of a fleet's boot, of its slowest node."""
    fleet = bed.fleet(declared)
    try:
        start = time.monotonic()
        fleet.boot()
        with fleet.connect() as pool:
            until(lambda: len(pool.slots()) == len(fleet.slots) * declared.nodes)
        end = time.monotonic()
        data = max(_active(machine, "cloud-config") for machine in fleet.nodes)
        begins = max(_began(machine, "skyinfra-partition") for machine in fleet.nodes)
        ends = max(_ended(machine, "skyinfra-partition") for machine in fleet.nodes)
        return [data - start, begins - data, ends - begins, end - ends]
    finally:
        fleet.close()


def _until_done(machine: Machine, unit: str) -> None:
    def done() -> bool:
        try:
            return machine.show(unit, "ActiveState") == "active"
        except (AssertionError, LookupError):
            return False

    until(done)


def _active(machine: Machine, unit: str) -> float:
    return _seconds(machine, unit, "ActiveEnterTimestampMonotonic")


def _began(machine: Machine, unit: str) -> float:
    return _seconds(machine, unit, "ExecMainStartTimestampMonotonic")


def _ended(machine: Machine, unit: str) -> float:
    return _seconds(machine, unit, "ExecMainExitTimestampMonotonic")


def _seconds(machine: Machine, unit: str, name: str) -> float:
    """A time of systemd's; nodes share the clock of this machine."""
    return int(machine.show(unit, name)) / 1e6
