"""Progress bars of tqdm in the output of a task."""

from __future__ import annotations

import io

import tqdm

from skyinfra.program.bars import Bars
from skyinfra.worker.streaming import Lines


class Shown:
    """What a client gets of output: the lines that stay, and how far the bar is."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float | None, str]] = []
        self._bars, self._lines = Bars(lambda *step: self.steps.append(step)), Lines()

    def lines(self, text: str) -> list[str]:
        return self._bars.kept(self._lines.feed(text.encode(), final=True), final=True)


def test_a_bar_is_its_last_line_and_its_steps_are_told() -> None:
    out, shown = io.StringIO(), Shown()
    for _ in tqdm.tqdm(range(50), "train", file=out, mininterval=0):
        pass
    assert out.getvalue().count("\r") > 50
    (line,) = shown.lines(out.getvalue() + "done\n")[:-1]
    assert line.startswith("train: 100%|") and "| 50/50 [" in line
    assert shown.steps[0][:2] == (0, 50) and shown.steps[-1][:2] == (50, 50) and len(shown.steps) > 50
    assert all(note.startswith("train") for _, _, note in shown.steps)


def test_bars_within_bars_are_one_bar() -> None:
    out, shown = io.StringIO(), Shown()
    for _ in tqdm.tqdm(range(5), "epoch", file=out, mininterval=0):
        for _ in tqdm.tqdm(range(20), "batch", file=out, mininterval=0, leave=False, position=1):
            pass
    lines = shown.lines(out.getvalue())
    assert len(lines) == 2 and [line[:11] for line in lines] == ["batch: 100%", "epoch: 100%"]
    assert {total for _, total, _ in shown.steps} == {5}
    assert any("(batch 7 of 20)" in note for _, _, note in shown.steps)


def test_a_bar_that_clears_its_line_leaves_none() -> None:
    out, shown = io.StringIO(), Shown()
    bar = tqdm.tqdm(total=9, file=out, mininterval=0, leave=False)
    bar.update(3)
    bar.close()
    assert shown.lines(out.getvalue() + "done\n") == ["done"]


def test_a_bar_that_does_not_end_is_shown_as_it_is() -> None:
    out, shown = io.StringIO(), Shown()
    bar = tqdm.tqdm(total=2_500_000, file=out, mininterval=0, unit_scale=True)
    bar.update(1_000_000)
    assert "1.00M/2.50M" in shown.lines(out.getvalue())[-1]
    assert shown.steps[-1][:2] == (1e6, 2.5e6)
    counted, shown = io.StringIO(), Shown()
    for _ in tqdm.tqdm(iter(range(9)), file=counted, mininterval=0):
        pass
    assert len(shown.lines(counted.getvalue())) == 1 and shown.steps[-1][:2] == (9, None)


def test_other_output_stays_as_it_is() -> None:
    text = "loss 3 [a]\n\n  10% done\nfound 5it [maybe\n50%|50%\n \x1b[1mbold\x1b[0m\n"
    shown = Shown()
    assert shown.lines(text) == text.splitlines() and shown.steps == []
    assert shown.lines("a\rb\n") == ["a", "b"]
    text = "took: 3s [train]\ntook: 4s [train]\nsaved: 12MB [00]\n"
    assert shown.lines(text) == text.splitlines() and shown.steps == []
