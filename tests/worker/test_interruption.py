"""What a task learns of the end of its node, and its checkpoints."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyinfra as sky
from skyinfra import InvalidField, MissingDependency
from skyinfra.protocol.interruption import FILE, Interruption
from skyinfra.worker.interruption import task_scope


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYINFRA_NODE_DIR", str(tmp_path))
    return tmp_path


def take_back(folder: Path, until: float | None = None) -> None:
    (folder / FILE).write_text(Interruption("taken back", until).dumps())


def test_outside_of_a_task_nothing_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYINFRA_NODE_DIR", raising=False)
    assert sky.interrupted() is False
    assert sky.interruption() is None


def test_a_task_sees_that_its_node_goes(folder: Path) -> None:
    assert not sky.interrupted()
    take_back(folder, time.time() + 100)
    assert sky.interrupted()
    found = sky.interruption()
    assert found is not None
    assert found.why == "taken back"
    assert 90 < (found.seconds_left or 0) <= 100
    assert Interruption("x").seconds_left is None
    assert Interruption("x", 1.0).seconds_left == 0


def test_a_clock_that_is_set_changes_nothing_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    notice, real = Interruption.now("x", time.time() + 100), time.time
    for ahead in (-3600, 3600):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
        assert 0 < (notice.seconds_left or 0) <= 100


def test_callbacks_run_once_beside_the_task_and_are_waited_for(folder: Path) -> None:
    ran: list[str] = []
    begun = threading.Event()

    def slow() -> None:
        begun.set()
        time.sleep(0.2)
        ran.append("slow")

    def broken() -> None:
        raise ValueError("of the callback")

    with task_scope():
        sky.on_interrupt(broken)
        sky.on_interrupt(slow)
        sky.on_interrupt(lambda: ran.append("last"))
        take_back(folder)
        assert begun.wait(30)
    assert ran == ["slow", "last"]
    (folder / FILE).unlink()


def test_a_callback_that_comes_late_runs_at_once(folder: Path) -> None:
    take_back(folder)
    done = threading.Event()
    with task_scope():

        @sky.on_interrupt
        def save() -> None:
            done.set()

        assert done.wait(30)
    assert callable(save)


def test_callbacks_go_with_their_task(folder: Path) -> None:
    ran: list[int] = []
    with task_scope():
        sky.on_interrupt(lambda: ran.append(1))
    take_back(folder)
    done = threading.Event()
    with task_scope():
        sky.on_interrupt(done.set)
        assert done.wait(30)
    assert ran == []


def test_a_process_that_was_forked_has_no_callbacks(folder: Path) -> None:
    code = f"""
import os, time, skyinfra as sky
sky.on_interrupt(lambda: os.write(1, b"parent " if os.getpid() == parent else b"child "))
parent = os.getpid()
if os.fork() == 0:
    open({str(folder / FILE)!r}, "w").write('{{"why": "x"}}')
    sky.on_interrupt(lambda: (os.write(1, b"own "), os._exit(0)))
    time.sleep(30)
os.wait()
time.sleep(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.split()) == ["own", "parent"]


# Checkpoints --------------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_last_checkpoint_is_loaded_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = sky.SpotCheckpointer(tmp_path / "run", keep=2)
    assert checkpoints.load_latest() is None
    for step in (1, 2, 10):
        checkpoints.save({"step": step}, step)
    assert sky.SpotCheckpointer(tmp_path / "run").load_latest() == ({"step": 10}, 10)
    assert names(tmp_path / "run") == ["latest", "step-000000000002.pickle", "step-000000000010.pickle"]
    # Training that begins anew is what was saved last.
    checkpoints.save({"step": 3}, 3)
    assert checkpoints.load_latest() == ({"step": 3}, 3)


@given(steps=st.lists(st.integers(0, 30), min_size=1, max_size=12), keep=st.integers(1, 4))
def test_what_was_saved_last_is_there_and_no_more_than_are_kept(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    checkpoints = sky.SpotCheckpointer(folder, keep=keep)
    for count, step in enumerate(steps):
        checkpoints.save(count, step)
        assert checkpoints.load_latest() == (count, step)
    assert len(list(folder.glob("step-*"))) <= keep
    assert not list(folder.glob(".*"))


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    def save(state: Any, file: Path) -> None:
        file.write_text(str(state))
        if state == "bad":
            raise OSError("disk full")

    checkpoints = sky.SpotCheckpointer(tmp_path, save=save, load=Path.read_text)
    checkpoints.save("good", 1)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save("bad", 2)
    assert checkpoints.load_latest() == ("good", 1)
    assert names(tmp_path) == ["latest", "step-000000000001.ckpt"]


def test_a_folder_is_a_checkpoint_too(tmp_path: Path) -> None:
    def save(state: dict[str, str], folder: Path) -> None:
        folder.mkdir()
        for name, text in state.items():
            (folder / name).write_text(text)

    def load(folder: Path) -> dict[str, str]:
        return {file.name: file.read_text() for file in sorted(folder.iterdir())}

    checkpoints = sky.SpotCheckpointer(tmp_path, save=save, load=load, keep=1)
    for text in ("a", "b"):
        checkpoints.save({"rank0": text, "rank1": text}, 5)
    assert checkpoints.load_latest() == ({"rank0": "b", "rank1": "b"}, 5)
    checkpoints.save({"rank0": "c"}, 6)
    assert names(tmp_path) == ["latest", "step-000000000006.ckpt"]


@pytest.mark.parametrize("folders", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_a_copy_of_the_folder_goes_on_where_the_folder_was(tmp_path: Path, folders: bool, follows: bool) -> None:
    def save(state: str, place: Path) -> None:
        if folders:
            place.mkdir()
        (place / "state" if folders else place).write_text(state)

    def load(place: Path) -> str:
        return (place / "state" if folders else place).read_text()

    checkpoints = sky.SpotCheckpointer(tmp_path / "run", save=save, load=load)
    for step in (1, 2):
        checkpoints.save(f"state {step}", step)
    if not follows:
        (tmp_path / "run" / "latest").unlink()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "copy" / ".step-000000000009.ckpt.x").mkdir()  # of a process that ended while it saved
    (tmp_path / "copy" / "step-000000000009.ckpt.fetched").touch()
    copied = sky.SpotCheckpointer(tmp_path / "copy", save=save, load=load)
    assert copied.load_latest() == ("state 2", 2)
    copied.save("state 3", 3)
    assert copied.load_latest() == ("state 3", 3)
    assert (tmp_path / "copy" / "latest").is_symlink()


@pytest.mark.parametrize("call", range(1, 12))
def test_an_end_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, call: int) -> None:
    """The process ends at its N-th fsync, rename or symlink of the second save."""
    code = f"""
import os, pathlib, skyinfra as sky
checkpoints = sky.SpotCheckpointer({str(tmp_path)!r}, keep=1)
checkpoints.save("first", 1)
count = 0
def ending(function):
    def call(*arguments, **keywords):
        global count
        count += 1
        if count == {call}:
            os._exit(137)
        return function(*arguments, **keywords)
    return call
for name in ("fsync", "rename", "symlink", "unlink", "rmdir"):
    setattr(os, name, ending(getattr(os, name)))
checkpoints.save("second", 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 137), done.stderr
    found = sky.SpotCheckpointer(tmp_path, keep=1).load_latest()
    assert found in (("first", 1), ("second", 2))
    # The next one clears up.
    sky.SpotCheckpointer(tmp_path, keep=1).save("third", 3)
    assert names(tmp_path) == ["latest", "step-000000000003.pickle"]


def test_update_saves_when_the_node_goes_and_now_and_then(folder: Path, tmp_path: Path) -> None:
    saved: list[int] = []

    def save(state: int, file: Path) -> None:
        saved.append(state)
        file.write_bytes(pickle.dumps(state))

    checkpoints = sky.SpotCheckpointer(tmp_path / "run", save=save, load=lambda file: pickle.loads(file.read_bytes()))
    for step in range(1, 11):
        assert checkpoints.update(step, step, every=5) is (step % 5 == 0)
    take_back(folder)
    end = time.monotonic() + 0.5
    step = 10
    while time.monotonic() < end or len(saved) < 3:
        step += 1
        checkpoints.update(step, step)
    assert saved[:2] == [5, 10]
    assert 3 <= len(saved) < (step - 10) / 2
    latest = checkpoints.load_latest()
    assert latest is not None
    assert latest[1] == saved[-1]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="expected s3://BUCKET/PREFIX"):
        sky.SpotCheckpointer("https://host/run")
    with pytest.raises(InvalidField, match="at least one"):
        sky.SpotCheckpointer(tmp_path, keep=0)
    with pytest.raises(InvalidField, match="go together"):
        sky.SpotCheckpointer(tmp_path, save=lambda state, file: None)
    checkpoints = sky.SpotCheckpointer(tmp_path)
    with pytest.raises(InvalidField, match="counted from 0"):
        checkpoints.save(1, -1)
    (tmp_path / "step-000000000001.pt").write_bytes(b"")
    (tmp_path / "latest").symlink_to("step-000000000001.pt")
    with pytest.raises(MissingDependency, match="written by torch"):
        checkpoints.load_latest()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("/etc/passwd")
    with pytest.raises(InvalidField, match="does not point at a checkpoint"):
        checkpoints.load_latest()


def test_torch_writes_where_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        @staticmethod
        def save(state: Any, file: Path) -> None:
            file.write_bytes(b"torch" + pickle.dumps(state))

        @staticmethod
        def load(file: Path, *, weights_only: bool) -> Any:
            assert not weights_only
            return pickle.loads(file.read_bytes().removeprefix(b"torch"))

    monkeypatch.setitem(sys.modules, "torch", Torch)  # type: ignore[arg-type]
    checkpoints = sky.SpotCheckpointer(tmp_path)
    assert checkpoints.save([1], 4).suffix == ".pt"
    assert checkpoints.load_latest() == ([1], 4)
