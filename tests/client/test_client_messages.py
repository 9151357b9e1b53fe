"""Mistakes with tasks and pools, and the words that answer them; the surroundings of tasks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tasks_on_nodes.gangs import surroundings

import skyinfra as sky
from skyinfra.client import open_questions
from skyinfra.submission import watching
from skyinfra.submission.watching import Watcher
from skyinfra.tasks import Task


@sky.compute
def double(x: int) -> int:
    return 2 * x


def plain(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda pool: plain(1) >> pool, "this is int: the function that gave it has run here.*@sky.compute.* >> pool"),
        (lambda pool: plain(1) @ pool, "this is int.* @ pool"),
        (lambda pool: plain >> pool, r"plain is a plain function: decorate it with @sky.compute.*plain\(...\) >> pool"),
        (lambda pool: plain @ pool, r"plain is a plain function.* plain\(...\) @ pool"),
        (lambda pool: [double(1)] >> pool, r"sky.gather\(\*tasks\) >> pool"),
        (lambda pool: sky.gather(double(1)) @ pool, r"write sky.gather\(...\) >> pool"),
    ],
)
def test_what_is_no_task(pool: Any, mistake: Callable[[Any], Any], says: str) -> None:
    for each in (pool, sky.AsyncPool(pool)):
        with pytest.raises(TypeError, match=says):
            mistake(each)


class Array:
    """As numpy's arrays: it takes the operator itself, unless the other one does not take part."""

    def __rshift__(self, other: Any) -> Any:
        return NotImplemented if getattr(other, "__array_ufunc__", 0) is None else "element by element"


def test_an_array_is_no_task(pool: Any) -> None:
    with pytest.raises(TypeError, match="this is Array"):
        Array() >> pool


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: sky.compute(timout=3), r"timout: no option of @sky.compute\nDid you mean timeout\?"),
        (lambda: sky.compute(timeout="3"), r"timeout: expected seconds \(given: '3'\)"),
        (lambda: sky.compute(retries=1.5), r"retries: expected a number from 0 \(given: 1.5\)"),
        (lambda: sky.compute(slots=True), "slots: expected a number"),
        (lambda: sky.compute(env={"A": 1}), "env: expected variables, such as"),
        (lambda: sky.compute(env="A=1"), "env: expected variables, such as"),
        (lambda: sky.cls(kep=2), r"kep: no option of @sky.cls\nDid you mean keep"),
        (lambda: sky.cls(keep="2")(Array), r"keep: expected a number from 1"),
        (lambda: double(1).options(profil="1g"), r"profil: no option of Task.options\nDid you mean profile"),
        (lambda: double(1).options(profile=1), "profile: expected the name of a profile"),
        (lambda: sky.connect("a/b", tmeout=3), r"tmeout: no option of sky.connect\nDid you mean timeout"),
        (lambda: sky.connect("a/b", timeout="3"), "timeout: expected seconds"),
        (lambda: sky.connect("a/b", includes="src"), r"includes: expected a list, such as \['src'\] \(given: 'src'\)"),
        (lambda: sky.connect("a/b", output="yes"), "output: expected True, False, or a function"),
        (lambda: sky.connect("a/b", env=["A"]), "env: expected variables"),
        (lambda: sky.connect("a/b", workdir="no/such"), "workdir: there is no such folder"),
    ],
)
def test_options_that_are_wrong(mistake: Callable[[], Any], says: str) -> None:
    with pytest.raises(sky.InvalidField, match=says) as caught:
        mistake()
    assert "__" not in str(caught.value)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda p: p.submit(double(1), timeout=3), r"timeout: no option of submit\nIt is one of a task: .*timeout=..."),
        (lambda p: p.submit(double(1), detatch="x"), r"detatch: no option of submit\nDid you mean detach"),
        (lambda p: p.submit(double, 1, detatch="x"), r"detatch: .*submit, nor an argument of double\nDid you mean det"),
        (lambda p: p.submit(plain, 1, retries=3), r"retries: .*\nIt is one of a task: .*options\(retries=...\)"),
        (
            lambda p: p.launch(plain, 1, per_nod=2),
            r"per_nod: .*launch, nor an argument of plain\nDid you mean per_node",
        ),
        (lambda p: p.select(nod="n0"), r"nod: no option of .*Pool.select\nDid you mean node"),
    ],
)
def test_options_of_a_pool_that_are_wrong(pool: Any, mistake: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(sky.InvalidField, match=says):
        mistake(pool)


def test_options_of_a_pool_for_coroutines_that_are_wrong(pool: Any) -> None:
    for mistake in (lambda p: p.submit(double, 1, detatch="x"), lambda p: p.select(nod="n0")):
        with pytest.raises(sky.InvalidField, match="Did you mean"):
            mistake(sky.AsyncPool(pool))


def test_the_name_of_a_job_is_a_string(pool: Any) -> None:
    with pytest.raises(sky.InvalidField, match="detach: expected the name of the job"):
        pool.submit(double(1), detach=True)


def test_a_function_may_take_any_keyword(pool: Any) -> None:
    def given(**words: int) -> dict[str, int]:
        return words

    assert pool.submit(given, timeout=3).result(60) == {"timeout": 3}


def test_a_node_that_is_not_there_is_answered_with_those_that_are(pool: Any) -> None:
    with pytest.raises(sky.SlotLost, match=r"no slot of m1, .*\nDid you mean n1.*\? Nodes: n0, n1\."):
        double(1) >> pool.select(node="m1")
    with pytest.raises(sky.SlotLost, match=r"Nodes: n0, n1\."):
        pool.select(node="other").launch(plain, 1, framework="none")
    with pytest.raises(sky.SlotLost, match=r"Nodes: n0, n1\."):
        pool.select(node="other").submit(double(1), detach="never")


def test_a_result_is_waited_for_by_a_number(pool: Any) -> None:
    future = pool.submit(time.sleep, 60)
    with pytest.raises(TimeoutError, match=r"sleep has no result after 0\.01 s, and runs on"):
        future.result(0.01)
    with pytest.raises(TimeoutError, match="no result after"):
        future.exception(0.01)
    future.cancel()

    def late() -> None:
        raise TimeoutError("of the task")

    with pytest.raises(TimeoutError, match="of the task"):
        pool.submit(late).result(60)


# Surroundings -------------------------------------------------------------------------------------------------------


def write(name: str) -> list[str]:
    Path(name).write_text("x")
    return sorted(os.listdir())  # noqa: PTH208


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    for name, text in {"data.txt": "data", "lib/tool.py": "", "left.bin": "", ".skyinfraignore": "*.bin\n"}.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


def test_variables_of_a_pool_and_of_a_task(fleet: Any) -> None:
    task = Task(surroundings)
    with sky.connect(fleet.manifest, env={"A": "pool", "B": "pool"}) as pool:
        assert (task >> pool)[:2] == ("pool", "pool")
        assert (task.options(env={"B": "task"}) >> pool)[:2] == ("pool", "task")
        assert {each[:2] for each in pool.map(lambda _: surroundings(), range(40))} == {("pool", "pool")}
        of_gang = pool.launch(surroundings, framework="none", env={"A": "gang"})
        assert {each[:2] for each in of_gang} == {("gang", "pool")}
    with sky.connect(fleet.manifest) as pool:
        assert {each[:2] for each in task @ pool} == {(None, None)}, "they end with the task"


def test_tasks_begin_in_a_copy_of_the_working_directory(fleet: Any, folder: Path) -> None:
    here = [".skyinfraignore", "data.txt", "lib"]
    with sky.connect(fleet.manifest) as pool:
        before = [found[3] for found in Task(surroundings) @ pool]
    lines: list[str] = []
    with sky.connect(fleet.manifest, workdir=folder, output=lambda _, line: lines.append(line)) as pool:
        assert [found[2] for found in Task(surroundings) @ pool] == [here] * 4
        assert Task(write, ("new",)) >> pool == sorted([*here, "new"])
        assert [found[2] for found in Task(surroundings) @ pool] == [here] * 4, "what a task writes goes with it"
        assert pool.submit(lambda: Path("data.txt").read_text()).result(60) == "data"
        assert [found[2] for found in pool.launch(surroundings, framework="none")] == [here] * 4
        for task in (Task(write, ("lib/new",)), Task(os.mkdir, ("lib/empty",)), Task(write, ("data.txt",))):
            assert len(task @ pool) == 4
        assert pool.launch(os.mkdir, "lib/of_a_rank", framework="none") == [None] * 4
        for found in (Task(os.listdir, ("lib",)) @ pool, pool.launch(os.listdir, "lib", framework="none")):
            assert found == [["tool.py"]] * 4, "also in folders of it"
        assert Task(Path.read_text, (Path("data.txt"),)) @ pool == ["data"] * 4
        first, second = ([found.st_ino for found in Task(os.stat, ("data.txt",)) @ pool] for _ in range(2))
        assert first == second, "a copy that no task has changed is that of the next one"
    assert not (folder / "new").exists()
    assert {line for line in lines if "removed" in line} == {
        f"[removed with the task: {name} (1 byte); write to sky.files() or return it]"
        for name in ("new", "lib/new", "data.txt")
    }
    with sky.connect(fleet.manifest) as pool:
        assert [found[3] for found in Task(surroundings) @ pool] == before


# Terminals ----------------------------------------------------------------------------------------------------------


def test_output_of_a_task_in_a_terminal_of_ascii(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(watching.sys, "stdout", out)
        Watcher(True, progress=False).handle("output", "k", ("n0/1", "f", ["Größe \U0001f680"]))
        monkeypatch.undo()
    assert re.fullmatch(r"n0/1 \| Gr\?\?e \?\n", (tmp_path / "out").read_text())


def test_a_head_that_counts_no_hours(fleet):
    """That of the version before: it takes tasks with who submitted them, and knows nothing of hours."""
    with open_questions(fleet.manifest, timeout=10, patience=10) as asked:
        assert asked.hours() is None
