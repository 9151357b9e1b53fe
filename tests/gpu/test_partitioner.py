"""The partitioner and the NVML layer against the simulated driver: the code that real nodes run."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from local_fleets.running_node import h100

from skyinfra import PartitionBusy, PartitionFailed, mig
from skyinfra.gpu import partitioner
from skyinfra.gpu.nvml import Nvml, ProfileInfo
from skyinfra.gpu.partitioner import ApplyOptions
from skyinfra.gpu.simulated.driver import SimulatedDriver
from skyinfra.mig import Placement
from skyinfra.mig.steps import Partition, Step
from skyinfra.protocol.nodeconfig import NodeAccelerator

MIXED = (("3g.40gb", 0, 4), ("2g.20gb", 4, 2), ("1g.10gb", 6, 1))
A100 = NodeAccelerator("A100", "nvidia", 1, 40.0, "a100_40gb", ((Placement("3g.20gb", 0, 4),),))


class Refusing:
    """The driver *api*, whose function *name* answers *code* for the first *times* calls."""

    def __init__(self, api: Any, name: str, code: int, times: int = 10**9) -> None:
        self._api, self._name, self._code, self._left = api, name, code, times

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._api, name)

        def function(*arguments: Any, **keywords: Any) -> Any:
            if self._left:
                self._left -= 1
                raise pynvml.NVMLError(self._code)
            return getattr(self._api, name)(*arguments, **keywords)

        return function


Opener = Callable[[NodeAccelerator], SimulatedDriver]


@pytest.fixture
def driver(tmp_path: Path) -> Opener:
    def make(accelerator: NodeAccelerator) -> SimulatedDriver:
        made = SimulatedDriver(accelerator, path=tmp_path / "gpus.json", seed="demo/mig/n1")
        made.nvmlInit()
        return made

    return make


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    yield []


def apply(nvml: Nvml, accelerator: NodeAccelerator, **keywords: Any) -> tuple[Partition, ...]:
    return partitioner.apply(nvml, dict(enumerate(accelerator.per_gpu)), **keywords)


def plan(nvml: Nvml, accelerator: NodeAccelerator) -> list[Step]:
    return partitioner.plan(nvml, dict(enumerate(accelerator.per_gpu)))


def existing(nvml: Nvml, accelerator: NodeAccelerator) -> tuple[Partition, ...]:
    return partitioner.actual(nvml, dict(enumerate(accelerator.per_gpu)))


def places(partitions: tuple[Partition, ...]) -> list[tuple[int, str, int, int]]:
    return [(p.gpu, p.profile, p.start, p.size) for p in partitions]


def test_eight_gpus_with_a_mixed_layout(driver: Opener, events: list[dict[str, Any]]) -> None:
    wanted = h100(*[MIXED] * 8)
    partitions = apply(Nvml(driver(wanted)), wanted, emit=events.append)
    assert places(partitions) == [(gpu, *place) for gpu in range(8) for place in MIXED]
    assert len({p.uuid for p in partitions}) == 24
    assert all(p.uuid.startswith("MIG-") for p in partitions)
    assert [e["phase"] for e in events] == ["mode"] * 8 + ["create"] * 24


def test_a_second_run_and_a_second_process_change_nothing(driver: Opener, events: list[dict[str, Any]]) -> None:
    wanted = h100(MIXED, MIXED)
    first = apply(Nvml(driver(wanted)), wanted)
    other_process = Nvml(driver(wanted))
    assert plan(other_process, wanted) == []
    assert apply(other_process, wanted, emit=events.append) == first
    assert events == []


def test_only_the_difference_is_touched(driver: Opener, events: list[dict[str, Any]]) -> None:
    before = h100(MIXED, MIXED)
    nvml = Nvml(driver(before))
    first = apply(nvml, before)
    wanted = h100(MIXED, (("3g.40gb", 0, 4), ("1g.10gb", 4, 1), ("1g.10gb", 6, 1)))
    steps = [str(step) for step in plan(nvml, wanted)]
    assert steps == ["GPU 1: destroy 2g.20gb at 4:2", "GPU 1: create 1g.10gb at 4:1"]
    second = apply(nvml, wanted, emit=events.append)
    assert [(e["gpu"], e["phase"], e["start"]) for e in events] == [(1, "destroy", 4), (1, "create", 4)]
    assert {p.uuid for p in first} & {p.uuid for p in second} == {p.uuid for p in first if (p.gpu, p.start) != (1, 4)}


def test_whole_gpus_turn_mig_off(driver: Opener, events: list[dict[str, Any]]) -> None:
    before = h100(MIXED, MIXED)
    api = driver(before)
    apply(Nvml(api), before)
    wanted = dataclasses.replace(before, layouts=((), before.layouts[1]))
    partitions = apply(Nvml(api), wanted, emit=events.append)
    assert {p.gpu for p in partitions} == {1}
    assert [e["phase"] for e in events] == ["destroy"] * 3 + ["mode"]
    assert [gpu.mig_mode() for gpu in Nvml(api).gpus()] == [(False, False), (True, True)]
    assert apply(Nvml(api), dataclasses.replace(before, layouts=())) == ()
    assert Nvml(api).gpus()[1].mig_mode() == (False, False)


def test_uuids_are_the_same_after_a_reboot_and_differ_between_nodes(driver: Opener, tmp_path: Path) -> None:
    wanted = h100(MIXED)
    api = driver(wanted)
    first = apply(Nvml(api), wanted)
    api.reboot()
    assert Nvml(api).gpus()[0].mig_mode() == (False, False)
    assert apply(Nvml(api), wanted) == first
    other = SimulatedDriver(wanted, path=tmp_path / "other.json", seed="demo/mig/n2")
    other.nvmlInit()
    assert not {p.uuid for p in first} & {p.uuid for p in apply(Nvml(other), wanted)}


def test_an_instance_without_its_compute_instance_is_made_anew(driver: Opener) -> None:
    wanted = h100(MIXED)
    nvml = Nvml(driver(wanted))
    first = apply(nvml, wanted)
    gpu = nvml.gpus()[0]
    gpu.empty(gpu.instances()[0])
    assert [str(s) for s in plan(nvml, wanted)] == [
        "GPU 0: destroy 3g.40gb at 0:4",
        "GPU 0: create 3g.40gb at 0:4",
    ]
    assert apply(nvml, wanted) == first


def test_double_memory_profile_gets_its_own_compute_profile(driver: Opener) -> None:
    wanted = h100((("1g.20gb", 0, 2), ("1g.10gb+me", 2, 1)))
    assert len(apply(Nvml(driver(wanted)), wanted)) == 2


def test_a_gpu_without_mig(driver: Opener) -> None:
    t4 = NodeAccelerator("T4", "nvidia", 2, 16.0)
    assert apply(Nvml(driver(t4)), t4) == ()
    wanted = dataclasses.replace(t4, layouts=((Placement("1g.4gb", 0, 1),), ()))
    with pytest.raises(PartitionFailed, match=r"GPU 0 \(NVIDIA T4 \(simulated\)\): it has no MIG"):
        apply(Nvml(driver(wanted)), wanted)


def test_unknown_profile_names_those_that_are(driver: Opener) -> None:
    before = h100(MIXED)
    nvml = Nvml(driver(before))
    first = apply(nvml, before)
    with pytest.raises(PartitionFailed, match=r"no profile 3g\.20gb") as caught:
        apply(nvml, h100((("3g.20gb", 0, 4),)))
    assert "3g.40gb" in (caught.value.hint or "")
    assert existing(nvml, before) == first, "nothing was destroyed for a layout that cannot be"


@pytest.mark.parametrize(
    ("function", "code", "message", "hint"),
    [
        (
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            23,
            r"create 3g\.40gb at 0:4: INSUFFICIENT_RESOURCES \(23\)",
            "-lgi",
        ),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", 4, r"create 3g\.40gb at 0:4: NO_PERMISSION \(4\)", "root"),
        ("nvmlGpuInstanceCreateComputeInstance", 16, r"RESET_REQUIRED \(16\)", "--gpu-reset -i 0"),
        ("nvmlDeviceSetMigMode", 4, r"turn MIG on: NO_PERMISSION \(4\)", "root"),
        ("nvmlDeviceGetMigMode", 15, r"read its MIG mode: GPU_IS_LOST \(15\)", "replace the node"),
        ("nvmlDeviceGetCount", 999, r"UNKNOWN \(999\)", "nvidia-smi"),
    ],
)
def test_refusals_say_what_nvml_said(driver: Opener, function: str, code: int, message: str, hint: str) -> None:
    wanted = h100(MIXED)
    with pytest.raises(PartitionFailed, match=message) as caught:
        apply(Nvml(Refusing(driver(wanted), function, code)), wanted)
    assert hint in (caught.value.hint or "")


def test_a_refusal_says_what_was_wanted_and_what_stands(driver: Opener) -> None:
    wanted = h100(MIXED)
    api = driver(wanted)
    with pytest.raises(PartitionFailed) as caught:
        apply(Nvml(Refusing(api, "nvmlGpuInstanceCreateComputeInstance", 20)), wanted)
    assert caught.value.field == "accelerator.layouts[0]"
    assert (
        "Wanted: 3g.40gb at 0:4, 2g.20gb at 4:2, 1g.10gb at 6:1. Found: 3g.40gb at 0:4 (without a compute instance)."
        in str(caught.value)
    )
    assert len(apply(Nvml(api), wanted)) == 3, "the next run goes on from there"


def test_an_instance_in_use_is_waited_for(driver: Opener) -> None:
    before, wanted = h100(MIXED), h100((("7g.80gb", 0, 8),))
    api = driver(before)
    apply(Nvml(api), before)
    busy_at_first = Refusing(api, "nvmlGpuInstanceDestroy", pynvml.NVML_ERROR_IN_USE, times=1)
    assert places(apply(Nvml(busy_at_first), wanted)) == [(0, "7g.80gb", 0, 8)]


NOW = ApplyOptions(patience_s=0)


@contextlib.contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that does nothing, as what uses a partition."""
    running = subprocess.Popen(["sleep", "600"])
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def test_a_partition_in_use_is_not_destroyed_and_nothing_else_is(driver: Opener) -> None:
    before = h100(MIXED, MIXED)
    api = driver(before)
    apply(Nvml(api), before)
    wanted = h100((("7g.80gb", 0, 8),), (("3g.40gb", 0, 4),))
    with process() as user:
        api.hold(1, pid=user.pid, start=4)
        with pytest.raises(PartitionBusy) as caught:
            apply(Nvml(api), wanted, options=NOW)
        said = rf"GPU 1 \(NVIDIA H100 \(simulated\)\): 2g\.20gb at 4:2 is used by {user.pid} \(sleep, user \w+\)"
        assert re.search(said, str(caught.value))
        assert "Nothing was changed." in (caught.value.hint or "")
        assert "--force" in (caught.value.hint or "")
        assert plan(Nvml(api), before) == [], "GPU 0, where nobody is in the way, is as it was too"
        api.hold(1, pid=user.pid, start=4, held=False)
    assert len(apply(Nvml(api), wanted, options=NOW)) == 2


def test_a_partition_in_use_may_stay(driver: Opener) -> None:
    before = h100(MIXED)
    api = driver(before)
    apply(Nvml(api), before)
    api.hold(0, start=0)
    assert len(apply(Nvml(api), h100((("3g.40gb", 0, 4), ("3g.40gb", 4, 4))), options=NOW)) == 2


def test_force_ends_the_processes(driver: Opener, events: list[dict[str, Any]]) -> None:
    before = h100(MIXED)
    api = driver(before)
    apply(Nvml(api), before)
    with process() as user:
        api.hold(0, pid=user.pid, start=0)
        ended = threading.Thread(target=lambda: (user.wait(), api.hold(0, pid=user.pid, start=0, held=False)))
        ended.start()
        apply(Nvml(api), h100((("7g.80gb", 0, 8),)), emit=events.append, options=ApplyOptions(force=True))
        ended.join()
        assert user.returncode == -signal.SIGTERM
    assert [e["phase"] for e in events] == ["force", *["destroy"] * 3, "create"]
    assert events[0]["what"] == "3g.40gb at 0:4"


def test_what_force_could_not_end_is_named(driver: Opener, events: list[dict[str, Any]]) -> None:
    before = h100(MIXED)
    api = driver(before)
    apply(Nvml(api), before)
    wanted, options = h100((("7g.80gb", 0, 8),)), ApplyOptions(force=True, patience_s=0)
    with process() as user:
        # The driver names it for as long as it likes: a process that hangs there does not end.
        api.hold(0, pid=user.pid, start=0)
        api.hold(0, pid=2**22 + 1, start=4)
        with pytest.raises(PartitionBusy) as caught:
            apply(Nvml(api), wanted, emit=events.append, options=options)
        hint = caught.value.hint or ""
        assert f"--force could not end {2**22 + 1}" in hint and "no such process is seen here" in hint
        assert f"The driver still names {user.pid}, which has ended" in hint
        assert "or add --force" not in hint
    assert [event["phase"] for event in events] == ["force", "force"]


def test_a_pending_mode_asks_for_a_reset(driver: Opener) -> None:
    api = driver(A100)
    api.pass_through(0)
    for _ in range(2):
        with pytest.raises(PartitionFailed, match=r"reset or reboot is needed: RESET_REQUIRED \(16\)") as caught:
            apply(Nvml(api), A100)
        assert "nvidia-smi --gpu-reset -i 0" in (caught.value.hint or "")
        assert "on after a reset" in (caught.value.hint or "")
    api.reset(0)
    assert len(apply(Nvml(api), A100)) == 1
    api.reboot()
    assert Nvml(api).gpus()[0].mig_mode() == (True, True), "Ampere keeps the mode over a reboot"
    assert len(apply(Nvml(api), A100)) == 1


def test_mig_is_not_turned_on_under_a_process(driver: Opener) -> None:
    wanted = h100(MIXED)
    api = driver(wanted)
    api.hold(0)
    with pytest.raises(PartitionBusy, match="the GPU is used by"):
        apply(Nvml(api), wanted, options=NOW)
    assert Nvml(api).gpus()[0].mig_mode() == (False, False)
    api.hold(0, held=False)
    assert len(apply(Nvml(api), wanted)) == 3


def test_standing_never_changes_anything(driver: Opener) -> None:
    wanted = h100(MIXED)
    nvml = Nvml(driver(wanted))
    with pytest.raises(PartitionFailed, match="do not stand as declared") as caught:
        existing(nvml, wanted)
    assert "GPU 0: turn MIG on" in (caught.value.hint or "")
    assert nvml.gpus()[0].mig_mode() == (False, False)


def test_drivers_without_the_versioned_query_still_name_profiles(driver: Opener) -> None:
    wanted = h100(MIXED)
    api = driver(wanted)
    names = {profile.name for profile in _profiles(Nvml(api))}

    class Old(Refusing):
        def __getattr__(self, name: str) -> Any:
            function = getattr(self._api, name)
            if "ProfileInfo" not in name:
                return function

            def old(*arguments: Any, version: int) -> Any:
                if version == 2:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
                return function(*arguments, version=version)

            return old

    old = Nvml(Old(api, "", 0))
    assert len(apply(old, wanted)) == 3
    assert {profile.name for profile in _profiles(old)} == names


def _profiles(nvml: Nvml) -> list[ProfileInfo]:
    return nvml.gpus()[0].profiles()


@pytest.mark.parametrize(
    ("name", "found"),
    [("3g.40gb", "3g.40gb"), ("3g.39gb", "3g.40gb"), ("1g.23gb+me", "1g.24gb+me"), ("3g.44gb", None), ("huge", None)],
)
def test_profiles_are_found_by_name_or_nearly(name: str, found: str | None) -> None:
    has = ["1g.10gb", "1g.24gb", "1g.24gb+me", "3g.40gb"]
    assert mig.same_profile(name, has) == found
