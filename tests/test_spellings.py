"""Every spelling of the documents that the project was created from works, or its error names what is written here."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import skyinfra as sky
from skyinfra.errors.peers import meant
from skyinfra.protocol.instance import VARIABLE, InstanceInfo
from skyinfra.terminal import help as helping

FILE = Path(__file__).parent / "spellings.toml"
SEEDS = Path(__file__).parents[2] / "shared" / "seeds"
LINES = [(each["code"], each.get("says", "")) for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["lines"]]


@sky.compute
def train() -> None:
    """A task of the lines."""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the lines use: in a task, with a folder for checkpoints, and a pool as it is declared there."""
    slot = InstanceInfo("n0", 0, "n0/0", "partition", "lab/mig", "3g.40gb", "H100", 0, "MIG-0")
    monkeypatch.setenv(VARIABLE, json.dumps(slot.to_json()))
    pool = sky.ComputePool(provider=sky.AWS(), accelerator="H100")
    return {"sky": sky, "folder": str(tmp_path / "checkpoints"), "train": train, "pool": pool}


@pytest.mark.parametrize(("code", "says"), LINES, ids=[code for code, _ in LINES])
def test_each_line_works_or_its_error_says_what_to_write(code: str, says: str, names: dict[str, Any]) -> None:
    if not says:
        eval(code, names)
        return
    with pytest.raises((sky.SkyinfraError, AttributeError)) as refused:
        eval(code, names)
    sentence = [line for line in str(refused.value).splitlines() if says in line]
    assert len(sentence) == 1 and re.search(r"\b(is|It is|is part of)\b", sentence[0]), refused.value


def test_the_lines_are_many_and_each_is_there_once() -> None:
    assert len(LINES) > 120 and len(set(LINES)) == len(LINES)


def calls(document: str) -> Iterator[str]:
    """The outermost calls of the libraries in the code of *document*, and tasks that are sent to a pool."""
    for block in re.findall(r"```python\n(.*?)```", document, re.DOTALL):
        yield from re.findall(r"\w+\(\) @ \w+", block)
        end = 0
        for begin in re.finditer(r"\b(?:sky|app|modal)\.[\w.]+\(", block):
            if begin.start() < end:
                continue
            for close in re.finditer(r"\)", block[begin.start() :]):
                with suppress(SyntaxError):
                    yield ast.unparse(ast.parse(block[begin.start() :][: close.end()], mode="eval"))
                    end = begin.start() + close.end()
                    break


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents do not lie beside the checkout")
def test_every_call_of_the_documents_is_one_of_the_lines() -> None:
    ours = [re.sub(r"\bsky\.(compute|cls)\(", "app.(", ast.unparse(ast.parse(code))) for code, _ in LINES]
    theirs = [call for file in sorted(SEEDS.glob("*.txt")) for call in calls(file.read_text(encoding="utf-8"))]
    assert len(theirs) > 60
    spelled = {call: re.sub(r"\bapp\.(function|cls)\(", "app.(", call).replace("modal.", "sky.") for call in theirs}
    assert [call for call, code in spelled.items() if not any(f"{line}.".startswith(f"{code}.") for line in ours)] == []


def test_what_is_named_instead_can_be_written(tmp_path: Path) -> None:
    checkpoints = sky.SpotCheckpointer(path=tmp_path)
    checkpoints.save({"model": {}, "optimizer": {}, "epoch": 3}, 100)
    assert checkpoints.load_latest() == ({"model": {}, "optimizer": {}, "epoch": 3}, 100)
    assert not sky.interrupted()
    accelerator = sky.accelerators.A100(memory="40GB")
    assert accelerator.memory == "40GB" and sky.accelerators.A100(memory=accelerator.memory) == accelerator


@pytest.mark.parametrize(
    ("word", "command"),
    [("up", "deploy"), ("down", "destroy"), ("ps", "status"), ("version", "--version"), ("show-gpus", "offers")],
)
def test_commands_of_others_lead_to_ours(word: str, command: str) -> None:
    assert meant(word, "skyinfra", None) == f"It is, here: skyinfra {command}"


def test_no_command_of_ours_is_said_to_be_another_tools() -> None:
    assert [name for group in helping.GROUPS.values() for name in group if meant(name, "skyinfra", None)] == []
