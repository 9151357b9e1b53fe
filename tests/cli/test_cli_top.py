"""``skyinfra top``: what it shows of real and of simulated slots."""

from __future__ import annotations

import io

from rich.console import Console

from skyinfra.cli.nodes import _usage_table
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.readings import Figures, Progress, SlotReading
from skyinfra.submission.fleet import RunningTask


def shown(*readings: SlotReading, progress: dict[str, Progress] | None = None) -> str:
    text = io.StringIO()
    tasks = {"n1/0": [RunningTask("train-1", "train", 3.0)]}
    Console(file=text, width=200, highlight=False).print(_usage_table({"n1": list(readings)}, tasks, progress or {}))
    return text.getvalue()


def slot(*, simulated: bool, memory_gb: float | None = 40.0) -> InstanceInfo:
    return InstanceInfo(
        node="n1",
        worker=0,
        slot="n1/0",
        kind="partition",
        fleet="a/b",
        profile="3g.40gb",
        accelerator="H100",
        memory_gb=memory_gb,
        simulated=simulated,
    )


def test_a_simulated_slot_says_so_and_has_no_columns_of_dashes() -> None:
    reading = SlotReading(
        slot(simulated=True), memory_used=0, memory_total=40 * 2**30, task="train-1", figures=Figures(3, memory_peak=0)
    )
    text = shown(reading)
    assert "H100 3g.40gb (simulated)" in text
    assert "0.0 of 40.0 GiB" in text
    assert "train 3 s (peak 0.0 GiB (simulated))" in text
    assert "TEMP" not in text and "POWER" not in text and " - " not in text


def test_the_memory_of_a_simulated_slot_is_that_of_the_catalog_where_no_driver_tells_it() -> None:
    assert "40 GB" in shown(SlotReading(slot(simulated=True)))


def test_a_task_shows_how_far_it_is() -> None:
    reading = SlotReading(slot(simulated=True))
    assert "train 3 s, 1234567 of 2000000, loss 0.3" in shown(
        reading, progress={"n1/0": Progress(1234567, 2e6, "loss 0.3")}
    )
    assert "train 3 s, 7 steps" in shown(reading, progress={"n1/0": Progress(7)})


def test_a_real_slot_shows_what_its_driver_does_not_tell() -> None:
    text = shown(SlotReading(slot(simulated=False)))
    assert "GPU TEMP" in text and "GPU POWER" in text and text.splitlines()[1].count(" - ") >= 3
    assert "simulated" not in text and "40 GB" not in text
