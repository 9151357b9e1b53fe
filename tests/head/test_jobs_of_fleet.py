"""Jobs on nodes that run: they outlive their clients, and the command line knows of them."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_fleets.running_node import BIG, RunningNode, h100, until
from support import python_path
from tasks_on_nodes.jobs import add, draw_bar, fail_until, manifest_of, print_and_fail_until, starts, wait_for
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli import jobs
from skyinfra.cli.app import app
from skyinfra.cli.status import _print_stack
from skyinfra.client import Pool, connect
from skyinfra.deploy.fleet_status import fleet_status
from skyinfra.deploy.kept import keep
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.tasks import Task
from skyinfra.terraform.stores import local_store

# What it shares is expensive: all of it in one process.
pytestmark = pytest.mark.xdist_group("jobs_of_fleet")


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Running = tuple[RunningNode, str]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A head with two slots, and the file of its manifest; each test leaves no job that has not ended."""
    folder = tmp_path_factory.mktemp("fleet")
    config = NodeConfig(1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", accelerator=h100(BIG), simulate=True)
    head = RunningNode(folder / "n1", config)
    try:
        head.boot()
        manifest = folder / "fleet.json"
        manifest.write_text(json.dumps(manifest_of(head).to_json()))
        yield head, str(manifest)
    finally:
        head.stop()


@pytest.fixture
def pool(running: Running) -> Iterator[Pool]:
    with connect(running[1]) as pool:
        yield pool


def command(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=True)
    assert result.exit_code == code, (result.output, result.exception)
    return result


# From Python --------------------------------------------------------------------------------------------------------

CLIENT = """
import sys, skyinfra as sky
def slow(path):
    import os, time
    open(path, "a").write("started")
    while not os.path.exists(path + ".open"):
        time.sleep(0.01)
    return {"seen": path}
with sky.connect(sys.argv[1]) as pool:
    print(pool.submit(slow, sys.argv[2], detach=sys.argv[3]).id)
"""


@pytest.mark.slow
def test_jobs_of_coroutines(running: Running, tmp_path: Path) -> None:
    path = tmp_path / "waits"

    async def main() -> None:
        async with sky.connect_async(running[1]) as pool:
            job = await pool.submit(add, 1, 2, detach="async-add")
            assert (job.name, await job, await job.result(timeout=10), await job.done()) == ("async-add", 3, 3, True)
            assert await job.exception() is None
            assert [info.state for info in await pool.jobs() if info.id == job.id] == ["done"]
            with pytest.raises(sky.JobNameTaken):
                await pool.submit(Task(add, (1, 2)), detach="async-add")
            again = await pool.detach(Task(add, (2, 2)), "async-add", replace=True)
            assert await again == 4
            await again.forget()
            with pytest.raises(sky.JobNotFound):
                await pool.job("async-add")

            long = await pool.detach(Task(wait_for, (str(path),)))
            with pytest.raises(TimeoutError, match=r"after 0.1 s"):
                await long.result(timeout=0.1)
            waiting = asyncio.ensure_future(long.result())
            while "started" not in await long.logs():
                await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            # Who waited is gone; the job goes on.
            same = await pool.job(long.id)
            assert await same.state() == "running"
            assert await same.cancel()
            with pytest.raises(sky.JobCancelled):
                await same
            assert repr(same).startswith(f"<AsyncJob {long.name}")

    asyncio.run(main())


def test_a_job_outlives_its_client(running: Running, tmp_path: Path, pool: Pool) -> None:
    path = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, running[1], str(path), "outlives"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    job = pool.job("outlives")
    assert job.id == done.stdout.strip()
    until(path.exists, "it runs")
    with pytest.raises(TimeoutError, match=r"job outlives is (running|queued) after 0.1 s"):
        job.result(timeout=0.1)
    Path(f"{path}.open").touch()
    assert job.result(timeout=60) == {"seen": str(path)}
    assert path.read_text() == "started"
    info = job.info()
    assert (info.state, info.task, info.attempts, info.problem) == ("done", "slow", 1, None)
    assert info.slot in ("n1/0", "n1/1")
    assert info.started is not None
    assert info.ended is not None
    assert info.submitted <= info.started <= info.ended
    # Again, and by its id.
    assert pool.job(info.id).result() == {"seen": str(path)}


def test_exceptions_arrive_with_their_traceback(pool: Pool, tmp_path: Path) -> None:
    job = pool.submit(fail_until, str(tmp_path / "starts"), 9, detach="fails")
    with pytest.raises(ValueError, match="start 1") as caught:
        job.result(timeout=60)
    assert any(frame.name == "fail_until" for frame in caught.traceback)
    assert (job.state, job.info().problem) == ("failed", "ValueError: start 1")
    assert isinstance(job.exception(), ValueError)
    again = pool.submit(Task(fail_until, (str(tmp_path / "again"), 3)).options(retries=5), detach="fails-less")
    assert again.result(timeout=60) == 3
    assert again.info().attempts == 3


def test_an_interrupt_of_the_task_itself_is_a_failure(pool: Pool) -> None:
    def interrupted(size: int) -> None:
        raise KeyboardInterrupt("x" * size)

    # A large one stays whole.
    for size in (1, 6 * 2**20):
        job = pool.submit(interrupted, size, detach=f"interrupted-{size}")
        with pytest.raises(sky.TaskFailed, match="interrupted raised KeyboardInterrupt: x") as caught:
            job.result(timeout=60)
        assert isinstance(caught.value.__cause__, KeyboardInterrupt) and caught.value.__cause__.args == ("x" * size,)
        assert job.state == "failed"


@pytest.mark.slow
def test_options_of_the_task_hold(pool: Pool, tmp_path: Path) -> None:
    late = pool.submit(Task(wait_for, (str(tmp_path / "late"),)).options(timeout=0.3), detach="late")
    with pytest.raises(sky.TaskTimeout, match=r"wait_for ran for more than 0\.3 s"):
        late.result(timeout=60)
    bound = pool.select(profile="3g.40gb").submit(Task(sky.instance_info), detach="bound")
    assert bound.result(timeout=60).profile == "3g.40gb"
    with pytest.raises(sky.SlotLost, match=r"has no slot with the profile 1g.10gb(.|\n)*3g.40gb\*2"):
        pool.submit(Task(add, (1, 2)).options(profile="1g.10gb"), detach="nowhere")
    with pytest.raises(sky.NotSupported, match="one slot"):
        pool.submit(Task(add, (1, 2)).options(slots=2), detach="two")
    with pytest.raises(sky.TaskNotPicklable, match="argument 'b' of add"):
        pool.submit(add, 1, (each for each in range(0)), detach="unpicklable")
    with pytest.raises(sky.JobNotFound):
        pool.job("unpicklable")


@pytest.mark.slow
def test_a_job_that_ends_its_process_again_and_again_fails_and_others_do_not(pool: Pool) -> None:
    killer = pool.submit(kill_itself, detach="killer")
    others = [pool.detach(Task(add, (number, 1))) for number in range(6)]
    assert [job.result(timeout=60) for job in others] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(sky.TaskAttemptsExceeded):
        killer.result(timeout=60)


def test_jobs_are_cancelled_where_they_wait_and_where_they_run(pool: Pool, tmp_path: Path) -> None:
    paths = [tmp_path / f"run{number}" for number in range(3)]
    first, second, third = (pool.submit(wait_for, str(path), detach=path.name) for path in paths)
    until(lambda: starts(paths[0]) and starts(paths[1]), "two run")
    until(lambda: first.state == second.state == "running", "the head knows that they run")
    assert third.state == "queued"
    assert third.cancel()
    assert first.cancel()
    assert (first.state, third.state) == ("cancelled", "cancelled")
    with pytest.raises(sky.JobCancelled, match="run0 was cancelled"):
        first.result(timeout=60)
    # Its slot takes others.
    assert pool.submit(add, 1, 2).result(timeout=60) == 3
    assert starts(paths[2]) == []
    Path(f"{paths[1]}.open").touch()
    second.result(timeout=60)
    assert not second.cancel()
    assert len(starts(paths[0])) == 1


@pytest.mark.slow
def test_large_calls_and_results_pass_in_parts(pool: Pool) -> None:
    data = os.urandom(9 * 2**20)
    job = pool.submit(bytes.__add__, data, b"!", detach="large")
    assert job.result(timeout=60) == data + b"!"


def test_names_and_what_is_wrong_with_them(pool: Pool) -> None:
    with pytest.raises(sky.InvalidField, match="letters, digits"):
        pool.submit(add, 1, 2, detach="no/slash")
    job = pool.submit(add, 1, 2, detach="taken")
    job.result(timeout=60)
    with pytest.raises(sky.JobNameTaken, match="is done"):
        pool.submit(add, 1, 2, detach="taken")
    again = pool.detach(Task(add, (2, 2)), "taken", replace=True)
    assert (again.result(timeout=60), pool.job("taken").id) == (4, again.id)
    with pytest.raises(sky.JobNotFound):
        job.info()
    again.forget()
    with pytest.raises(sky.JobNotFound, match=r"Did you mean|lists those"):
        pool.job("taken")


def read_synced(path: str) -> str:
    return sky.synced(path).read_text()


def test_a_job_that_waits_keeps_the_files_that_were_synced_for_it(running: Running, tmp_path: Path) -> None:
    head, fleet = running
    data, path = tmp_path / "data.txt", tmp_path / "run"
    data.write_text("what it was")
    with sky.connect(fleet) as pool:
        busy = [pool.submit(wait_for, f"{path}{slot}", detach=f"busy{slot}") for slot in range(2)]
        pool.sync(data)
        pool.submit(read_synced, "data.txt", detach="waits")
        until(lambda: all(starts(Path(f"{path}{slot}")) for slot in range(2)), "both slots are taken")
    # Its client is gone, and other blobs have taken the place of those that it had sent.
    shutil.rmtree(head.directory.path / "blobs")
    with sky.connect(fleet) as pool:
        for slot in range(2):
            Path(f"{path}{slot}.open").touch()
        assert pool.job("waits").result(timeout=60) == "what it was"
        for job in busy:
            pool.job(job.name).result(timeout=60)
    until(lambda: not list((head.directory.path / "kept").iterdir()), "it is not kept any longer")


# The command line ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
print(sys.argv[1:], flush=True)
while not os.path.exists(sys.argv[1] + ".open"):
    time.sleep(0.01)
print("an error", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def test_scripts_as_jobs(running: Running, tmp_path: Path) -> None:
    _, fleet = running
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ["--detach", "--name", "scripted", "--priority=3"]
    started = command("run", fleet, *options, str(script), "--", str(path), "0", "--name", "x")
    assert started.stdout == "scripted\n"

    def listed() -> dict[str, Any]:
        found = json.loads(command("jobs", fleet, "--json").stdout)["jobs"]
        return next(job for job in found if job["name"] == "scripted")

    until(lambda: listed()["state"] == "running", "it runs")
    job = listed()
    assert (job["task"], job["kind"], job["priority"], job["ended"]) == ("train.py", "script", 3, None)
    assert "@" in job["submitter"]
    until(lambda: "--name" in command("jobs", "logs", fleet, "scripted").stdout, "its output is there")
    table = command("jobs", fleet).stdout
    assert "scripted" in table
    assert "running" in table
    assert "ran for" not in command("jobs", "result", fleet, "scripted", "--timeout", "0.1", code=1).output
    Path(f"{path}.open").touch()
    follow_state = command("jobs", "logs", fleet, job["id"][:8], "--follow")
    assert follow_state.stdout.splitlines() == [str([str(path), "0", "--name", "x"]), "an error"]
    assert command("jobs", "result", fleet, "scripted").stdout == "0\n"
    again = ["run", fleet, "--detach", "--name", "scripted", str(script), str(path), "5"]
    assert "--replace" in str(command(*again, code=1).exception)
    assert command(again[0], again[1], "--replace", *again[2:]).stdout == "scripted\n"
    command("jobs", "result", fleet, "scripted", code=5)
    command("run", fleet, "--replace", str(script), code=2)
    wrong = command("run", fleet, "--detach", str(script), str(path), "7")
    name = wrong.stdout.strip()
    assert name.startswith("train-py-")
    assert "ended with exit code 7" in command("jobs", "result", fleet, name, code=7).output
    assert "failed" in command("jobs", fleet).stdout


def test_the_log_of_a_job_that_is_followed_has_all_of_its_attempts(
    running: Running, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fleet = running
    path = tmp_path / "starts"
    job = pool.submit(Task(print_and_fail_until, (str(path), 3)).options(retries=2), detach="attempts")
    until(lambda: path.exists() and job.info().slot, "it runs, as its head knows")
    part = jobs._Printer._part

    def watched(printer: jobs._Printer, info: JobInfo) -> bool:
        more = part(printer, info)
        Path(f"{path}.open").touch()
        return more

    monkeypatch.setattr(jobs._Printer, "_part", watched)
    followed = command("jobs", "logs", fleet, job.id, "--follow")
    assert followed.stdout.splitlines() == ["attempt 1", "attempt 2", "attempt 3"]


BAR = """
import os, sys, time
for number in (37, 38):
    print(f"\\rfit:  {number}%|###       | {number}/100 [00:03<00:06, 10.0it/s, loss=0.3]", end="", file=sys.stderr)
sys.stderr.flush()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("kind", ["function", "script"])
def test_the_bar_of_a_job_is_shown_where_nobody_listens_to_it(
    running: Running, pool: Pool, tmp_path: Path, kind: str
) -> None:
    _, fleet = running
    name, gate = f"bar-{kind}", tmp_path / "gate"
    if kind == "function":
        pool.submit(draw_bar, str(gate), detach=name)
    else:
        script = tmp_path / "fit.py"
        script.write_text(BAR)
        command("run", fleet, "--detach", "--name", name, str(script), str(gate))

    def told() -> Any:
        found = json.loads(command("jobs", fleet, "--json").stdout)["jobs"]
        return next(job for job in found if job["name"] == name)["progress"]

    until(told, "it says how far it is")
    assert told() == {"done": 37.0, "total": 100.0, "note": "fit 10.0it/s, loss=0.3"}
    assert "running, 37 of 100" in command("jobs", fleet).stdout
    assert "37 of 100, fit 10.0it/s, loss=0.3" in command("top", fleet).stdout
    [task] = [task for node in json.loads(command("top", fleet, "--json").stdout)["nodes"]
              for slot in node["slots"] for task in slot["tasks"]]  # fmt: skip
    assert task["progress"]["done"] == 37.0
    gate.touch()
    command("jobs", "result", fleet, name, "--timeout", "60")
    assert told() is None


WRITER = """
import os, sys, time
os.makedirs("out", exist_ok=True)
open("out/loss.csv", "w").write("0.1")
open("out/large.bin", "wb").write(b"x" * 2**20)
open("log.txt", "w").write("line")
print("written", flush=True)
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]): time.sleep(0.02)
sys.exit(int(sys.argv[1]))
"""


def test_files_of_a_script_are_kept_with_its_job(
    running: Running, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, fleet = running
    script = tmp_path / "write.py"
    script.write_text(WRITER)
    command("run", fleet, "--detach", "--name", "writes", "--fetch", "out", str(script), "7")
    told = command("jobs", "result", fleet, "writes", code=7).output
    assert "2 files (1.0 MiB) kept; log.txt (4 bytes) removed with its copy of the folder" in told
    written = pool.job("writes").info().written
    assert written is not None and (written.kept_count, written.kept_bytes, written.left_count) == (2, 2**20 + 3, 1)
    shutil.rmtree(head.path / "blobs")  # others came, and the blobs of the head went
    job = pool.job("writes")
    assert sorted(job.fetch(tmp_path / "a")) == [tmp_path / "a/out/large.bin", tmp_path / "a/out/loss.csv"]
    assert job.fetch(tmp_path / "b", "*.csv") == [tmp_path / "b/out/loss.csv"]
    assert (tmp_path / "b/out/loss.csv").read_text() == "0.1"
    (tmp_path / "b/out/loss.csv").write_text("mine")
    found = json.loads(command("jobs", "fetch", fleet, "writes", str(tmp_path / "b"), "--json").stdout)["files"]
    assert [(each["path"], each["how"]) for each in found] == [
        ("out/large.bin", "new"),
        ("out/loss.csv.fetched", "beside"),
    ]
    assert (tmp_path / "b/out/loss.csv").read_text() == "mine"
    # By the clock of this machine, which is an hour behind that of the head, and then one ahead.
    real = time.time
    for ahead in (-3600, 3600):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
        for seconds, kept in ((10, ["b/out/loss.csv.fetched2", "b/out/loss.csv.fetched3"]), (-60, ["b/out/loss.csv"])):
            os.utime(tmp_path / "b/out/loss.csv", times=(0, job.info().submitted + ahead + seconds))
            assert str(job.fetch(tmp_path / "b", "*.csv")[0].relative_to(tmp_path)) in kept, (ahead, seconds)
        (tmp_path / "b/out/loss.csv").write_text("mine")
    monkeypatch.undo()
    with connect(fleet) as again:
        kept = str(keep(again.manifest, local_store(tmp_path, "demo")))
        assert "; 2 files that they wrote will go with the fleet" in kept
    job.forget()
    until(lambda: not list((head.path / "kept").iterdir()), "its files go with it")


def test_files_of_a_job_that_is_cancelled_are_kept(running: Running, tmp_path: Path, pool: Pool) -> None:
    _, fleet = running
    script = tmp_path / "write.py"
    script.write_text(WRITER)
    command(
        "run", fleet, "--detach", "--name", "stopped", "--fetch", "*.csv", str(script), "0", str(tmp_path / "never")
    )
    job = pool.job("stopped")
    until(lambda: "written" in job.logs(), "it has written its files")
    with pytest.raises(sky.InvalidField, match="the job is running"):
        job.fetch(tmp_path)
    assert job.cancel()
    until(lambda: job.info().written is not None, "its files are kept")
    assert job.fetch(tmp_path / "got") == [tmp_path / "got/out/loss.csv"]
    assert job.state == "cancelled"
    command("run", fleet, "--detach", "--name", "none", str(script), "0")
    command("jobs", "result", fleet, "none")
    assert pool.job("none").fetch(tmp_path) == []
    assert "no such files of none are kept" in command("jobs", "fetch", fleet, "none", str(tmp_path), code=1).output


def test_results_of_functions_on_the_command_line(running: Running, pool: Pool, tmp_path: Path) -> None:
    _, fleet = running
    pool.detach(Task(dict, ((("a", 1),),)), "plain")
    assert command("jobs", "result", fleet, "plain").stdout == "{'a': 1}\n"
    assert json.loads(command("jobs", "result", fleet, "plain", "--json").stdout) == {"a": 1}
    file = tmp_path / "result.pickle"
    command("jobs", "result", fleet, "plain", "--output", str(file))
    assert pickle.loads(file.read_bytes()) == {"a": 1}
    pool.detach(Task(set, ((1,),)), "no-json")
    assert "no JSON" in str(command("jobs", "result", fleet, "no-json", "--json", code=1).exception)
    pool.detach(Task(fail_until, (str(tmp_path / "starts"), 9)), "raises")
    text = str(command("jobs", "result", fleet, "raises", code=1).exception)
    assert "ValueError: start 1" in text
    assert "in fail_until" in text


def test_a_job_that_leaves_is_not_started_again(pool: Pool, tmp_path: Path) -> None:
    def leave(path: str) -> None:
        with Path(path).open("a") as file:
            file.write("x")
        sys.exit(0)

    job = pool.submit(Task(leave, (str(tmp_path / "starts"),)).options(retries=2), detach="leaves")
    with pytest.raises(sky.TaskFailed, match=r"leave called sys\.exit\(0\)"):
        job.result(timeout=60)
    assert (tmp_path / "starts").read_text() == "x"


def test_a_script_as_a_job_runs_for_so_long_at_most(running: Running, tmp_path: Path, pool: Pool) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)\n")
    command("run", running[1], "--detach", "--name", "long", "--timeout", "2", "--retries", "1", str(script))
    with pytest.raises(sky.TaskTimeout, match=r"train\.py ran for more than 2 s"):
        pool.job("long").result(timeout=60)


def test_cancelling_on_the_command_line(running: Running, pool: Pool, tmp_path: Path) -> None:
    _, fleet = running
    path = tmp_path / "run"
    pool.submit(wait_for, str(path), detach="cancelled")
    until(lambda: starts(path), "it runs")
    assert command("jobs", "cancel", fleet, "cancelled").stdout == "cancelled: cancelled\n"
    assert "has ended already" in command("jobs", "cancel", fleet, "cancelled", code=1).output
    assert "no such job" in str(command("jobs", "cancel", fleet, "nobody", code=1).exception)
    assert "was cancelled" in str(command("jobs", "result", fleet, "cancelled", code=1).exception)


def test_wrong_usage(running: Running, tmp_path: Path) -> None:
    _, fleet = running
    script = tmp_path / "script.py"
    script.write_text("")
    gone = command("run", fleet, "--detach", str(tmp_path / "gone.py"), code=1)
    assert isinstance(gone.exception, sky.InvalidField)
    both = command("jobs", "result", fleet, "x", "--json", "--output", "f", code=2)
    assert "--output" in both.output


def test_status_shows_what_each_slot_does(
    running: Running, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    job = pool.submit(wait_for, str(path), detach="shown-job")
    until(lambda: job.state == "running", "the head knows that it runs")
    found = fleet_status(pool.manifest, None)
    (node,) = found["nodes"]
    busy = {slot["slot"]: [task["name"] for task in slot["tasks"]] for slot in node["slots"]}
    assert sorted(busy.values()) == [[], ["shown-job"]]
    assert busy[job.info().slot or ""] == ["shown-job"]
    _print_stack({"stack": "demo", "pools": [found]})
    drawn = capsys.readouterr().out
    # Below its partition, and in the table.
    assert drawn.count("shown-job") == 2
    Path(f"{path}.open").touch()
    job.result(timeout=60)
