"""The fake driver does what its README says, and `Nvml` does with what drivers do differently."""

from __future__ import annotations

import ctypes
import itertools
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from devices.nvml_worlds import Fake, at, create, existing, listed, partition, profile, refused
from fake_nvml import boards
from fake_nvml.fake_machine import FakeMachine

from skyinfra import mig
from skyinfra.readings import gpm

Machine = Callable[..., FakeMachine]
MODELS = [model for model in mig.models() if any(p.starts for p in mig.geometry(model).profiles)]


# How it is loaded.


def test_pynvml_finds_it_by_its_name(fake_machine: Machine) -> None:
    """The real way: the loader looks for libnvidia-ml.so.1 in LD_LIBRARY_PATH."""
    program = """
        from skyinfra.gpu.nvml import Nvml
        nvml = Nvml()
        nvml.open()
        print(nvml.driver_version(), *(gpu.name for gpu in nvml.gpus()), sep="\\n")
    """
    done = fake_machine("h100_80gb,a30,t4").python("-c", textwrap.dedent(program))
    assert done.stdout.splitlines() == ["595.58.03", "NVIDIA H100 80GB HBM3", "NVIDIA A30", "Tesla T4"], done.stderr


def test_eight_h100_where_nothing_is_said(fake_driver: Path, tmp_path: Path) -> None:
    environment = {"FAKE_NVML_STATE": str(tmp_path / "state")}
    program = str(fake_driver / "fake-nvml-ctl")
    show = subprocess.run([program, "show"], env=environment, capture_output=True, text=True, check=True).stdout
    assert [gpu["model"] for gpu in json.loads(show)["gpus"]] == ["h100_80gb"] * 8


def test_every_model_of_the_geometry_is_there(fake_machine: Machine) -> None:
    assert fake_machine().control("models").split() == [*MODELS, *(model for model, *_ in boards.WITHOUT_MIG)]


def test_an_unknown_model_is_refused(fake_machine: Machine) -> None:
    done = fake_machine("h100").python("-c", "import pynvml; pynvml.nvmlInit()")
    assert 'no model "h100"; there are a30_24gb' in done.stderr
    assert "NVMLError_DriverNotLoaded" in done.stderr


def test_other_gpus_are_another_machine(fake_machine: Machine) -> None:
    machine = fake_machine("a30")
    with machine.loaded():
        Fake(machine).gpu().set_mig_mode(True)
    assert [gpu["current"] for gpu in machine.show()] == [1]
    machine.gpus = "a30,a30"
    assert [gpu["current"] for gpu in machine.show()] == [0, 0]


def test_gpus_of_several_models_keep_their_own_rules(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,a30,t4,rtx_pro_6000")
    with machine.loaded():
        here = Fake(machine)
        for index, name, start, size in ((0, "3g.40gb", 4, 4), (1, "2g.12gb", 2, 2), (3, "2g.48gb", 6, 6)):
            here.gpu(index).set_mig_mode(True)
            partition(here.gpu(index), name, start, size)
        assert here.gpu(2).mig_mode() is None
        here.reboot()
        modes = [gpu.mig_mode() for gpu in here.nvml().gpus()]
    assert modes == [(False, False), (True, True), None, (False, False)]


# What drivers do differently.


@pytest.mark.parametrize("model", MODELS)
def test_drivers_that_do_not_name_profiles(fake_machine: Machine, model: str) -> None:
    """Before R510 the name follows from the memory, rounded as NVIDIA does it: 22.5 GB are 23."""
    machine = fake_machine(model, old=True)
    # Those that came with the versions that name them cannot be told apart by their numbers.
    wanted = [p.name for p in mig.geometry(model).profiles if p.attributes in ("", "+me") and p.starts]
    with machine.loaded():
        here = Fake(machine)
        refused(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.nvmlDeviceGetGpuInstanceProfileInfo, here.device(), 0)
        found = [known.name for known in here.gpu().profiles()]
    assert set(wanted) <= set(found)


def test_old_drivers_tell_processes_too(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb", old=True)
    with machine.loaded():
        here = Fake(machine)
        here.gpu().set_mig_mode(True)
        partition(here.gpu(), "1g.5gb", 0, 1)
        here.hold(0, 300, start=0)
        machine.control("hold", 0, "--pid", 20, "--graphics")
        assert here.gpu().processes() == (20, 300)
        assert here.gpu().processes_on(at(here.gpu(), 0)) == (300,)


def test_many_processes(fake_machine: Machine) -> None:
    machine = fake_machine()
    for pid in range(1, 31):
        machine.control("hold", 0, "--pid", pid, *(("--graphics",) if pid % 2 else ()))
    with machine.loaded():
        assert Fake(machine).gpu().processes() == tuple(range(1, 31))


def test_names_drift_with_the_driver(fake_machine: Machine) -> None:
    machine = fake_machine("a100_80gb", NAMES="3g.40gb=3g.39gb,7g.80gb=7g.79gb")
    with machine.loaded():
        names = [known.name for known in Fake(machine).gpu().profiles()]
    assert names[:5] == ["1g.10gb", "2g.20gb", "3g.39gb", "4g.40gb", "7g.79gb"]


def test_drivers_that_tell_no_profiles_while_mig_is_off(fake_machine: Machine) -> None:
    machine = fake_machine(SILENT_WHILE_OFF="1")
    with machine.loaded():
        gpu = Fake(machine).gpu()
        assert gpu.profiles() == []
        # Placements "regardless of whether MIG is enabled or not", says nvml.h; 9 is the id of 3g.40gb.
        placements = (pynvml.c_nvmlGpuInstancePlacement_t * 2)()
        count = ctypes.c_uint()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(Fake(machine).device(), 9, placements, ctypes.byref(count))
        assert [(each.start, each.size) for each in placements] == [(0, 4), (4, 4)]
        gpu.set_mig_mode(True)
        assert len(gpu.profiles()) == 7


def test_an_index_beyond_all_mig_devices_is_invalid_and_an_empty_one_not_found(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb")
    with machine.loaded():
        here = Fake(machine)
        here.gpu().set_mig_mode(True)
        assert pynvml.nvmlDeviceGetMaxMigDeviceCount(here.device()) == 7
        refused(pynvml.NVML_ERROR_NOT_FOUND, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, here.device(), 6)
        refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, here.device(), 7)


def test_performance_is_sampled_of_a_mig_device_and_of_an_instance_that_stands(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb", READINGS="0/4.sm=61")
    with machine.loaded():
        here = Fake(machine)
        gpu = here.gpu()
        gpu.set_mig_mode(True)
        partition(gpu, "3g.40gb", 4, 4)
        device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(here.device(), 0)
        assert pynvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice
        first, second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        for sample in (first, second):
            pynvml.nvmlGpmSampleGet(device, sample)
        assert gpm.measured(gpu, first, second) == dict.fromkeys(gpm.MEASURES, 0.0) | {"sm": 61.0}
        standing_id = pynvml.nvmlDeviceGetGpuInstanceId(device)
        pynvml.nvmlGpmMigSampleGet(here.device(), standing_id, first)
        refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.nvmlGpmMigSampleGet, here.device(), standing_id + 1, second)
        for sample in (first, second):
            pynvml.nvmlGpmSampleFree(sample)


def test_the_fabric_of_hopper_answers_both_versions_and_that_of_ampere_none(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,a100_80gb", READINGS="0.fabric=3,1.fabric=3")
    with machine.loaded():
        here = Fake(machine)
        assert (here.gpu().fabric_state(), here.gpu(1).fabric_state()) == (3, None)
        # A structure that is larger than its version says keeps what lies behind.
        info = pynvml.c_nvmlGpuFabricInfo_v3_t()
        info.version, info.healthSummary = pynvml.nvmlGpuFabricInfo_v2, 9
        pynvml.nvmlDeviceGetGpuFabricInfoV(here.device(), ctypes.byref(info))
        assert (info.state, info.healthSummary) == (3, 9)
        info.version = pynvml.nvmlGpuFabricInfo_v3
        pynvml.nvmlDeviceGetGpuFabricInfoV(here.device(), ctypes.byref(info))
        assert (info.state, info.healthSummary) == (3, 0)


def test_understated_counts_overflow_nothing(fake_machine: Machine) -> None:
    machine = fake_machine("a30", UNDERSTATE="1")
    with machine.loaded():
        here = Fake(machine)
        gpu = here.gpu()
        gpu.set_mig_mode(True)
        assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(here.device(), 0).instanceCount == 1
        for start in range(4):
            partition(gpu, "1g.6gb", start, 1)
        six = profile(gpu, "1g.6gb").profile_id
        function = pynvml.nvmlDeviceGetGpuInstances
        assert len(listed(function, pynvml.c_nvmlGpuInstance_t, here.device(), six)) == 4
        assert len(gpu.instances()) == 4


def test_who_is_not_root(fake_machine: Machine) -> None:
    machine = fake_machine()
    with machine.loaded():
        gpu = Fake(machine).gpu()
        gpu.set_mig_mode(True)
        uuid = partition(gpu, "1g.10gb", 0, 1).uuid
    with machine.loaded(UNPRIVILEGED="1"):
        here = Fake(machine)
        gpu = here.gpu()
        assert gpu.mig_mode() == (True, True)
        assert len(gpu.profiles()) == 7
        assert gpu.memory_bytes() is None
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(here.device(), 0)) == uuid
        for function in (gpu.instances, gpu.processes, lambda: gpu.set_mig_mode(False)):
            refused(pynvml.NVML_ERROR_NO_PERMISSION, function)
        refused(pynvml.NVML_ERROR_NO_PERMISSION, create, gpu, "1g.10gb", 1, 1)
    with machine.loaded():
        assert existing(Fake(machine).gpu()) == [("1g.10gb", 0, 1)]


# The driver's own choice of places, which skyinfra leaves to none.


def _creates(here: Fake, ids: list[int]) -> bool:
    device, gpu = here.device(), here.gpu()
    try:
        for profile_id in ids:
            pynvml.nvmlDeviceCreateGpuInstance(device, profile_id)
    except pynvml.NVMLError_InsufficientResources:
        return False
    finally:
        for instance in gpu.instances():
            gpu.destroy(instance)
    return True


def test_the_order_matters_where_the_driver_chooses(fake_machine: Machine) -> None:
    """The user guide's example, and the orders that fail by the rule which explains it: 15 of 113."""
    machine = fake_machine("a100_40gb")
    geometry = mig.geometry("a100_40gb")
    combinations = mig.multisets(mig.layouts(geometry, mig.plain_profiles(geometry)), geometry)
    with machine.loaded():
        here = Fake(machine)
        here.gpu().set_mig_mode(True)
        assert not _creates(here, [19, 19, 14, 9])
        assert _creates(here, [9, 19, 14, 19])
        ids = {known.name: known.profile_id for known in here.gpu().profiles()}
        orders = [order for names in combinations for order in sorted(set(itertools.permutations(names)))]
        failing = [order for order in orders if not _creates(here, [ids[name] for name in order])]
    assert (len(combinations), len(orders), len(failing)) == (37, 113, 15)
    assert {tuple(sorted(order, reverse=True)) for order in failing} == {
        ("3g.20gb", "2g.10gb", "2g.10gb"),
        ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"),
        ("3g.20gb", "1g.5gb", "1g.5gb", "1g.5gb", "1g.5gb"),
    }


# What goes wrong on demand.


def test_a_call_fails_as_often_as_asked(fake_machine: Machine) -> None:
    machine = fake_machine(FAIL="nvmlDeviceCreateGpuInstanceWithPlacement:19:2:1,nvmlDeviceGetUUID:15:1")
    with machine.loaded():
        here = Fake(machine)
        refused(pynvml.NVML_ERROR_GPU_IS_LOST, here.gpu)
        gpu = here.gpu()
        gpu.set_mig_mode(True)
        create(gpu, "1g.10gb", 0, 1)
        for _ in range(2):
            refused(pynvml.NVML_ERROR_IN_USE, create, gpu, "1g.10gb", 1, 1)
        create(gpu, "1g.10gb", 1, 1)
        assert [start for _, start, _ in existing(gpu)] == [0, 1], "a failure has no effect"


PARTITION = """
    import pynvml
    from skyinfra.gpu.nvml import Nvml
    nvml = Nvml()
    nvml.open()
    gpu = nvml.gpus()[0]
    gpu.set_mig_mode(True)
    three = next(p for p in gpu.profiles() if p.name == "3g.40gb")
    gpu.fill(gpu.create(three, start=4, size=4), three)
    print("done")
"""


def run_partition(machine: FakeMachine, **settings: str) -> subprocess.CompletedProcess[str]:
    machine.forget_calls()
    return machine.python("-c", textwrap.dedent(PARTITION), **settings)


def test_a_process_dies_at_any_call(fake_machine: Machine) -> None:
    machine = fake_machine()
    assert run_partition(machine).stdout == "done\n"
    calls = (machine.folder / "calls").read_text().split()
    set_mode = calls.index("nvmlDeviceSetMigMode") + 1
    create_one = calls.index("nvmlDeviceCreateGpuInstanceWithPlacement") + 1
    for variable, call, mode, instances in (
        ("DIE_AT", set_mode, 0, 0),
        ("DIE_AFTER", set_mode, 1, 0),
        ("DIE_AT", create_one, 1, 0),
        ("DIE_AFTER", create_one, 1, 1),
    ):
        machine.control("new", machine.gpus)
        done = run_partition(machine, **{variable: str(call)})
        assert (done.returncode, done.stdout) == (137, "")
        (gpu,) = machine.show()
        assert (gpu["current"], len(gpu["instances"])) == (mode, instances)
        assert sum(machine.calls().values()) == call


def test_an_instance_lingers_after_its_compute_instances(fake_machine: Machine) -> None:
    machine = fake_machine(LINGER="2")
    with machine.loaded():
        here = Fake(machine)
        gpu = here.gpu()
        gpu.set_mig_mode(True)
        partition(gpu, "3g.40gb", 0, 4)
        gpu.empty(at(gpu, 0))
        for _ in range(2):
            refused(pynvml.NVML_ERROR_IN_USE, gpu.destroy, at(gpu, 0))
        gpu.destroy(at(gpu, 0))
        assert existing(gpu) == []


def test_the_state_is_whole_whenever_a_process_is_killed(fake_machine: Machine) -> None:
    machine = fake_machine()
    program = """
        from skyinfra.gpu.nvml import Nvml
        nvml = Nvml()
        nvml.open()
        while True:
            nvml.gpus()[0].set_mig_mode(True)
            nvml.gpus()[0].set_mig_mode(False)
    """
    for _ in range(5):
        command = [sys.executable, "-c", textwrap.dedent(program)]
        with subprocess.Popen(command, env=machine.environment()) as process:
            while machine.calls()["nvmlDeviceSetMigMode"] < 20:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        assert machine.show()[0]["model"] == "h100_80gb"
        machine.forget_calls()


# The interface itself.


def test_uuids_find_their_devices(fake_machine: Machine) -> None:
    machine = fake_machine("h100_80gb,a100_40gb")
    with machine.loaded():
        here = Fake(machine)
        here.gpu(1).set_mig_mode(True)
        made = partition(here.gpu(1), "3g.20gb", 4, 4)
        device = pynvml.nvmlDeviceGetHandleByUUID(made.uuid)
        assert pynvml.nvmlDeviceIsMigDeviceHandle(device).value == 1
        assert pynvml.nvmlDeviceGetGpuInstanceId(device) == 2
        assert pynvml.nvmlDeviceGetComputeInstanceId(device) == 0
        attributes = pynvml.nvmlDeviceGetAttributes(device)
        assert (attributes.gpuInstanceSliceCount, attributes.multiprocessorCount) == (3, 42)
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
        assert pynvml.nvmlDeviceGetUUID(parent) == here.gpu(1).uuid
        found = pynvml.nvmlDeviceGetHandleByUUID(here.gpu(1).uuid)
        assert pynvml.nvmlDeviceGetMinorNumber(found) == 1
        refused(pynvml.NVML_ERROR_NOT_FOUND, pynvml.nvmlDeviceGetHandleByUUID, "MIG-none")
        refused(pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.nvmlDeviceGetAttributes, found)


def test_capacities_and_instances_by_id(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb")
    with machine.loaded():
        here = Fake(machine)
        gpu, device = here.gpu(), here.device()
        gpu.set_mig_mode(True)
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, 19) == 7
        partition(gpu, "3g.20gb", 4, 4)
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, 19) == 4
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, 0) == 0
        instance = pynvml.nvmlDeviceGetGpuInstanceById(device, 2)
        assert pynvml.nvmlGpuInstanceGetInfo(instance).profileId == 9
        assert pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 0) == 0
        compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
        assert pynvml.nvmlComputeInstanceGetInfo(compute).placement.size == 3
        refused(pynvml.NVML_ERROR_NOT_FOUND, pynvml.nvmlDeviceGetGpuInstanceById, device, 1)
        refused(pynvml.NVML_ERROR_NOT_FOUND, pynvml.nvmlGpuInstanceGetComputeInstanceById, instance, 1)


def test_compute_instances_at_a_place(fake_machine: Machine) -> None:
    machine = fake_machine("a100_40gb")
    with machine.loaded():
        here = Fake(machine)
        here.gpu().set_mig_mode(True)
        instance = create(here.gpu(), "3g.20gb", 0, 4)
        function = pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements
        places = listed(function, pynvml.c_nvmlComputeInstancePlacement_t, instance, 1)
        # As go-nvml has it: 2c begins at even slices only.
        assert [(p.start, p.size) for p in places] == [(0, 2)]
        place = ctypes.byref(places[0])
        pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, 1, place)
        create_one = pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement
        refused(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, create_one, instance, 1, place)
        assert pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 0) == 1


def test_errors_have_names(fake_machine: Machine) -> None:
    machine = fake_machine()
    with machine.loaded():
        Fake(machine)
        assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES) == "Insufficient Resources"
        assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_UNKNOWN) == "Unknown Error"
