"""The runner measures the tasks: memory high-water, energy and activity, up to the record of a job."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml.fake_machine import FakeMachine
from local_fleets.running_node import BIG, RunningNode, h100, until
from tasks_on_nodes.jobs import manifest_of, wait_for
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol import instance
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.readings import Figures, SlotReading
from skyinfra.readings import figures
from skyinfra.readings.figures import TaskFigures
from skyinfra.worker import attempts

Machine = Callable[..., FakeMachine]
MIB = 2**20


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeDirectory]:
    """The node's folder, of which this process is the worker of slot 1."""
    slot = InstanceInfo("n1", 1, "n1/1", "partition", "s/p")
    monkeypatch.setenv(instance.VARIABLE, json.dumps(slot.to_json()))
    monkeypatch.setenv(instance.NODE_DIRECTORY, str(tmp_path))
    attempts._note_of.cache_clear()
    yield NodeDirectory(tmp_path)
    attempts._note_of.cache_clear()


def reading(worker: int = 1, **fields: object) -> SlotReading:
    slot = InstanceInfo("n1", worker, f"n1/{worker}", "partition", "s/p")
    return SlotReading(slot, **{"share": 0.5, **fields})  # type: ignore[arg-type]


def test_a_worker_notes_which_task_runs_on_its_slot(directory: NodeDirectory) -> None:
    assert attempts.running(directory.path) == {}
    with attempts.counted("a-long-name-00ff", "a"):
        assert attempts.running(directory.path) == {1: "a-long-name-00ff"}
        with attempts.counted("b-1", "b"):
            assert attempts.running(directory.path) == {1: "b-1"}, "a shorter key leaves nothing of a longer one"
    assert attempts.running(directory.path) == {}
    with pytest.raises(ValueError, match="its own"), attempts.counted("c-1", "c"):
        raise ValueError("its own")
    assert attempts.running(directory.path) == {}


def test_a_task_whose_process_has_died_does_not_run(directory: NodeDirectory) -> None:
    (directory.path / "running").mkdir()
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    (directory.path / "running/0").write_text(f"{gone} a-1\n")
    (directory.path / "running/1").write_text(f"{os.getpid()} b-1\n")
    (directory.path / "running/2").write_text(f"{os.getpid()} half-writ")
    (directory.path / "running/3").write_bytes(b"\xff \n")
    assert attempts.running(directory.path) == {1: "b-1"}


def test_a_key_that_is_too_long_and_a_disk_that_is_full_keep_no_task_from_running(
    directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attempts._noted("a" * 5000):
        assert attempts.running(directory.path) == {}
    attempts._note_of.cache_clear()
    (directory.path / "running/1").unlink()
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    with attempts._noted("a-1"):
        assert attempts.running(directory.path) == {}


def test_a_process_without_a_slot_notes_nothing(directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(instance.VARIABLE)
    with attempts.counted("a-1", "a") as starts:
        assert (starts, attempts.running(directory.path)) == (1, {})


def test_figures_are_the_highest_memory_the_energy_and_the_mean_activity(directory: NodeDirectory) -> None:
    readings = iter(
        [
            reading(memory_used=5 * MIB, energy=100.0, activity={"sm": 10.0}),
            reading(memory_used=9 * MIB, energy=104.0, activity={"sm": 20.0, "tensor": 6.0}),
            reading(memory_used=2 * MIB, energy=110.0),
        ]
    )
    measured = TaskFigures(directory, lambda: [reading(0, memory_used=1), next(readings)])
    with attempts.counted("a-1", "a"):
        measured.sample()
        assert measured.of("a-1") == Figures(1, memory_peak=5 * MIB, activity={"sm": 10.0}).to_json(), "no energy yet"
        measured.sample()
        measured.sample()
        assert figures.published(directory)[1]["task"] == "a-1"
    measured.sample()
    found = Figures.read(measured.of("a-1"))
    assert (found.samples, found.memory_peak, found.energy) == (3, 9 * MIB, 5.0)
    assert found.activity == {"sm": 15.0, "tensor": 6.0}
    assert figures.published(directory) == {}, "it has ended"
    assert measured.of("b-1") is None


def test_a_task_that_ends_while_it_is_measured_does_not_get_the_reading(directory: NodeDirectory) -> None:
    scope = attempts.counted("a-1", "a")
    scope.__enter__()

    def measure() -> list[SlotReading]:
        scope.__exit__(None, None, None)
        return [reading(memory_used=5)]

    measured = TaskFigures(directory, measure)
    measured.sample()
    assert measured.of("a-1") is None


def test_a_device_that_tells_nothing_gives_no_figures(directory: NodeDirectory) -> None:
    measured = TaskFigures(directory, lambda: [reading(temperature=30)])
    with attempts.counted("a-1", "a"):
        measured.sample()
    assert measured.of("a-1") is None


def test_nothing_is_measured_while_nothing_runs(directory: NodeDirectory) -> None:
    directory.figures_file.write_text('{"1": {"task": "old-1", "figures": {"samples": 1}}}')
    measured = TaskFigures(directory, lambda: pytest.fail("NVML is left alone"))
    measured.sample()
    assert figures.published(directory) == {}, "those of an earlier runner are gone"


def test_old_tasks_are_forgotten(directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_KEPT", 2)
    measured = TaskFigures(directory, lambda: [reading(memory_used=5)])
    for key in ("a-1", "b-1", "c-1"):
        with attempts.counted(key, "f"):
            measured.sample()
    assert [measured.of(key) is None for key in ("a-1", "b-1", "c-1")] == [True, False, False]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"x": 1}', '{"1": {"task": "a"}}', '{"1": {"task": 1, "figures": 2}}']
)
def test_a_file_that_is_no_figures(directory: NodeDirectory, text: str) -> None:
    directory.figures_file.write_text(text)
    assert figures.published(directory) == {}


@pytest.mark.slow
def test_the_record_of_a_job_has_them(
    fake_machine: Machine, make_node: Callable[..., RunningNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, told = fake_machine("h100_80gb"), tmp_path / "readings"
    told.write_text("0.energy=1000000,0/0.used=700,0/4.used=700,0/0.sm=40,0/4.sm=40")
    for name, value in machine.environment(READINGS=f"@{told}").items():
        monkeypatch.setenv(name, value)
    node = make_node(accelerator=h100(BIG), simulate=False)
    node.boot()
    manifest, gate = tmp_path / "fleet.json", tmp_path / "gate"
    manifest.write_text(json.dumps(manifest_of(node).to_json()))
    with sky.connect(str(manifest)) as pool:
        job = pool.submit(wait_for, str(gate), detach="measured")
        until(lambda: figures.published(node.directory), "its first reading", seconds=20)
        told.write_text("0.energy=15000000,0/0.used=9000,0/4.used=9000,0/0.sm=60,0/4.sm=60")
        until(
            lambda: any(
                each["figures"].memory_peak == 9000 * MIB for each in figures.published(node.directory).values()
            ),
            "9000 MiB",
        )
        shown = CliRunner().invoke(app, ["top", str(manifest)], catch_exceptions=False)
        assert "peak 8.8 GiB" in shown.stdout
        assert "skyinfra_task_memory_peak_bytes" in node.run("metrics", "--once").stdout
        Path(f"{gate}.open").touch()
        job.result(timeout=60)
        (info,) = [each for each in pool.jobs() if each.name == "measured"]
    assert info.figures is not None
    assert (info.figures.samples >= 2, info.figures.memory_peak) == (True, 9000 * MIB)
    # 14 kJ of the whole GPU, of which a 3g has three sevenths.
    assert info.figures.energy == pytest.approx(6000.0)
    assert 40 <= info.figures.activity["sm"] <= 60
    # Those of a simulated fleet say so.
    for simulated, shown in ((True, r"\(simulated\)"), (False, " ")):
        manifest.write_text(json.dumps(replace(manifest_of(node), simulated=simulated).to_json()))
        listed = CliRunner().invoke(app, ["jobs", str(manifest)], catch_exceptions=False)
        assert re.search(rf"peak 8\.8 GiB, 6\.0 kJ, busy \d+ % {shown}", listed.stdout)
