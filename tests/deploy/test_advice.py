"""The advice for a fleet: records of tasks become a trace, and a person reads what to declare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from front_ends.schemas import valid
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra import mig
from skyinfra.accelerators import Accelerator
from skyinfra.cli import layouts
from skyinfra.cli.app import app
from skyinfra.deploy import advice
from skyinfra.errors import TooLittleMeasured
from skyinfra.protocol.readings import Figures, TaskRecord

GB = 10**9
H100 = mig.geometry("h100_80gb")
BEGIN = 1_790_000_000.0


def record(number: int = 0, *, every: float = 20.0, **fields: object) -> TaskRecord:
    """A task of a minute on a whole GPU, which waited for ten seconds and used 6 GB."""
    at = BEGIN + number * every
    base = TaskRecord(f"train-{number}", at, at + 10, at + 70, "n1/0", None, 0.0, None, 80.0, Figures(30, 58.0, 6 * GB))
    return replace(base, **fields)  # type: ignore[arg-type]


def traced(each: TaskRecord) -> mig.TraceTask:
    (task,) = advice.trace_of([each], H100)
    return task


def test_what_a_task_needs() -> None:
    assert traced(record()) == mig.TraceTask(0.0, 60.0, None, pytest.approx(6.6), 0.0)
    assert traced(record(memory_gb=20.0)).memory_gb == 20.0, "what it asks for, where that is more"
    assert traced(record(memory_gb=5.0)).memory_gb == pytest.approx(6.6)
    assert traced(record(figures=None)).memory_gb == 0.0, "not known"
    assert traced(record(figures=Figures(1))).memory_gb == 0.0, "the device tells nothing"
    full = record(slot_profile="1g.10gb", slot_memory_gb=10.0, figures=Figures(30, 58.0, 10 * GB))
    assert traced(full).memory_gb == 10.0, "it ran there"
    assert traced(record(profile="3g.39gb")).profile == "3g.40gb", "by another driver's name"
    assert traced(record(profile="9g.90gb")).profile == "9g.90gb"


def test_the_slices_that_a_task_keeps_busy() -> None:
    busy = Figures(30, 58.0, 6 * GB, activity={"sm": 50.0})
    assert traced(record(figures=busy)).compute == 3.5, "of a whole GPU"
    assert traced(record(figures=busy, slot_profile="3g.40gb", slot_memory_gb=40.0)).compute == 1.5
    assert traced(record(figures=busy, slot_memory_gb=None)).compute == 0.0, "nobody knows where it ran"


def test_of_a_compute_instance_it_is_not_known_what_its_task_used() -> None:
    # The device tells what all tasks in the GPU instance use together.
    busy = Figures(30, 58.0, 36 * GB, activity={"sm": 50.0})
    shared = record(figures=busy, slot_profile="1c.3g.40gb", slot_memory_gb=40.0)
    assert (traced(shared).memory_gb, traced(shared).compute) == (0.0, 0.0)
    assert traced(replace(shared, memory_gb=12.0)).memory_gb == 12.0, "what it asks for"
    found = advice.advice_of("s/p", [record(i) for i in range(40)] + [shared], Accelerator.parse("H100:1"), nodes=1)
    assert (found.measured, found.reserved, found.advice.unknown) == (40, 0, 1)


def test_the_advice_for_a_fleet() -> None:
    records = [record(i, every=5) for i in range(40)] + [record(40, every=5, figures=None)]
    records += [record(41, every=5, slot_memory_gb=40.0, slot_profile="3g.40gb", figures=Figures(30, 58.0, 39 * GB))]
    found = advice.advice_of("s/p", records, Accelerator.parse("H100:1"), nodes=2)
    assert (found.fleet, found.measured, found.reserved, found.advice.unknown) == ("s/p", 41, 1, 1)
    assert (found.first, found.last) == (BEGIN, BEGIN + 41 * 5 + 70)
    assert found.silent == 1, "the one with 39 GB asks for nothing"
    assert found.advice.declared.layouts == ("off",)
    assert found.advice.declared.wait > found.advice.advised.wait
    document = json.loads(json.dumps(found.to_json()))
    assert (document["declaration"], document["keeps"]) == (found.advice.declaration, False)
    assert "trace" not in document


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = [record(i) for i in range(40)]
    accelerator = Accelerator.parse("H100:2/7g.80gb")
    monkeypatch.setattr(layouts, "_deployed", lambda fleet: (SimpleNamespace(fleet=fleet), {}, accelerator))
    monkeypatch.setattr(layouts, "advice", lambda manifest, each: advice.advice_of(manifest.fleet, records, each, 1))
    file = tmp_path / "trace.csv"
    shown = CliRunner().invoke(app, ["mig", "advise", "s/p", "--save", str(file)], catch_exceptions=False)
    assert shown.exit_code == 0
    found = mig.advise(file, H100, gpus=2, declared="7g.80gb")
    assert f"    {found.declaration}\n" in shown.stdout
    for words in ("s/p: 40 tasks in 14m", "the memory of 40 was measured", "All ", "advised", "declared", "whole GPUs"):
        assert words in shown.stdout, words
    assert "2x 7g.80gb*1" in shown.stdout
    told = CliRunner().invoke(app, ["mig", "advise", "s/p", "--json"], catch_exceptions=False)
    document = valid("mig-advise", told.stdout)
    assert (document["declaration"], document["measured"]) == (found.declaration, 40)
    assert document["declared"]["wait"] > document["advised"]["wait"]
    # What is pasted is a declaration.
    argument = eval(found.declaration.removeprefix("mig="), {"sky": sky})
    assert str(sky.accelerators.H100(count=2, mig=argument)).startswith("H100:2/")
    records[:] = [record(i, figures=None) for i in range(40)]
    with pytest.raises(TooLittleMeasured, match="known for 0% of their time") as refused:
        CliRunner().invoke(app, ["mig", "advise", "s/p"], catch_exceptions=False)
    assert refused.value.exit_code == 1


def test_a_layout_that_waits_as_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator.parse("H100:1/1g.10gb*7")
    monkeypatch.setattr(layouts, "_deployed", lambda fleet: (SimpleNamespace(fleet=fleet), {}, accelerator))
    records = [record(i) for i in range(40)]
    monkeypatch.setattr(layouts, "advice", lambda manifest, each: advice.advice_of(manifest.fleet, records, each, 1))
    shown = CliRunner().invoke(app, ["mig", "advise", "s/p"], catch_exceptions=False)
    assert "Keep what is declared: no other layout makes tasks wait noticeably less." in shown.stdout
    assert "mig=" not in shown.stdout
