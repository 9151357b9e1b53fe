"""`skyinfra-runner doctor`: what it finds on machines that are as they should be, and on others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from checks.doctor import doctor, install
from devices import vendor_files
from fake_nvml.fake_machine import FakeMachine
from local_fleets.running_node import BIG, RunningNode, h100

from skyinfra.doctor import nvidia, packages, system, vendors
from skyinfra.doctor.examine import examine
from skyinfra.doctor.kernel_log import xids
from skyinfra.gpu import inventory
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.nodeconfig import NodeAccelerator

Machine = Callable[..., FakeMachine]
MakeNode = Callable[..., RunningNode]

WHOLE = ((), ())


def without_clock(found: Mapping[str, Finding]) -> dict[str, str]:
    """The results of everything that is about GPUs; the rest is that of the machine that tests run on."""
    ours = ("runner", "clock", "disk", "shared memory", "Xid errors", "NCCL settings", "locked memory", "disk: scratch")
    return {what: finding.result for what, finding in found.items() if what not in ours}


TORCH = "__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"


def test_a_machine_without_accelerators(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skyinfra.runner", "doctor"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    first = done.stdout.splitlines()[0]
    assert first.startswith("WRONG  accelerators")
    assert "no NVIDIA, AMD, AWS, Google or Intel accelerator is to be seen" in first
    assert "to do: Install the accelerator's driver" in done.stdout
    assert not done.stderr
    assert [f.result for f in examine(root=tmp_path) if f.what == "accelerators"] == ["wrong"]


def test_gpus_that_are_as_they_should_be(fake_machine: Machine) -> None:
    code, found = doctor(fake_machine("h100_80gb,h100_80gb"))
    assert without_clock(found) == dict.fromkeys(
        (
            "accelerators",
            "CUDA",
            *(f"{what} of GPU {gpu}" for what in ("ECC", "recovery", "clocks") for gpu in (0, 1)),
        ),
        "ok",
    )
    assert found["accelerators"].found == "2 x NVIDIA H100 80GB HBM3"
    assert found["CUDA"].found == "driver 595.58.03, CUDA up to 13.2"
    assert code == int(any(finding.result == "wrong" for finding in found.values()))


def test_an_old_driver_library_says_less(fake_machine: Machine) -> None:
    _, found = doctor(fake_machine("a100_80gb", old=True), READINGS="0.slowdown=0x8")
    assert found["clocks of GPU 0"].found == "hardware slowdown, 31 °C"
    assert found["ECC of GPU 0"].result == "ok"
    assert "recovery of GPU 0" not in found


@pytest.mark.parametrize(
    ("readings", "what", "text"),
    [
        ("1.ecc_errors=3", "ECC of GPU 1", "3 uncorrected errors since the driver was loaded"),
        ("0.rows_pending=1", "ECC of GPU 0", "rows of memory wait for a reset to be remapped"),
        ("0.rows_failed=1", "ECC of GPU 0", "a row of memory could not be remapped"),
        ("1.recovery=2", "recovery of GPU 1", "the driver asks for a reboot of the machine"),
        ("1.slowdown=0x60,1.temperature=92", "clocks of GPU 1", "too hot, hot, 92 °C"),
        ("1.slowdown=0x84", "clocks of GPU 1", "power brake of the machine, 31 °C"),
        ("0.fabric=3,1.fabric=2", "fabric manager", "no process nv-fabricmanager; GPU 1 in progress"),
    ],
)
def test_gpus_that_are_ill(fake_machine: Machine, readings: str, what: str, text: str) -> None:
    code, found = doctor(fake_machine("h100_80gb,h100_80gb"), READINGS=readings)
    assert (code, found[what].result, found[what].found) == (1, "wrong", text)
    assert found[what].to_do
    assert [each for each, result in without_clock(found).items() if result != "ok"] == [what]


def test_a_gpu_in_the_fabric_and_one_without_ecc(fake_machine: Machine) -> None:
    _, found = doctor(fake_machine("h100_80gb"), READINGS="0.fabric=3,0.ecc=0")
    assert set(without_clock(found).values()) == {"ok"}
    assert found["ECC of GPU 0"].found == "off"


def test_a_driver_that_refuses_is_a_finding(fake_machine: Machine) -> None:
    _, found = doctor(fake_machine("h100_80gb"), FAIL="nvmlDeviceGetCount_v2:15")
    assert "NVML answers GPU_IS_LOST (15)" in found["accelerators: driver"].found


def test_packages_against_the_driver(fake_machine: Machine, make_node: MakeNode) -> None:
    node = make_node(accelerator=h100(*WHOLE), simulate=False)
    install(node.directory.packages, "torch", "2.8.0+cu128", version=TORCH)
    install(node.directory.packages, "nvidia-cuda-runtime-cu12", "12.8.90")
    install(node.directory.packages, "cupy-cuda13x", "13.6.0")
    config = ("--config", str(node.file))
    _, found = doctor(fake_machine("h100_80gb,h100_80gb"), *config, CUDA="12040", DRIVER="550.54.15")
    assert found["CUDA of torch"].result == "ok"
    assert found["CUDA of torch"].found == (
        "driver 550.54.15, CUDA up to 12.4: enough, but for PTX that is compiled at run time"
    )
    assert found["CUDA of cupy-cuda13x"].result == "wrong"
    assert "driver 580 or later" in found["CUDA of cupy-cuda13x"].to_do
    _, found = doctor(fake_machine("h100_80gb,h100_80gb"), *config)
    assert found["CUDA of torch"].wanted == "CUDA 12.8 for torch 2.8.0+cu128"
    assert {finding.result for what, finding in found.items() if what.startswith("CUDA")} == {"ok"}
    # It did not import anything to know that.
    assert "torch" not in sys.modules


def test_gpus_and_layouts_against_the_configuration(fake_machine: Machine, make_node: MakeNode) -> None:
    machine = fake_machine("h100_80gb,h100_80gb")
    node = make_node(accelerator=h100(BIG, BIG), simulate=False)
    config = ("--config", str(node.file))
    code, found = doctor(machine, *config)
    assert code == 1
    assert found["runner"].found == "has not served this node"
    assert found["MIG layout"].found.startswith("differs on GPU 0, 1: ")
    assert machine.python("-m", "skyinfra.runner", "partition", *config).returncode == 0
    _, found = doctor(machine, *config)
    assert (found["MIG layout"].result, found["MIG layout"].wanted) == ("ok", "3g.40gb*2, 3g.40gb*2")
    _, found = doctor(fake_machine("h100_80gb"), *config)
    assert found["accelerators"].result == "wrong"
    assert found["accelerators"].wanted == "2 x H100"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_kernel_log_that_may_not_be_read_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").touch(mode=0)
    assert [f.result for f in nvidia._kernel(tmp_path)] == ["unknown"]


def test_a_simulated_node_is_well(make_node: MakeNode) -> None:
    node = make_node(accelerator=h100(BIG))
    node.boot()
    found = {finding.what: finding for finding in examine(node.file)}
    assert found["runner"].found == "ready"
    assert (found["accelerators"].result, found["MIG layout"].result) == ("ok", "ok")


XID = (
    "4,1,100,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    "4,2,200,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=12, name=python, Ch 00000008, MMU Fault\n"
    "4,3,300,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=13, name=python, Ch 00000008, MMU Fault\n"
    "6,4,400,-;usb 1-1: new device\n"
    "4,5,500,-;NVRM: Xid (PCI:0000:86:00): 999, something new\n"
)


def test_xid_errors_of_the_kernel_log(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text(XID)
    assert [(x.number, x.device, x.count, bool(x.to_do)) for x in xids(tmp_path)] == [
        (31, "0000:3b:00", 2, False),
        (79, "0000:3b:00", 1, True),
        (999, "0000:86:00", 1, True),
    ]
    found = {finding.what: finding for finding in nvidia._kernel(tmp_path)}
    assert found["Xid 79"].found == "the GPU has fallen off the bus on 0000:3b:00"
    assert found["Xid 79"].to_do == "Drain the node and replace the machine."
    assert (found["Xid 31"].result, found["Xid 999"].result) == ("ok", "wrong")


def test_the_real_kernel_log_ends() -> None:
    try:
        found = xids()
    except OSError:
        pytest.skip("the kernel's log may not be read here")
    assert isinstance(found, list)


def test_nccl_settings(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_SOCKET_IFNAME=lo # the loopback\nOTHER=1\n")
    assert [f.result for f in system._nccl({}, tmp_path)] == ["ok"]
    (tmp_path / "sys/class/infiniband/efa_0").mkdir(parents=True)
    found = list(system._nccl({"NCCL_SOCKET_IFNAME": "=nothere", "NCCL_IB_DISABLE": "1"}, tmp_path))
    assert [f.found.partition(" (")[0] for f in found if f.result == "wrong" and f.what == "NCCL settings"] == [
        f"NCCL_SOCKET_IFNAME names no interface of {found[0].found.partition(' of ')[2].partition(' (')[0]}",
        "NCCL_IB_DISABLE=1, and there is efa_0",
    ]
    assert "locked memory" in [f.what for f in found]
    assert list(system._problems({"NCCL_SOCKET_IFNAME": "^docker"}, [])) == []
    assert list(system._problems({"NCCL_SOCKET_IFNAME": "l"}, [])) == []


@pytest.mark.parametrize(
    ("given", "there", "problem"),
    [
        ("mlx5", (), "NCCL_IB_HCA=mlx5 names no device for RDMA: the machine has none"),
        ("mlx5", ("mlx5_0", "mlx5_1"), None),
        ("=mlx5_1:1,mlx5_2:1", ("mlx5_1",), None),
        ("=mlx5_1", ("mlx5_10",), "NCCL_IB_HCA==mlx5_1 names no device for RDMA: the machine has mlx5_10"),
        ("^mlx5_0", (), None),
    ],
)
def test_devices_for_rdma_that_are_asked_for(given: str, there: tuple[str, ...], problem: str | None) -> None:
    found = list(system._problems({"NCCL_IB_HCA": given}, list(there)))
    assert found == ([problem] if problem else [])


def test_a_topology_file_that_is_not_there(tmp_path: Path) -> None:
    settings = {"NCCL_TOPO_FILE": "/etc/crusoe/nccl_topo/h100.xml"}
    [found] = system._nccl(settings, tmp_path)
    assert found.result == "wrong" and found.found.startswith("NCCL_TOPO_FILE names no file")
    (tmp_path / "etc/crusoe/nccl_topo").mkdir(parents=True)
    (tmp_path / "etc/crusoe/nccl_topo/h100.xml").write_text("<system/>")
    [found] = system._nccl(settings, tmp_path)
    assert found.result == "ok"


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_FREE_GB", 1e9)
    assert system._disk("disk", tmp_path).result == "wrong"


@pytest.mark.parametrize(
    ("vendor", "files", "module", "name"),
    [
        ("aws", ("dev/neuron0", "dev/neuron1"), "neuron", "Neuron devices"),
        ("amd", ("dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129"), "amdgpu", "AMD GPUs"),
        ("intel", ("dev/accel/accel0", "dev/accel/accel1"), "habanalabs", "Gaudi cards"),
    ],
)
def test_other_accelerators(
    tmp_path: Path, make_node: MakeNode, vendor: str, files: tuple[str, ...], module: str, name: str
) -> None:
    accelerator = NodeAccelerator("X", vendor, 2)  # type: ignore[arg-type]
    config = make_node(accelerator=accelerator, simulate=False).config
    nothing = list(vendors.checks(config, None, [], tmp_path))
    assert [(f.result, f.found, f.wanted) for f in nothing] == [("wrong", f"no {name}", "2 x X")]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = {f.what: f for f in vendors.checks(config, None, [], tmp_path)}
    assert found["accelerators"].result == "ok"
    assert found[f"{name}: driver"].found == f"{module} is not loaded"
    (tmp_path / "sys/module" / module).mkdir(parents=True)
    (tmp_path / "sys/module" / module / "version").write_text("2.19.64\n")
    found = {f.what: f for f in vendors.checks(None, None, [], tmp_path)}
    assert found[f"{name}: driver"].found == f"{module} 2.19.64"


def test_torch_that_is_not_made_for_rocm(tmp_path: Path) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/kfd").touch()
    (tmp_path / "dev/dri/renderD128").touch()
    install(tmp_path / "lib", "torch", "2.8.0+cu128", version=TORCH)
    found = {f.what: f for f in vendors.checks(None, None, [str(tmp_path / "lib")], tmp_path)}
    assert found["ROCm of torch"].result == "wrong"
    install(tmp_path / "rocm", "torch", "2.8.0+rocm6.4", version="cuda = None\nhip = '6.4.43482-0f2d60242'\n")
    found = {f.what: f for f in vendors.checks(None, None, [str(tmp_path / "rocm")], tmp_path)}
    assert found["ROCm of torch"].found == "torch 2.8.0+rocm6.4 with ROCm 6.4"


def test_a_vendors_tool_that_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    tool = tmp_path / "bin/neuron-ls"
    tool.parent.mkdir()
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    for script, text in (
        ("echo '[]'", "answers"),
        ("echo no driver >&2; exit 3", "exit code 3: no driver"),
        ("sleep 30", "no answer within 0.2 s"),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setattr(vendors, "_TOOL_S", 0.2 if "sleep" in script else 20)
        found = {f.what: f for f in vendors.checks(None, None, [], tmp_path)}
        assert found["Neuron devices: neuron-ls"].found == text


def test_files_that_the_tasks_user_may_not_open_though_root_may(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(accelerator=NodeAccelerator("MI300X", "amd", 1), simulate=False)
    for file in ("dev/kfd", "dev/dri/renderD128"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch(mode=0o666)
        (tmp_path / file).chmod(0o666)
    if os.geteuid() == 0:
        os.chown(node.directory.path, 47110, 47110)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(inventory, "_TOOLS", ())

    def files() -> Finding:
        found = vendors.checks(node.config, node.directory, [], tmp_path)
        return next(finding for finding in found if finding.what == "AMD GPUs: files")

    assert files().result == "ok"
    # The compute driver's own file is as needed as that of each GPU.
    (tmp_path / "dev/kfd").chmod(0o060)
    assert (files().result, "dev/kfd" in files().found, "render" in files().to_do) == ("wrong", True, True)
    assert "dev/dri" not in files().found and "may not be opened by" in files().found


def test_tools_where_the_vendor_puts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/accel").mkdir(parents=True)
    (tmp_path / "dev/accel/accel0").touch()
    tools = tmp_path / "opt/vendor/bin"
    monkeypatch.setattr(inventory, "_TOOLS", (str(tools),))
    found = {f.what: f for f in vendors.checks(None, None, [], tmp_path)}
    assert (found["Gaudi cards: hl-smi"].result, found["Gaudi cards: hl-smi"].found) == ("unknown", "not installed")
    assert "skyinfra top" in found["Gaudi cards: hl-smi"].to_do
    vendor_files.hl_smi(tools)
    found = {f.what: f for f in vendors.checks(None, None, [], tmp_path)}
    assert (found["Gaudi cards: hl-smi"].result, found["Gaudi cards: hl-smi"].found) == ("ok", "answers")
    version = found["Gaudi cards: version of hl-smi"]
    assert (version.result, version.found.split()[2]) == ("ok", "hl-1.18.0-fw-53.1.1.1")
    vendor_files.program(tools / "hl-smi", "echo no card >&2; exit 1")
    found = {f.what: f for f in vendors.checks(None, None, [], tmp_path)}
    assert [found[f"Gaudi cards: {what}hl-smi"].result for what in ("", "version of ")] == ["wrong", "unknown"]


def test_what_packages_need(tmp_path: Path) -> None:
    install(tmp_path, "nvidia-cuda-runtime", "13.0.96")
    install(tmp_path, "jax-cuda12-plugin", "0.7.0")
    install(tmp_path, "numpy", "2.3.0")
    (tmp_path / "broken-1.0.dist-info").mkdir()
    found = packages.cuda([str(tmp_path)])
    assert [(need.package, str(need)) for need in found] == [
        ("jax-cuda12-plugin 0.7.0", "12"),
        ("nvidia-cuda-runtime 13.0.96", "13.0"),
    ]


def test_who_else_partitions_is_told_unless_that_keeps_what_stands(fake_machine: Machine, tmp_path: Path) -> None:
    machine, what, file = fake_machine("h100_80gb"), "MIG layout: others", tmp_path / "config.yaml"
    assert what not in doctor(machine)[1]
    file.write_text("version: v1\nmig-configs:\n  all-disabled:\n    - devices: all\n      mig-enabled: false\n")
    machine.mig_manager(f"MIG_PARTED_CONFIG_FILE={file} MIG_PARTED_SELECTED_CONFIG=all-disabled")
    same = doctor(machine)[1][what]
    assert (same.result, "`all-disabled`" in same.found) == ("ok", True)
    done = machine.python("-m", "skyinfra.runner", "partition", "--layout", "3g.40gb")
    assert done.returncode == 0, done.stderr
    other = doctor(machine)[1][what]
    assert (other.result, "systemctl disable nvidia-mig-manager.service" in other.to_do) == ("wrong", True)
    parted = "version: v1\nmig-configs:\n  all-disabled:\n    - devices: all\n      mig-enabled: true\n"
    file.write_text(parted + '      mig-devices: {"3g.40gb": 2}\n')
    assert doctor(machine)[1][what].result == "ok", "it is what stands"
    file.write_text(parted + '      mig-devices: {"1c.3g.40gb": 6}\n')
    assert doctor(machine)[1][what].result == "wrong", "it would end what stands"
    file.unlink()
    assert doctor(machine)[1][what].result == "wrong", "it cannot be read"
