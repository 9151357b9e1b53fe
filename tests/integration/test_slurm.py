"""The job that `skyinfra render --format sbatch` writes, run by Slurm: a fleet of two nodes, whose end is orderly."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from clusters import slurm as slurm_cluster
from clusters.slurm import Slurm
from devices.capability_files import list_capabilities
from devices.nvml_worlds import Fake
from fake_nvml.fake_machine import FakeMachine
from local_fleets.running_node import until
from support import ROOT

import skyinfra as sky
from skyinfra.client.lookup import wait_until_ready
from skyinfra.gpu import exports
from skyinfra.gpu.hardware import session
from skyinfra.gpu.nvml import Nvml
from skyinfra.protocol.manifest import Manifest

POOL = """
import skyinfra as sky
from cdktf import App
app = App()
sky.FleetStack(app, "lab", pools=[
    sky.ComputePool(name="mig", nodes=2, provider=sky.Local(simulate=True), accelerator="H100/3g.40gb*2"),
    sky.ComputePool(name="gpu", nodes=2, provider=sky.Local(), accelerator="H100:1"),
])
app.synth()
"""
# Two clusters number their jobs alike, and tests find processes and folders of a job by its number.
pytestmark = pytest.mark.xdist_group("slurm")
SLOTS = ["mig-0/0", "mig-0/1", "mig-1/0", "mig-1/1"]
# A runner and its packages are installed in jobs: a machine with other work takes minutes for it.
PATIENCE_S = 600.0


@pytest.fixture(autouse=True)
def _needs_terraform() -> None:
    """Terraform has no part in this."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of two nodes, with the rendered job in its folder. Where it cannot run: a failure under CI."""
    if (why := slurm_cluster.unusable()) is not None:
        if os.environ.get("CI"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    project = tmp_path_factory.mktemp("project")
    (project / "main.py").write_text(POOL)
    (project / "cdktf.json").write_text(json.dumps({"app": f"{sys.executable} main.py"}))
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster.running(folder, "n1", "n2") as cluster:
        render = [sys.executable, "-m", "skyinfra.cli", "render", str(project), "--format", "sbatch"]
        subprocess.run([*render, "--out", str(folder / "jobs")], check=True, capture_output=True)
        yield cluster


class Job:
    """The job of the fleet, submitted with *variables*, and ended with the block."""

    def __init__(self, slurm: Slurm, *options: str, pool: str = "mig", **variables: str) -> None:
        self.slurm = slurm
        known = {"SKYINFRA_VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
        self.id = slurm.run("sbatch", "--parsable", *options, f"lab-{pool}.sbatch", **(known | variables))
        self.folder = slurm.folder / "jobs" / f"skyinfra-{self.id}"
        self.manifest_file = self.folder / "manifest.json"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.slurm.run("scancel", "--signal=KILL", "--full", self.id, check=False)
        self.slurm.run("scancel", self.id, check=False)
        self.ended()

    def ready(self) -> Manifest:
        """The manifest, once every slot takes tasks."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.manifest_file.exists():
            assert time.monotonic() < deadline, self.slurm.log(self.id)
            assert self.slurm.state(self.id) not in ("FAILED", "COMPLETED", "CANCELLED"), self.slurm.log(self.id)
            time.sleep(0.3)
        manifest = Manifest.load(self.manifest_file)
        wait_until_ready(manifest, patience=PATIENCE_S, on_change=lambda _: None)
        return manifest

    def ended(self) -> str:
        """The last state of the job, once nothing of it is left."""
        states = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        until(lambda: self.slurm.state(self.id) not in states, "the job has ended", seconds=PATIENCE_S)
        until(lambda: not self.processes(), "its processes have ended")
        return self.slurm.state(self.id)

    def processes(self) -> list[psutil.Process]:
        """All processes of the job."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURM_JOB_ID") == self.id:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def own_folders(self) -> list[Path]:
        """The folders of its nodes on their own disks."""
        return list(Path(tempfile.gettempdir()).glob(f"skyinfra-{self.id}-*"))


@sky.compute
def where() -> str:
    return sky.instance_info().slot


@sky.compute
def until_told(marks: str) -> str:
    """Ends by itself some seconds after it is informed."""
    Path(marks, sky.instance_info().slot.replace("/", "-")).touch()
    while not sky.interrupted():
        time.sleep(0.05)
    time.sleep(5)
    told = sky.interruption()
    return told.why if told is not None else ""


@sky.compute
def until_let(path: str) -> str:
    Path(f"{path}.runs").touch()
    while not Path(path).exists():
        time.sleep(0.1)
    return "let through"


def test_a_task_on_every_slot_and_an_orderly_end(slurm: Slurm, tmp_path: Path) -> None:
    with Job(slurm) as job:
        manifest = job.ready()
        assert stat.S_IMODE(job.manifest_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(job.folder.stat().st_mode) == 0o700
        assert [(node.name, node.id, node.head) for node in manifest.nodes] == [
            ("mig-0", "n1", True),
            ("mig-1", "n2", False),
        ]
        assert (manifest.provider, manifest.simulated) == ("slurm", True)
        with sky.connect(job.manifest_file, output=False) as pool:
            assert sorted(where() @ pool) == SLOTS
            shown = [" ".join(process.cmdline()) for process in job.processes()]
            assert len(shown) > 8
            assert not [line for line in shown if manifest.secret in line]
            assert manifest.secret not in (slurm.folder / "jobs" / "lab-mig.sbatch").read_text() + slurm.log(job.id)
            futures = pool.spread(until_told(str(tmp_path)))
            until(lambda: len(list(tmp_path.iterdir())) == len(SLOTS), "a task runs on every slot")
            began = time.monotonic()
            slurm.run("scancel", job.id)
            assert [future.result(timeout=30) for future in futures] == ["the node is asked to end"] * len(SLOTS)
        assert job.ended() == "CANCELLED"
        assert time.monotonic() - began < slurm_cluster.KILL_WAIT_S
        assert job.own_folders() == []
        assert not job.folder.exists()


@pytest.mark.slow
def test_the_time_limit_and_a_job_that_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    """Before the time limit Slurm tells the script of the job alone; a requeued job goes on with its detached tasks."""
    with Job(slurm, "--requeue") as job:
        manifest = job.ready()
        with sky.connect(job.manifest_file, output=False) as pool:
            detached = pool.submit(until_let(str(tmp_path / "open")), detach="first")
            until((tmp_path / "open.runs").exists, "the detached task runs")
            slurm.run("scontrol", "requeue", job.id)
        until(lambda: not job.manifest_file.exists(), "the first run has ended", seconds=60)
        until(lambda: slurm.state(job.id) == "PENDING", "it is requeued")
        # Slurm lets a requeued job wait for two minutes.
        slurm.run("scontrol", "update", f"JobId={job.id}", "StartTime=now")
        again = job.ready()
        assert again.secret != manifest.secret
        (tmp_path / "open").touch()
        with sky.connect(job.manifest_file, output=False) as pool:
            assert pool.job(detached.name).result(timeout=60) == "let through"
            futures = pool.spread(until_told(str(tmp_path)))
            until(lambda: len(list(tmp_path.glob("mig-*"))) == len(SLOTS), "a task runs on every slot")
            slurm.run("scancel", "--batch", "--signal=TERM", job.id)
            assert [future.result(timeout=30) for future in futures] == ["the node is asked to end"] * len(SLOTS)
        assert job.ended() == "COMPLETED"
        assert job.own_folders() == []


@pytest.mark.slow
def test_the_job_installs_the_runner_and_says_what_it_lacks(slurm: Slurm) -> None:
    with Job(slurm, SKYINFRA_VENV="", SKYINFRA_PYTHON="no-such-python", PYTHONPATH="") as job:
        assert job.ended() == "FAILED"
        assert "there is no no-such-python on " in slurm.log(job.id)
        assert not job.folder.exists()
    with Job(slurm, SKYINFRA_VENV="", SKYINFRA_PYTHON=sys.executable, PYTHONPATH="") as job:
        job.ready()
        assert any(str(job.folder / "venv") in " ".join(process.cmdline()) for process in job.processes())
        with sky.connect(job.manifest_file, output=False) as pool:
            assert sorted(where() @ pool) == SLOTS


@sky.compute
def device() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
def test_slots_stand_on_the_gpus_that_the_job_was_given(slurm: Slurm, fake_machine: Callable[..., FakeMachine]) -> None:
    """Two jobs have one of the two GPUs of each node; the driver shows both to either."""
    machine = fake_machine("h100_80gb,h100_80gb")
    driver = {"LD_LIBRARY_PATH": str(machine.library), **machine.variables()}
    with machine.loaded():
        uuids = {gpu.uuid for gpu in Fake(machine).nvml().gpus()}
    with Job(slurm, pool="gpu", **driver) as one, Job(slurm, pool="gpu", **driver) as other:
        seen = []
        for job in (one, other):
            job.ready()
            with sky.connect(job.manifest_file, output=False) as pool:
                seen.append(set(device() @ pool))
        # The nodes are one machine, whose GPUs have the same numbers on both.
        assert [len(each) for each in seen] == [1, 1]
        assert seen[0] | seen[1] == uuids
    with Job(slurm, "--gpus-per-node=2", pool="gpu", **driver) as job:
        assert job.ended() == "FAILED"
        assert "declared 1 x H100, and this node was given 2 x H100" in slurm.log(job.id)


@pytest.mark.slow
def test_slurmd_reads_the_lines_of_a_node(fake_machine: Callable[..., FakeMachine], tmp_path: Path) -> None:
    """`partition --export --format gres`: Slurm finds each device with its files, and as many as the text says."""
    if shutil.which("slurmd") is None:
        pytest.skip("slurmd of Slurm is missing: `make debian` installs it")
    machine = fake_machine("h100_80gb,h100_80gb")
    layout = ("-m", "skyinfra.runner", "partition", "--layout", "3g.40gb+1g.10gb+me+1g.10gb", "--gpu", "1")
    assert machine.python(*layout).returncode == 0
    list_capabilities(machine, tmp_path)
    with machine.loaded(), session(Nvml()) as nvml:
        text, _ = exports.gres(nvml, root=tmp_path)
    for file in re.findall(r"/dev/[^ ,]+", text):
        made = tmp_path / file.lstrip("/")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.unlink(missing_ok=True)
        made.symlink_to("/dev/null")  # slurmd wants a device
    (tmp_path / "gres.conf").write_text(text.replace("/dev/", f"{tmp_path}/dev/"))
    (gres,) = re.findall(r"Gres=(\S+)$", text, re.MULTILINE)
    (tmp_path / "slurm.conf").write_text(slurm_cluster.one_node(tmp_path, gres))
    done = subprocess.run(
        ["slurmd", "-G", "-N", "n1", "-f", str(tmp_path / "slurm.conf")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told = done.stdout + done.stderr
    assert "error" not in told.replace(str(tmp_path), ""), told
    found = re.findall(r"Gres Name=gpu Type=(\S+) Count=1 .*File=(\S+)", told)
    wanted = re.findall(r"^Name=gpu Type=(\S+) \w+=(\S+)", text.replace("/dev/", f"{tmp_path}/dev/"), re.MULTILINE)
    assert sorted(found) == sorted(wanted)
    assert len(found) == 4
