"""Jobs that had not ended when their fleet did: kept by its client, and run by the next fleet. Two heads that run."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_fleets.running_node import BIG, RunningNode, h100, until
from tasks_on_nodes.jobs import add, starts, wait_for
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli import jobs as command
from skyinfra.cli.app import app
from skyinfra.client.files import send_project
from skyinfra.client.jobs import Line
from skyinfra.client.pool import Pool
from skyinfra.client.questions import Questions
from skyinfra.client.unfinished import keep_unfinished, resume, unfinished
from skyinfra.head.journal import Record
from skyinfra.protocol.jobs import Submission
from skyinfra.terraform.stores import Store, local_store

Make = Callable[..., RunningNode]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local_store(tmp_path / "project", "demo")


def asked(pool: Pool) -> Questions:
    """Asks the fleet of *pool*, by its connection."""
    return Questions(pool._fleet)


def kept(pool: Pool, store: Store) -> list[str]:
    return keep_unfinished(asked(pool), store, time.monotonic() + 60).done


def names(store: Store) -> set[str]:
    return {name.rpartition("/")[2] for name in store.names("mig")}


def test_jobs_go_on_with_the_next_fleet_under_their_ids(make_node: Make, tmp_path: Path, store: Store) -> None:
    """github.com/autogluon/tabarena/pull/587: an id of its own for each attempt; github.com/runs-on/runs-on/issues/259:
    one of several jobs goes on."""
    path = tmp_path / "run"
    first, second = make_node("n1", cpu_slots=1), make_node("n2", cpu_slots=1)
    first.boot()
    with first.pool() as pool:
        over = pool.submit(add, 1, 2, detach="over")
        assert over.result(timeout=60) == 3
        going = pool.submit(wait_for, str(path), "went", detach="going")
        until(lambda: starts(path), "it runs")
        waiting = [pool.detach(sky.compute(add)(number, 0), f"waits-{number}", priority=number) for number in (1, 2)]
        assert kept(pool, store) == ["going", "waits-1", "waits-2"]
        assert kept(pool, store) == [], "once"
    # Killed, as a machine that is taken back.
    first.stop()
    Path(f"{path}.open").touch()
    second.boot()
    with second.pool() as pool:
        done = resume(asked(pool), store)
        assert (done.done, done.problems, done.already) == (["going", "waits-1", "waits-2"], {}, 0)
        assert resume(asked(pool), store).already == 3
        assert [job.name for job in asked(pool).jobs()] == done.done
        again = pool.job("going")
        assert again.id == going.id and again.result(timeout=60) == "went"
        assert [pool.job(each.id).result(timeout=60) for each in waiting] == [1, 2]
        infos = {each.name: each for each in asked(pool).jobs()}
        assert infos["going"].repeated == "the fleet that it ran on is gone" and infos["waits-1"].repeated is None
        assert infos["waits-2"].priority == 2 and infos["waits-2"].submitter == infos["going"].submitter
        assert kept(pool, store) == [] and names(store) == set(), "what has ended is not kept for another fleet"
    assert len(starts(path)) == 2


def read_words(path: str) -> tuple[str, int]:
    """Reads what lies in the working directory, once it is let through."""
    while not Path(path).exists():
        time.sleep(0.05)
    return Path("words/greeting.txt").read_text(), Path("words/large.bin").stat().st_size


def test_what_was_synced_goes_with_them(make_node: Make, tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "work"
    (folder / "words").mkdir(parents=True)
    (folder / "words" / "greeting.txt").write_text("hello")
    (folder / "words" / "large.bin").write_bytes(bytes(range(256)) * 40_000)
    first, second = make_node("n1", accelerator=h100(BIG)), make_node("n2", accelerator=h100(BIG))
    first.boot()
    with first.pool() as pool:
        send_project(pool._fleet, folder, [])
        pool._fleet.workdir = "."
        for name in ("one", "two"):
            pool.submit(read_words, str(tmp_path / "open"), detach=name)
        assert kept(pool, store) == ["one", "two"]
        files = [each for each in store.names("mig") if each.startswith("mig/files/")]
        assert len(files) >= 3, "the same files once, and their listing"
    first.stop()
    second.boot()
    (tmp_path / "open").touch()
    with second.pool() as pool:
        (one,) = (each.info for each in unfinished(store, "mig") if each.info.name == "one")
        done = resume(asked(pool), store, [one.id[:12], "three"])
        assert (done.done, set(done.problems), done.already) == (["one"], {"three"}, 0)
        assert pool.job("one").result(timeout=60) == ("hello", 10_240_000)
        # It needs none of the files any more, and the other one does.
        assert kept(pool, store) == [] and [each.info.name for each in unfinished(store, "mig")] == ["two"]
        assert set(files) <= store.names("mig")


def test_what_cannot_go_on_says_why_and_stays(make_node: Make, tmp_path: Path, store: Store) -> None:
    path = tmp_path / "run"
    first, second = make_node("n1", accelerator=h100(BIG)), make_node("n2", accelerator=h100(BIG))
    first.boot()
    with first.pool() as pool:
        for name in ("taken", "lost", "good"):
            pool.submit(wait_for, str(path), name, detach=name)
        assert len(kept(pool, store)) == 3
    first.stop()
    found = {each.info.name: each for each in unfinished(store, "mig")}
    store.remove(f"mig/{found['lost'].info.key}/call")
    (tmp_path / "project" / ".skyinfra" / ".jobs" / "demo" / "mig" / "other").mkdir()
    (tmp_path / "project" / ".skyinfra" / ".jobs" / "demo" / "mig" / "other" / "submission.json").write_text("{")
    second.boot()
    Path(f"{path}.open").touch()
    with second.pool() as pool:
        pool.submit(add, 1, 2, detach="taken").result(timeout=60)
        done = resume(asked(pool), store)
        assert done.done == ["good"] and set(done.problems) == {"taken", "lost", "other"}
        assert "a job of that name is there" in done.problems["taken"]
        assert done.problems["other"] == "this version of skyinfra cannot read what is kept of it"
        assert pool.job("good").result(timeout=60) == "good"
    assert {each.info.name for each in unfinished(store, "mig")} == {"taken", "lost", "good"}


def test_the_command_ends_with_1_where_a_job_does_not_go_on(
    make_node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    head = make_node(accelerator=h100(BIG))
    head.boot()
    with head.pool() as pool:
        manifest = asked(pool).manifest
        stack = SimpleNamespace(name="demo", fleet=lambda _: manifest)
        project = SimpleNamespace(stack=lambda _: stack, base_of=lambda _: tmp_path)
        monkeypatch.setattr(command.Project, "find", lambda: project)
        monkeypatch.setattr(command, "store_of", lambda *_: store)
        done = CliRunner().invoke(app, ["jobs", "resume", "demo/mig", "never"])
        assert done.exit_code == 1, done.output
        assert "jobs that go on: none; never does not: nothing is kept of it" in done.stderr
        done = CliRunner().invoke(app, ["jobs", "resume", "demo/mig"])
        assert (done.exit_code, done.stdout) == (0, "demo/mig: jobs that go on: none\n")


def test_files_of_jobs_that_another_version_has_kept_stay(make_node: Make, tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "greeting.txt").write_text("hello")
    head, path = make_node(accelerator=h100(BIG)), tmp_path / "run"
    head.boot()
    with head.pool() as pool:
        send_project(pool._fleet, folder, [])
        job = pool.submit(wait_for, str(path), detach="job")
        assert kept(pool, store) == ["job"]
        store.write("mig/later-1/submission.json", io.BytesIO(b'{"version": 2}'))
        job.cancel()
        assert kept(pool, store) == [] and unfinished(store, "mig") == []
        assert {each.split("/")[1] for each in store.names("mig")} == {"later-1", "files"}
        store.remove("mig/later-1/submission.json")


def test_a_job_that_was_cancelled_does_not_go_on(make_node: Make, tmp_path: Path, store: Store) -> None:
    head, path = make_node(accelerator=h100(BIG)), tmp_path / "run"
    head.boot()
    with head.pool() as pool:
        job = pool.submit(wait_for, str(path), detach="job")
        until(lambda: starts(path), "it runs")
        assert kept(pool, store) == ["job"]
        job.cancel()
        assert kept(pool, store) == []
    assert names(store) == set()


def test_a_job_that_has_ended_has_nothing_to_give(make_node: Make, store: Store) -> None:
    head = make_node(accelerator=h100(BIG))
    head.boot()
    with head.pool() as pool:
        job = pool.submit(add, 1, 2, detach="job")
        job.result(timeout=60)
        with pytest.raises(sky.InvalidField, match="the job is done"):
            pool._fleet.in_loop(Line(pool._fleet.connection).unfinished(job.id))


def test_retries_that_are_used_up_stay_so() -> None:
    header = json.dumps({"key": "k", "name": "n", "topic": ""})
    wanted = Submission(1, "0" * 32, "job", "n", "function", "me@here", 3, header, 5, {"slot": 1}, retries=3)
    record = Record.of(wanted, now=1.0)
    assert record.submission(5) == wanted
    assert replace(record, failures=2).submission(5).retries == 1
    assert replace(record, failures=9).submission(5).retries == 0
    assert "repeated" not in wanted.to_json(), "heads of before do not know it"
