"""The program of a first boot: steps in order, once, watched, retried, and told of where they fail."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import time
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest
from first_boots.boots import OLDEST, PACKAGE, FirstBoot, program, step

from skyinfra import NodeFailed
from skyinfra.bootstrap.program import modules, stripped
from skyinfra.first_boot.programs import no_space
from skyinfra.node.folder import Status
from skyinfra.protocol.fleet import NodeFailure
from skyinfra.runner import reports as runner_reports

MODULES = sorted((PACKAGE / "first_boot").glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_python_3_8_reads_it_and_so_does_what_travels(path: Path) -> None:
    source = path.read_text()
    short = stripped(source)
    for text in (source, short):
        ast.parse(text, feature_version=(3, 8))
    assert stripped(short).split() == short.split()
    comments = [t for t in tokenize.generate_tokens(io.StringIO(short).readline) if t.type == tokenize.COMMENT]
    assert not [t for t in comments if t.line.lstrip().startswith("#")]


def _with_drain_reason(status: dict[str, object]) -> dict[str, object]:
    """What a runner writes besides, which no boot knows of."""
    slots = status.pop("slots")
    return {
        **status,
        "drain_reason": None,
        "leaving": None,
        "unwarned": None,
        "unwatched": None,
        "stops": None,
        "slots": slots,
    }


def test_strings_are_left_as_they_are() -> None:
    source = 'def f() -> str:\n    """Doc."""\n    # why\n    return """a  \n\n  # b\n"""  # c\n\n\nx = "# d"  # e\n'
    assert stripped(source) == 'def f():\n return """a  \n\n  # b\n"""  # c\nx = "# d"  # e\n'


def test_every_module_travels() -> None:
    # But what is for those who have the package.
    every = [path.name for path in MODULES if path.name != "report_client.py"]
    assert [name for name, _ in modules("metadata", mounted=frozenset({"volumes", "buckets"}))] == every
    both = {"mounts.py", "buckets.py"}
    assert [name for name, _ in modules("metadata", mounted=frozenset({"buckets"}))] == [
        name for name in every if name != "mounts.py"
    ]
    for delivery, without in (("metadata", both), ("bucket", {"gce.py", "slices.py", *both})):
        assert [name for name, _ in modules(delivery)] == [name for name in every if name not in without]


@pytest.mark.parametrize("python", ["", pytest.param(OLDEST, marks=pytest.mark.skipif(not OLDEST, reason="no 3.8"))])
def test_steps_are_done_once(tmp_path: Path, python: str) -> None:
    boot = FirstBoot(tmp_path, python=python)
    instance = tmp_path / "instance-id"
    instance.write_text("i-123\n")
    name = step("node_name", node=str(boot.node), stands_for="p-0", prefix="p-", instance_id=str(instance))
    boot.write(name)
    before = json.loads(boot.node.read_text())
    assert boot.run().returncode == 0
    assert boot.states() == [("node_name", "started"), ("node_name", "done")]
    assert json.loads(boot.node.read_text()) == {**before, "node": "p-i-123"}
    written = boot.node.stat()
    assert boot.run().returncode == 0
    assert boot.states()[2:] == [("node_name", "started"), ("node_name", "skipped")]
    assert boot.node.stat() == written
    assert not boot.status.exists() and not boot.failure.exists()


def test_a_failed_step_ends_the_boot_and_is_told_as_the_runner_would(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    bad = step("packages", name="packages of the system", apt=["no-such"], stamp=str(tmp_path / "stamp"))
    boot.write(bad, step("user", user="x", groups=[], folder="/nonexistent"))
    program(tmp_path / "bin", "apt-get", 'echo "E: Unable to locate package no-such" >&2; exit 100')
    program(tmp_path / "bin", "dpkg", "exit 0")
    done = boot.run(path=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert boot.states() == [("packages of the system", "started"), ("packages of the system", "failed")]
    failed = boot.lines()[-1]
    assert failed["error"].startswith("apt-get") and failed["error"].endswith("update ended with exit code 100")
    assert failed["lines"][-1] == "E: Unable to locate package no-such"
    assert failed["again"] is False
    status = Status.loads(boot.status.read_text())
    assert (status.fleet, status.node, status.state, status.pid) == ("s/p", "p-0", "failed", None)
    assert status.error is not None and status.error[0] == "BootFailed"
    assert status.error[1].startswith("step packages of the system: apt-get")
    assert "Unable to locate package no-such" in status.error[1]
    assert Status.loads(status.dumps()) == status
    # The documents are written in two places: by the first boot, which has nothing of the runner, and by the runner.
    assert [*json.loads(status.dumps())] == [*_with_drain_reason(json.loads(boot.status.read_text()))]
    told = json.loads(boot.failure.read_text())
    assert NodeFailure.of(told) == NodeFailure(told["step"], told["error"], tuple(told["lines"]))
    assert {*told} - {"time"} == {*runner_reports.failure_of("s/p", "p-0", NodeFailed("no", hint="a\nb"))}
    assert (told["fleet"], told["node"], told["step"]) == ("s/p", "p-0", "packages of the system")

    # What was wrong is not any more.
    program(tmp_path / "bin", "apt-get", "exit 0")
    boot.write(bad)
    assert boot.run(path=f"{tmp_path / 'bin'}:{os.environ['PATH']}").returncode == 0
    assert not boot.failure.exists()


def test_a_program_that_finds_the_disk_full_is_told_as_that(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    boot.write(step("packages", apt=["git"], stamp=str(tmp_path / "stamp")))
    program(tmp_path / "bin", "dpkg", "exit 0")
    program(tmp_path / "bin", "apt-get", 'echo "E: write (28: No space left on device)"; exit 100')
    assert boot.run(path=f"{tmp_path / 'bin'}:{os.environ['PATH']}").returncode == 1
    told = json.loads(boot.failure.read_text())
    # It does not say which disk: the fullest of those that it may have been.
    folder = f"({boot.status.parent}|/opt|/tmp)"
    assert re.fullmatch(rf"no space left on {folder}: \d+ MB free, more needed: .*disk_gb\)", told["error"])
    assert told["lines"][-1].endswith("update ended with exit code 100")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone mounts a disk that is full")
def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    folder = tmp_path / "var"
    config = boot.node.read_text()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "skyinfra-small", str(folder)], check=True)
    try:
        boot.node.write_text(config)
        with contextlib.suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        boot.write(step("space", name="disk", folder=str(folder / "not" / "yet")))
        done = boot.run()
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert f"{boot.status} cannot be written: No space left on device" in done.stdout
    told = json.loads(boot.failure.read_text())
    words = "0 MB free, more needed: remove files, or give the node a larger disk (disk_gb)"
    assert (told["step"], told["error"], told["lines"]) == ("disk", f"no space left on {folder}: {words}", [])


def test_the_disk_that_is_full_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {str(tmp_path): 900, "/opt": 800, "/tmp": 0}
    inodes = dict.fromkeys(free, (100, 50))

    def statvfs(folder: str) -> SimpleNamespace:
        files, left = inodes[folder]
        return SimpleNamespace(f_bavail=free[folder], f_frsize=10**6, f_files=files, f_favail=left)

    monkeypatch.setattr(os, "statvfs", statvfs)
    # The folder alone is looked at where no program has said that a disk is full.
    assert no_space(str(tmp_path)) is None
    said = "E: write (28: No space left on device)"
    assert (no_space(str(tmp_path), said) or "").startswith("no space left on /tmp: 0 MB free, more needed")
    free["/tmp"] = 850
    assert (no_space(str(tmp_path), said) or "").startswith("no space left on /opt: 800 MB free, more needed")
    # Of many small files; btrfs counts none.
    inodes |= {str(tmp_path): (100, 0), "/tmp": (0, 0)}
    assert no_space(str(tmp_path), said) == f"no inodes left on {tmp_path}: remove files"
    assert no_space(str(tmp_path)) == f"no inodes left on {tmp_path}: remove files"
    # All on one disk.
    inodes[str(tmp_path)] = (100, 50)
    free |= {str(tmp_path): 800, "/tmp": 800}
    assert (no_space(str(tmp_path), said) or "").startswith(f"no space left on {tmp_path}: 800 MB")


def test_what_may_help_is_tried_again(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    boot.write(step("packages", attempts=3, apt=["git"], stamp=str(tmp_path / "stamp")))
    count = tmp_path / "count"
    program(tmp_path / "bin", "dpkg", "exit 0")
    program(tmp_path / "bin", "apt-get", f'echo x >>{count}; [ "$(wc -l <{count})" -ge 2 ]')
    assert boot.run(path=f"{tmp_path / 'bin'}:{os.environ['PATH']}").returncode == 0
    assert [state for _, state in boot.states()] == ["started", "failed", "done"]
    assert boot.lines()[1]["again"] is True
    assert json.loads((tmp_path / "stamp").read_text()) == ["git"]


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    boot.write(step("packages", timeout_s=1, attempts=3, apt=["git"], stamp=str(tmp_path / "stamp")))
    pids = tmp_path / "pids"
    program(tmp_path / "bin", "dpkg", "exit 0")
    # It ignores that it is asked to end, as does its child.
    program(
        tmp_path / "bin", "apt-get", f"trap '' TERM; sleep 600 & echo $! >>{pids}; echo $$ >>{pids}; echo begun; wait"
    )
    done = boot.run(path=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 1
    failed = boot.lines()[-1]
    assert failed["error"] == "it was not done within 1 s and was ended"
    assert failed["lines"][-1] == "begun"
    assert [state for _, state in boot.states()] == ["started", "failed"]
    _gone([int(pid) for pid in pids.read_text().split()])


def _gone(pids: list[int]) -> None:
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while living := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < deadline, living
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_a_step_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    boot.write(step("packages", timeout_s=30, apt=["git"], stamp=str(tmp_path / "stamp")))
    program(tmp_path / "bin", "dpkg", "exit 0")
    program(tmp_path / "bin", "apt-get", f"sleep 25 & echo $! >{tmp_path / 'pid'}; exit 0")
    assert boot.run(path=f"{tmp_path / 'bin'}:{os.environ['PATH']}").returncode == 0
    assert boot.lines()[-1]["seconds"] < 20
    os.kill(int((tmp_path / "pid").read_text()), 9)


def test_output_and_log_are_bounded(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    boot.write(step("packages", apt=["git"], stamp=str(tmp_path / "stamp")))
    program(tmp_path / "bin", "dpkg", "exit 0")
    program(tmp_path / "bin", "apt-get", "seq 200000; head -c 3000000 /dev/zero | tr '\\0' x; exit 1")
    boot.log.parent.mkdir()
    boot.log.write_text("{}\n" * 400_000)
    assert boot.run(path=f"{tmp_path / 'bin'}:{os.environ['PATH']}").returncode == 1
    failed = boot.lines()[-1]
    assert len(json.dumps(failed)) < 10_000
    assert boot.log.stat().st_size < 20_000
    assert boot.log.with_name("boot.jsonl.1").exists()


def test_a_defect_of_a_step_is_a_failed_step(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    boot.write(step("user", nobody="knows this"))
    assert boot.run().returncode == 1
    assert boot.lines()[-1]["error"].startswith("TypeError: ")
    assert any("Traceback" in line for line in boot.lines()[-1]["lines"])


def test_a_node_configuration_that_cannot_be_read_fails_with_its_name(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path)
    boot.node.write_text("{")
    boot.write(step("node_name", node=str(boot.node), stands_for="a", prefix="b", instance_id="/nonexistent"))
    assert boot.run().returncode == 1
    status = Status.loads(boot.status.read_text())
    assert status.state == "failed" and status.error is not None and "JSONDecodeError" in status.error[1]
