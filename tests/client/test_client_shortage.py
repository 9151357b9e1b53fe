"""A task whose device had no more memory: the slot, what it had taken, and what would carry it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyinfra import GangFailed
from skyinfra.client import Pool, open_pool
from skyinfra.client.script import run_script
from skyinfra.submission.snapshot import Target
from skyinfra.tasks import Task

TEXT = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 9.50 GiB of which 1.00 GiB is free. "
    "Including non-PyTorch memory, this process has 8.00 GiB memory in use."
)
HAD = "has 10 GB; the task had taken 8.59 GB (PyTorch) and asked for 4.29 GB more: 12.9 GB in all."
ADVICE = "This fleet has larger slots: n0/1 (3g.40gb, 40 GB). Ask for one: @sky.compute(gpu_memory_gb=13)."


def train(text: str) -> None:
    raise type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})(text)


@pytest.fixture
def uneven(fleets) -> Iterator[Pool]:
    """A slot with 10 GB and one with 40."""
    with open_pool(fleets(nodes=("n0",), memory=[10.0, 40.0]).manifest) as pool:
        yield pool


@pytest.mark.slow
def test_tasks_gangs_and_scripts_say_it(uneven: Pool, tmp_path: Path, wait_until) -> None:
    wait_until(lambda: len(uneven.slots()) == 2)
    with pytest.raises(RuntimeError, match="out of memory") as error:
        uneven.send(Task(train, (TEXT,), {}), Target(slot="n0/0")).result(60)
    assert error.value.__notes__ == [f"Slot n0/0 (3g.40gb of H100) {HAD}", ADVICE]

    with pytest.raises(RuntimeError) as larger:
        uneven.send(Task(train, (TEXT,), {}), Target(slot="n0/1")).result(60)
    assert "No slot of this fleet has 41 GB" in larger.value.__notes__[1]
    assert "The cheapest offer" in larger.value.__notes__[1]

    # Those that travel together have the same way back.
    with pytest.raises(RuntimeError) as mapped:
        list(uneven.map(train, [TEXT] * 3))
    assert len(mapped.value.__notes__) == 3  # with the number of the item

    with pytest.raises(RuntimeError) as ranks:
        uneven.launch(train, TEXT, framework="none", nodes=1, per_node=1)
    # The rank may have stood on either slot.
    slot, advice = ranks.value.__notes__[:2]
    assert slot.startswith("Slot n0/") and (" of this fleet has 41 GB" in advice or advice == ADVICE)

    script = tmp_path / "train.py"
    script.write_text(f"raise RuntimeError('{TEXT}')")
    with pytest.raises(GangFailed) as gang:
        uneven.launch(script, framework="none", nodes=1, per_node=1)
    assert gang.value.hint is not None and gang.value.hint.startswith("Slot n0/")

    script.write_text(f"import sys; print('epoch'); sys.exit('torch.OutOfMemoryError: {TEXT}')")
    lines: list[tuple[str, str]] = []
    assert run_script(uneven, script, on_line=lambda *line: lines.append(line)) == 1
    assert [stream for stream, _ in lines] == ["stdout", "stderr", "stderr", "stderr"]
    assert (lines[2][1].startswith("Slot n0/") and "of this fleet" in lines[3][1]) or "larger slots" in lines[3][1]
