"""What `skyinfra status` draws of live GPUs."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.color import Color, ColorSystem

from skyinfra import mig
from skyinfra.deploy.fleet_status import GpuStrip, strips
from skyinfra.deploy.transitions import GpuChange
from skyinfra.mig import Compute, palette
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import ManifestSlot
from skyinfra.submission.fleet import RunningTask
from skyinfra.terminal.drawing import _change_text, lines, style

MIXED = (("3g.40gb", 0, 4), ("2g.20gb", 4, 2), ("1g.10gb", 6, 1))
CPX = tuple(("CPX", i, 1) for i in range(8))


def on_gpus(*layouts: tuple[tuple[str, int, int], ...], accelerator: str = "H100") -> list[InstanceInfo]:
    """The slots of a node whose GPUs are divided so."""
    placed = [(gpu, place) for gpu, layout in enumerate(layouts) for place in layout]
    return [
        InstanceInfo(
            "n1",
            i,
            f"n1/{i}",
            "partition",
            "s/p",
            profile,
            accelerator,
            gpu,
            f"MIG-{i}",
            start=start,
            size=size,
            units=8,
        )
        for i, (gpu, (profile, start, size)) in enumerate(placed)
    ]


def promised(slots: list[InstanceInfo]) -> list[ManifestSlot]:
    return [ManifestSlot(s.worker, s.kind, s.accelerator, s.profile, s.gpu) for s in slots]


def drawn(*nodes: tuple[str, list[GpuStrip]]) -> list[str]:
    return [line.plain for line in lines(nodes)]


def test_a_gpu_is_a_line_with_its_free_room() -> None:
    live = on_gpus(MIXED)
    assert drawn(("n1", strips(live, promised(live)))) == [
        "n1  GPU 0  H100  |3g.40gb                        |2g.20gb        |1g.10gb|       |"
    ]


def test_gpus_that_are_alike_share_a_line() -> None:
    live = on_gpus(*[MIXED] * 3, (("7g.80gb", 0, 8),), MIXED)
    found = drawn(("n1", strips(live, promised(live))), ("node-2", strips(on_gpus(CPX, accelerator="MI300X"), [])))
    assert [line[:32] for line in found] == [
        "n1      GPU 0-2, 4  H100    |3g.",
        "n1      GPU 3       H100    |7g.",
        "node-2  GPU 0       MI300X  |CPX",
    ]
    assert found[2].endswith("|" + "CPX|" * 8)


def test_the_order_of_registration_does_not_matter() -> None:
    live = on_gpus(MIXED, MIXED)
    assert drawn(("n1", strips(reversed(live), promised(live)))) == drawn(("n1", strips(live, promised(live))))


def test_what_is_missing_is_said() -> None:
    live = on_gpus(MIXED, MIXED)
    found = drawn(("n1", strips([*live[:1], *live[3:]], promised(live))))
    assert found[0] == "n1  GPU 0  H100  |3g.40gb        |               |  2 missing"
    assert found[1].endswith("|1g.10gb|       |")
    assert strips(live[3:], promised(live))[0].gpu == 1, "a GPU of which nothing is there cannot be drawn"


@pytest.mark.parametrize("kind", ["cpu", "gpu", "chip"])
def test_whole_gpus_and_cpus_are_not_drawn(kind: str) -> None:
    whole = InstanceInfo("n1", 0, "n1/0", kind, "s/p", accelerator="H100", gpu=0)  # type: ignore[arg-type]
    assert strips([whole], [ManifestSlot(0, "gpu", "H100", None, 0)]) == []


def test_a_profile_has_one_colour_everywhere() -> None:
    nodes = [("n1", strips(on_gpus(MIXED), [])), ("n2", strips(on_gpus((("2g.20gb", 0, 2), ("2g.20gb", 2, 2))), []))]
    spans = [
        (line.plain[span.start : span.end].strip(), str(span.style)) for line in lines(nodes) for span in line.spans
    ]
    styles = dict(spans)
    assert set(styles) == {"3g.40gb", "2g.20gb", "1g.10gb"}
    assert len(set(styles.values())) == 3
    for name, found in spans:
        assert found == styles[name] == style(palette.tone(name, 4, 8))


@pytest.mark.parametrize("system", [ColorSystem.EIGHT_BIT, ColorSystem.STANDARD])
def test_a_terminal_of_few_colours_tells_profiles_apart(system: ColorSystem) -> None:
    assert len({Color.parse(tone.colour).downgrade(system).number for tone in palette.tones()}) == len(palette.tones())


def test_as_json() -> None:
    (gpu,) = strips(on_gpus(MIXED), [*promised(on_gpus(MIXED)), ManifestSlot(3, "partition", "H100", "1g.10gb", 0)])
    document = json.loads(json.dumps(gpu.to_json()))
    assert {key: document[key] for key in ("gpu", "accelerator", "units", "missing")} == {
        "gpu": 0,
        "accelerator": "H100",
        "units": 8,
        "missing": 1,
    }
    assert document["partitions"][1] == {
        "profile": "2g.20gb",
        "start": 4,
        "size": 2,
        "worker": 1,
        "uuid": "MIG-1",
        "tasks": [],
    }


def test_tasks_stand_below_their_partitions() -> None:
    live = on_gpus(MIXED, MIXED, MIXED)
    name = "evaluate_everything_there_is"
    running = {
        **{f"n1/{slot}": [RunningTask(f"train-{slot}", "train", 61.0)] for slot in (0, 3)},
        **{f"n1/{slot}": [RunningTask(f"{name}-{slot}", name, float(slot))] for slot in (1, 4)},
    }
    found = drawn(("n1", strips(live, promised(live), running)))
    assert found == [
        "n1  GPU 0-1  H100  |3g.40gb                        |2g.20gb        |1g.10gb|       |",
        "                    train                           evaluate_every…",
        "n1  GPU 2    H100  |3g.40gb                        |2g.20gb        |1g.10gb|       |",
    ]
    partitions = strips(live, promised(live), running)[0].to_json()["partitions"]
    assert partitions[0]["tasks"] == [{"key": "train-0", "name": "train", "seconds": 61.0}]


def test_a_slot_whose_place_is_not_known_is_left_out() -> None:
    (slot,) = on_gpus((("7g.80gb", 0, 8),))
    assert strips([dataclasses.replace(slot, units=None)], []) == []


def test_compute_instances_are_drawn_in_their_gpu_instance() -> None:
    whole, *ones = on_gpus((("3g.40gb", 0, 4), ("1c.3g.40gb", 4, 4), ("1c.3g.40gb", 4, 4)))
    live = [whole, *(dataclasses.replace(s, compute=Compute(i, 1), shared_by=2) for i, s in enumerate(ones))]
    tasks = {"n1/2": (RunningTask("b", "train", 3.0),), "n1/1": (RunningTask("a", "eval", 3.0),)}
    (found,) = strips(live, promised(live), tasks)
    assert drawn(("n1", [found])) == [
        "n1  GPU 0  H100  |3g.40gb        |1c.3g.40gb*2   |",
        "                                  eval, train",
    ]
    document = json.loads(json.dumps(found.to_json()))
    assert [each.get("shared_by") for each in document["partitions"]] == [None, 2, 2]
    assert document["partitions"][2]["compute"] == {"start": 1, "size": 1}
    assert "compute" not in document["partitions"][0]


def test_what_a_change_creates_is_folded_between_partitions() -> None:
    h100 = mig.geometry("h100_80gb")
    before, after = mig.place(["3g.40gb"] * 2, h100), mig.place(["1g.10gb"] * 7, h100)
    change = GpuChange("mig-0", 0, h100.model, before, after, (("mig-0/0", ("train",)),))
    shown = _change_text([change], 60).plain.splitlines()
    assert max(map(len, shown)) <= 60
    [first] = [number for number, line in enumerate(shown) if line.startswith("created")]
    assert shown[first + 1].startswith(" " * 10 + "1g.10gb at ")
