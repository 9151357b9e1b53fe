"""Gangs: scripts and the command line, and what a gang cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.cli.options import options_first
from skyinfra.cli.run import GangOptions, ScriptOptions, run_gang
from skyinfra.client import Fetching, open_pool
from skyinfra.protocol.jobs import KEEPING, WRITTEN, Written
from skyinfra.tasks import Task

ROOT = Path(sky.__file__).parents[1]


def none(pool, target, *args, **options):
    """A gang without a framework, which warns of nothing."""
    return pool.launch(target, *args, framework="none", **options)


@pytest.fixture
def script(tmp_path):
    """Writes a script; gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def test_a_script_runs_as_a_program_on_every_rank(pool, script):
    path = script(
        "import os, sys, skyinfra\n"
        "def f(): return 1\n"
        "print(__name__, sys.argv[1:], os.path.dirname(__file__) == os.getcwd(), skyinfra.gang().rank)\n"
        "import pickle; pickle.loads(pickle.dumps(f))\n"
        "def g(x: int): ...\n"
        "assert g.__annotations__ == {'x': int}\n"
        "print('bad', file=sys.stderr)\n"
    )
    lines = []
    assert none(pool, path, "--lr", 0.1, nodes=1, on_line=lambda *line: lines.append(line)) == [0, 0]
    wanted = [(rank, "stdout", f"__main__ ['--lr', '0.1'] True {rank}") for rank in (0, 1)]
    assert sorted(lines) == sorted([*wanted, (0, "stderr", "bad"), (1, "stderr", "bad")])


def test_a_script_that_ends_with_a_code_ends_the_gang(pool, script):
    path = script("import os, sys, time\nif os.environ['SKYINFRA_RANK'] == '1': sys.exit(3)\ntime.sleep(600)\n")
    with pytest.raises(sky.GangFailed, match=r"rank 1 of train\.py, .* ended with exit code 3") as caught:
        none(pool, path)
    assert (caught.value.rank, caught.value.code) == (1, 3)


def test_a_script_that_raises_has_its_traceback_first(pool, script):
    path = script("import os, time\nif os.environ['SKYINFRA_RANK'] == '1': raise KeyError('lost')\ntime.sleep(600)\n")
    lines = []
    with pytest.raises(sky.GangFailed, match="exit code 1") as caught:
        none(pool, path, on_line=lambda *line: lines.append(line))
    assert isinstance(caught.value.__cause__, KeyError)
    errors = [text for rank, stream, text in lines if (rank, stream) == (1, "stderr")]
    assert errors[0] == "Traceback (most recent call last):"
    assert errors[-1] == "KeyError: 'lost'"
    assert not any("skyinfra" in text for text in errors)


@pytest.mark.parametrize(("ends", "code"), [("pass", 0), ("sys.exit(3)", 3), ("raise OSError", 1)])
def test_a_fork_of_a_script_does_not_speak_for_its_rank(pool, script, ends, code):
    path = script(
        f"import os, sys\nif (pid := os.fork()) == 0:\n    {ends}\n"
        "else: print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    lines = []
    assert none(pool, path, nodes=1, per_node=1, on_line=lambda *line: lines.append(line)) == [0]
    assert [text for _, stream, text in lines if stream == "stdout"] == [str(code)]


def test_the_command_line_gives_lines_with_ranks_and_the_exit_code(fleet, tmp_path, script, capfd):
    manifest = tmp_path / "fleet.json"
    manifest.write_text(json.dumps(fleet.manifest.to_json()))
    path = script(
        "import os, sys\nprint(sys.argv[1:])\nsys.exit(int(sys.argv[1]) if os.environ['RANK'] == '1' else 0)\n"
    )
    for code in (0, 5):
        assert run_gang(str(manifest), path, [str(code)], ScriptOptions(), GangOptions(True, 1, 2)) == code
    out, err = capfd.readouterr()
    assert "1: ['5']" in out
    assert "warning: ranks share a GPU" in err
    assert "error: rank 1 of train.py, on slot n0/1 of node n0, ended with exit code 5" in err
    with pytest.raises(sky.InvalidField, match="--nodes"):
        run_gang(str(manifest), path, ["0"], ScriptOptions(), GangOptions(True, 9))


def test_files_of_rank_0_and_of_others_are_told_apart(fleet, tmp_path, script, capfd):
    manifest = tmp_path / "fleet.json"
    manifest.write_text(json.dumps(fleet.manifest.to_json()))
    path = script(
        "import os, sys\nrank = int(os.environ['RANK'])\nopen('model.pt', 'w').write(f'of rank {rank}')\n"
        "open('log.txt', 'w').write('x' * 10)\nsys.exit(3 if rank == 1 and len(sys.argv) > 1 else 0)\n"
    )
    goes = ScriptOptions(fetch=("*.pt",))
    for arguments, code in (([], 0), (["fail"], 3)):
        assert run_gang(str(manifest), path, arguments, goes, GangOptions(True, 1, 2)) == code
        err = capfd.readouterr().err
        assert (tmp_path / "rank-1/model.pt").read_text() == "of rank 1"
        if code == 0:
            assert (tmp_path / "model.pt").read_text() == "of rank 0"
            assert f"fetched to {tmp_path}: rank-1/model.pt (9 bytes)" in err
            assert (
                "train.py wrote log.txt (10 bytes) in its copy" in err and "1 other rank wrote 1 file (10 bytes)" in err
            )
            (tmp_path / "rank-1/model.pt").unlink()


def test_ranks_that_are_interrupted_say_their_last_words_and_send_their_files(pool, tmp_path, script):
    path = script(
        "import os, time\ntry:\n    print('ready')\n    time.sleep(600)\nexcept KeyboardInterrupt:\n"
        "    open('last.pt', 'w').write(os.environ['SKYINFRA_RANK'])\n    print('cleans up')\n"
    )
    files, said = Fetching(pool, tmp_path, "train.py", ("*.pt",)), []

    def show(rank: int, stream: str, line: str) -> None:
        said.append(line)
        if stream in (KEEPING, WRITTEN):
            files.take(stream, Written.read(json.loads(line)), rank)
        elif said.count("ready") == 2 and line == "ready":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        none(pool, path, nodes=1, per_node=2, env=files.variables, on_line=show)
    assert said.count("cleans up") == 2, said
    first, *_ = files.bring()
    assert first == f"fetched to {tmp_path}: last.pt (1 byte)"
    assert [(tmp_path / name).read_text() for name in ("last.pt", "rank-1/last.pt")] == ["0", "1"]


@pytest.mark.slow
def test_the_command_starts_ranks(fleet, tmp_path, script):
    (tmp_path / "fleet.json").write_text(json.dumps(fleet.manifest.to_json()))
    script("import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])")
    command = [sys.executable, "-m", "skyinfra.cli", "run", "fleet.json"]
    command += ["--torchrun", "--per-node", "1", "train.py", "--", "--nodes", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"{rank}: {rank} 2 ['--nodes', '7']" for rank in (0, 1)]
    command = [sys.executable, "-m", "skyinfra.cli", "run", "fleet.json", "--nodes", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: --nodes: needs --torchrun (given: 2)\n")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("F s.py a --nodes 2", "F s.py a --nodes 2"),
        ("F --torchrun s.py", "--torchrun F s.py"),
        ("F --nodes 2 --torchrun s.py --nodes 3", "--nodes 2 --torchrun F s.py --nodes 3"),
        ("--nodes=2 F s.py -- x", "--nodes=2 F s.py -- x"),
        ("F -- s.py --nodes 2", "F -- s.py --nodes 2"),
        ("F --nodes", "--nodes F"),
    ],
)
def test_options_stand_before_and_behind_the_fleet(given, wanted):
    assert options_first(given.split(), {"--nodes", "--per-node"}) == wanted.split()


# What cannot be -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 3}, r"nodes: the fleet has 2 nodes \(given: 3\)\n.*n0 has 2, n1 has 2"),
        ({"per_node": 3}, r"per_node: no node has that many slots \(given: 3\)\n.*n0 has 2, n1 has 2"),
        ({"nodes": 0}, "nodes: a number from 1"),
        ({"per_node": -1}, "per_node: a number from 1"),
        ({"framework": "torhc"}, r"framework: no such framework .*\nDid you mean torch"),
        ({"max_restarts": -1}, "max_restarts: a number from 0"),
        ({"timeout": 0}, "timeout: seconds"),
    ],
)
def test_what_a_gang_cannot_be(pool, options, message):
    with pytest.raises(sky.InvalidField, match=message):
        pool.launch(os.getpid, **{"framework": "none", **options})


def test_a_target_that_cannot_be(pool, tmp_path, script):
    with pytest.raises(sky.InvalidField, match=r"target: there is no such file .*missing\.py"):
        none(pool, tmp_path / "missing.py")
    with pytest.raises(sky.InvalidField, match="named arguments"):
        none(pool, script(""), lr=1)
    with pytest.raises(sky.TaskNotPicklable, match="argument"):
        none(pool, len, threading.Lock())
    with pytest.raises(TypeError, match="function"):
        none(pool, "train.py")


def test_a_process_uses_one_partition(pool):
    with pytest.raises(sky.NotSupported, match=r"slots: a process uses one partition.*3g\.40gb"):
        pool.submit(Task(os.getpid).options(slots=2)).result(timeout=60)


def test_a_closed_pool_starts_nothing(fleet):
    with open_pool(fleet.manifest) as pool:
        pass
    with pytest.raises(sky.FleetError, match="closed"):
        none(pool, os.getpid)


def test_ranks_of_a_script_may_clean_up_when_they_are_interrupted(pool, script, tmp_path, wait_until):
    path = script(
        "import os, pathlib, time\ntry:\n    print('on', flush=True)\n    while True: time.sleep(0.05)\n"
        f"finally: pathlib.Path({str(tmp_path)!r}, 'cleaned' + os.environ['SKYINFRA_RANK']).touch()\n"
    )

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        none(pool, path, nodes=1, per_node=1, on_line=interrupt)
    wait_until((tmp_path / "cleaned0").exists)
