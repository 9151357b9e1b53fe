"""A partitioning that is killed at any NVML call, or refused at any, leaves what the next one gets right.

The real program on the fake driver, in hundreds of processes: see partition_runs.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from devices.partitioning import CHANGING
from fake_nvml.fake_machine import FakeMachine
from support import ROOT

Machine = Callable[..., FakeMachine]
PROGRAM = ROOT / "tests" / "helpers" / "devices" / "partition_runs.py"


@dataclass(frozen=True)
class Change:
    """GPUs that stand as ``before`` (None: as they come) and are to stand as ``wanted``."""

    gpus: str
    before: str | None
    wanted: str
    needs_reset: bool = False

    def machine(self, make: Machine) -> FakeMachine:
        return make(self.gpus, **({"NEEDS_RESET": "1"} if self.needs_reset else {}))

    @property
    def arguments(self) -> list[str]:
        return ["partition", "--layout", self.wanted, "--gpu", "all"]


CHANGES = {
    # Keeps one instance, destroys two and creates one.
    "hopper": Change("h100_80gb", "3g.40gb+2g.20gb+1g.10gb*2", "3g.40gb+2g.20gb*2"),
    # From nothing, with the mode.
    "ampere": Change("a100_40gb", None, "3g.20gb+2g.10gb+1g.5gb*2"),
    # The other way.
    "off": Change("a30,a30", "2g.12gb+1g.6gb*2", "off"),
    # A grid of twelve, compute instances with a profile of their own.
    "blackwell": Change("rtx_pro_6000", "1g.24gb*4", "2g.48gb+1g.24gb-me*2"),
    # Through a reset, with NVML closed and opened in between.
    "reset": Change("a30,a30", None, "2g.12gb+1g.6gb*2", needs_reset=True),
    # Two GPU instances stay; of one a compute instance goes, that of the other makes way for two.
    "shares": Change("h100_80gb", "1c.3g.40gb*3+2g.20gb", "1c.3g.40gb*2+1c.2g.20gb*2"),
    "double": Change("a100_40gb", "1g.5gb*7", "1g.10gb*3+1g.5gb"),
}


@dataclass(frozen=True)
class Full:
    """A run that nothing disturbs: the machine that it began with, its calls, what it says and makes in the end."""

    start: Path
    calls: list[str]
    existing: list[dict[str, Any]]
    machine: list[dict[str, Any]]


def existing(output: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in output.splitlines()]
    return [event for event in events if event["event"] == "standing"]


def machine_of(shown: str) -> list[dict[str, Any]]:
    """What fake-nvml-ctl shows; in which order the instances were created is of no concern."""
    gpus: list[dict[str, Any]] = json.loads(shown)["gpus"]
    for gpu in gpus:
        gpu["instances"].sort(key=lambda instance: instance["start"])
    return gpus


def full_run(machine: FakeMachine, change: Change) -> Full:
    if change.before is not None:
        done = machine.python("-m", "skyinfra.runner", "partition", "--layout", change.before, "--gpu", "all")
        assert done.returncode == 0, done.stderr
    machine.show()
    start = machine.folder / "start"
    shutil.copy(machine.folder / "state", start)
    machine.forget_calls()
    done = machine.python("-m", "skyinfra.runner", *change.arguments)
    assert done.returncode == 0, done.stderr
    calls = (machine.folder / "calls").read_text().split()
    assert CHANGING & set(calls)
    return Full(start, calls, existing(done.stdout), machine_of(machine.control("show")))


def run_jobs(machine: FakeMachine, jobs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    environment = machine.environment()
    # Written by nobody: every call would open it.
    del environment["FAKE_NVML_LOG"]
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(
        command, input=json.dumps(list(jobs)), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return results


def deaths(calls: Sequence[str], step: int) -> list[tuple[str, int]]:
    """Before every *step*-th call, and after every call that changes something."""
    before = [("FAKE_NVML_DIE_AT", number) for number in range(1, len(calls) + 1, step)]
    after = [("FAKE_NVML_DIE_AFTER", number) for number, name in enumerate(calls, 1) if name in CHANGING]
    return before + after


@pytest.mark.parametrize("reboot", [False, True], ids=["again", "after a reboot"])
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("hopper", 17),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in CHANGES),
    ],
)
def test_killed_at_any_call(fake_machine: Machine, name: str, step: int, reboot: bool) -> None:
    change = CHANGES[name]
    machine = change.machine(fake_machine)
    full = full_run(machine, change)
    between = [{"control": "reboot"}] if reboot else []
    again = {"arguments": change.arguments}
    # Power goes at any call, and then there is a boot; a run at once is what a person does.
    killed = deaths(full.calls, step if reboot else step + 4)
    jobs = [
        {
            "start": str(full.start),
            "runs": [
                {"arguments": change.arguments, "environment": {how: str(call)}},
                *between,
                again,
                {"control": "show"},
            ],
        }
        for how, call in killed
    ]
    for death, runs in zip(killed, run_jobs(machine, jobs), strict=True):
        assert runs[0]["code"] == 137, (death, runs[0])
        assert runs[-2]["code"] == 0, (death, runs)
        # As if nothing had happened, UUIDs included.
        assert existing(runs[-2]["out"]) == full.existing, death
        assert machine_of(runs[-1]["out"]) == full.machine, death


@pytest.mark.parametrize(
    "name", ["hopper", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ampere", "shares"))]
)
def test_refused_at_any_call(fake_machine: Machine, name: str) -> None:
    """NVML says no to one function, whichever: the message says so, and the next run gets it right."""
    change = CHANGES[name]
    machine = change.machine(fake_machine)
    full = full_run(machine, change)
    functions = sorted(set(full.calls))
    jobs = [
        {
            "start": str(full.start),
            "runs": [
                {"arguments": change.arguments, "environment": {"FAKE_NVML_FAIL": f"{function}:999"}},
                {"arguments": change.arguments},
            ],
        }
        for function in functions
    ]
    for function, (refused, again) in zip(functions, run_jobs(machine, jobs), strict=True):
        assert again["code"] == 0, (function, again)
        assert existing(again["out"]) == full.existing
        assert "Traceback" not in refused["err"]
        if function == "nvmlShutdown":
            assert (refused["code"], refused["err"]) == (0, ""), "nothing is left to be done then"
            continue
        assert refused["code"] == 1
        assert "UNKNOWN (999)" in refused["err"], function
        if function == "nvmlInitWithFlags":
            assert refused["err"].startswith("AcceleratorMissing: "), refused["err"]
            continue
        assert refused["err"].startswith("PartitionFailed: "), refused["err"]
        if function not in ("nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion"):
            assert re.search(r"\bGPU 0\b", refused["err"]), (function, refused["err"])
        if function in CHANGING:
            assert f"GPU 0 (NVIDIA {'A100' if name == 'ampere' else 'H100'}" in refused["err"]
            assert re.search(r"Wanted: .+\. Found: .+\.", refused["err"]), refused["err"]


@pytest.mark.parametrize(
    "name", ["hopper", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ampere", "shares"))]
)
def test_refused_at_any_change(fake_machine: Machine, name: str) -> None:
    """Each time that something is changed, and by each error that says why."""
    change = CHANGES[name]
    machine = change.machine(fake_machine)
    full = full_run(machine, change)
    failures = [
        (f"{function}:{code}:1:{after}", label)
        for function in sorted(CHANGING & set(full.calls))
        for after in range(full.calls.count(function))
        for code, label in ((4, "NO_PERMISSION (4)"), (15, "GPU_IS_LOST (15)"), (23, "INSUFFICIENT_RESOURCES (23)"))
    ]
    jobs = [
        {
            "start": str(full.start),
            "runs": [
                {"arguments": change.arguments, "environment": {"FAKE_NVML_FAIL": failure}},
                {"arguments": change.arguments},
            ],
        }
        for failure, _ in failures
    ]
    for (failure, label), (refused, again) in zip(failures, run_jobs(machine, jobs), strict=True):
        assert refused["code"] == 1, failure
        assert re.match(r"PartitionFailed: .*GPU 0 \(NVIDIA", refused["err"]), (failure, refused["err"])
        assert label in refused["err"]
        assert re.search(r"Wanted: .+\. Found: .+\.\n.", refused["err"]), "and what to do"
        assert again["code"] == 0, (failure, again)
        assert existing(again["out"]) == full.existing
