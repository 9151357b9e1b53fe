"""Bad input through the command line: a message that says what would work, the exit code, and nothing created."""

from __future__ import annotations

import os
import re
import signal
import socket
import textwrap
from pathlib import Path

import pytest
from terraform_projects.commands import copy_quickstart, processes, skyinfra, status, until

import skyinfra as sky

HEAD = "import skyinfra as sky\nfrom cdktf import App\napp = App()\n"


def project_with(folder: Path, program: str) -> Path:
    project = copy_quickstart(folder)
    (project / "main.py").write_text(HEAD + textwrap.dedent(program) + "\napp.synth()\n")
    return project


def stack_of(*pools: str) -> str:
    return f"sky.FleetStack(app, 'quickstart', pools=[{', '.join(pools)}])"


def pool(fields: str) -> str:
    return f"sky.ComputePool(provider=sky.Local(simulate=True), {fields})"


DECLARATIONS = {
    "unknown accelerator": (pool("accelerator='H10O'"), ["accelerator", "H10O", "H100"]),
    "layout that does not fit": (pool("accelerator='H100/4g.40gb*2'"), ["accelerator", "4g.40gb"]),
    "concurrency": (
        pool("accelerator='H100/3g.40gb', worker=sky.Worker(concurrency=3)"),
        ["worker.concurrency", "given: 3", "set it to 2"],
    ),
    "unknown field": (pool("accelarator='H100'"), ["ComputePool.accelarator", "Did you mean accelerator?"]),
    "two pools of one name": (f"{pool('nodes=1')}, {pool('nodes=2')}", ["pools[1].name", "given: 'pool'"]),
    "an interruptible instance without a bid": (
        "sky.ComputePool(provider=sky.VastAI(), accelerator='H100', spot=True)",
        ["pools[0].provider.bid", "sky.VastAI(bid=0.4)"],
    ),
}


def aws(fields: str, **provider: object) -> str:
    given = ", ".join(f"{name}={value}" for name, value in provider.items())
    return f"sky.ComputePool(provider=sky.AWS({given}), {fields})"


# Refused before AWS is asked for anything.
ON_AWS = {
    "a count without a machine": (
        aws("accelerator='H100:4'"),
        ["aws offers no H100:4", "p5.4xlarge (H100:1) at $6.88/h"],
    ),
    "an accelerator it lacks": (aws("accelerator='MI300X'"), ["aws offers no MI300X", "Elsewhere: digitalocean"]),
    "a price": (aws("accelerator='H100:8', max_hourly_cost=10.0"), ["Without max_hourly_cost: aws p5.48xlarge"]),
    "user data that are too long": (
        aws("image=sky.Image(run=[__import__('random').Random(1).randbytes(30_000).hex()])"),
        ["bytes compressed, of 16384 that are taken", "The most of it: /etc/skyinfra/node.json"],
    ),
    "a capacity block with spot": (
        aws("accelerator='H100:8', spot=True", capacity="sky.CapacityBlock(id='cr-1')"),
        ["pools[0].provider.capacity", "Leave out spot=True, or capacity."],
    ),
    "EFA on a machine without": (
        aws("accelerator='L4'", efa=True),
        ["g6.xlarge has no Elastic Fabric", "With L4: g6."],
    ),
    "a VPC without subnets": (
        aws("accelerator='L4'", vpc_id="'vpc-1'"),
        ["AWS.subnet_ids", "Give subnet_ids of vpc-1"],
    ),
}
DECLARATIONS |= ON_AWS
# One of a pool, and one of the stack: the others come the same way.
ALWAYS = ("unknown accelerator",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in DECLARATIONS]
)
def test_a_declaration_that_cannot_be(name: str, tmp_path: Path) -> None:
    pools, words = DECLARATIONS[name]
    project = project_with(tmp_path, stack_of(pools))
    result = skyinfra(project, "deploy", "--auto-approve", check=False)
    assert result.returncode == 2, result.stderr
    assert re.search("^error: ", result.stderr, re.MULTILINE)
    for word in words:
        assert word in result.stderr
    assert len(result.stderr) < 3000  # what is too long is not shown
    assert not list((project / "cdktf.out").rglob("*.json"))
    assert not (project / ".skyinfra").exists()


@pytest.mark.slow
def test_a_program_that_raises(tmp_path: Path) -> None:
    project = project_with(tmp_path, "def declare():\n    raise ValueError('no such thing')\ndeclare()")
    result = skyinfra(project, "synth", check=False)
    assert result.returncode == 1
    assert "`python main.py` failed: ValueError: no such thing" in result.stderr
    assert "main.py" in result.stderr and "line 5" in result.stderr


def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    (project / "main.py").unlink()
    result = skyinfra(project, "synth", check=False)
    assert result.returncode == 1
    assert "main.py" in result.stderr


def test_no_project(tmp_path: Path) -> None:
    result = skyinfra(tmp_path, "deploy", check=False)
    assert result.returncode == 2
    assert "cdktf.json" in result.stderr and "skyinfra init" in result.stderr


@pytest.mark.slow
def test_a_stack_that_does_not_exist(tmp_path: Path) -> None:
    result = skyinfra(copy_quickstart(tmp_path), "deploy", "quickstrat", "--auto-approve", check=False)
    assert result.returncode == 2
    assert "Did you mean quickstart?" in result.stderr


def test_a_fleet_that_is_not_deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = copy_quickstart(tmp_path)
    skyinfra(project, "synth")
    monkeypatch.chdir(project)
    with pytest.raises(sky.FleetNotDeployed, match="skyinfra deploy quickstart"):
        sky.connect("quickstart", "mig")
    assert "not deployed" in skyinfra(project, "status", "quickstart/mig").stdout
    assert "nothing to destroy" in skyinfra(project, "destroy", "--auto-approve").stdout


# As tests/integration/test_cost_shown.py sees it, of a real stack.
@pytest.mark.slow
def test_nobody_to_ask(tmp_path: Path) -> None:
    result = skyinfra(copy_quickstart(tmp_path), "deploy", check=False)
    assert result.returncode == 2
    assert "--auto-approve" in result.stderr


@pytest.mark.slow
def test_no_terraform_program(tmp_path: Path) -> None:
    project = copy_quickstart(tmp_path)
    result = skyinfra(project, "deploy", "--auto-approve", check=False, TERRAFORM_BINARY_NAME="no-such-terraform")
    assert result.returncode == 1
    assert "TERRAFORM_BINARY_NAME" in result.stderr
    assert not (project / ".skyinfra").exists()


def test_wrong_usage(tmp_path: Path) -> None:
    assert skyinfra(tmp_path, "deploi", check=False).returncode == 2
    assert skyinfra(tmp_path, "run", "a/b", "no-such.py", check=False).returncode == 2


@pytest.mark.slow
def test_a_declared_accelerator_that_is_not_there(tmp_path: Path) -> None:
    project = project_with(tmp_path, stack_of("sky.ComputePool(provider=sky.Local(), accelerator='H100')"))
    result = skyinfra(project, "deploy", "--auto-approve", check=False)
    try:
        assert result.returncode == 1
        assert "H100" in result.stderr and "NVIDIA" in result.stderr
        assert "skyinfra destroy" in result.stderr
        assert not processes(project, "skyinfra.runner")
    finally:
        skyinfra(project, "destroy", "--auto-approve")
    assert not (project / ".skyinfra").exists()


@pytest.mark.slow
def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        project = project_with(tmp_path, stack_of(f"sky.ComputePool(provider=sky.Local(port={port}))"))
        result = skyinfra(project, "deploy", "--auto-approve", check=False)
        assert result.returncode == 1
        assert str(port) in result.stderr
    # With the port free again the same command finishes what the first one began.
    deployed = skyinfra(project, "deploy", "--auto-approve")
    assert "quickstart/pool: 1 node, 1 slot, head" in deployed.stdout
    assert status(project)["pools"][0]["head"]["port"] == port
    skyinfra(project, "destroy", "--auto-approve")


@pytest.mark.slow
def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    project = project_with(tmp_path, stack_of("sky.ComputePool(provider=sky.Local())"))
    (project / ".skyinfra").write_text("in the way")
    result = skyinfra(project, "deploy", "--auto-approve", check=False)
    assert result.returncode == 1
    assert "cannot be made" in result.stderr
    (project / ".skyinfra").unlink()
    skyinfra(project, "destroy", "--auto-approve")


@pytest.mark.slow
def test_a_failed_command_of_the_image_shows_its_last_words(tmp_path: Path) -> None:
    image = "sky.Image(run=['echo the reason >&2; exit 3'])"
    project = project_with(tmp_path, stack_of(f"sky.ComputePool(provider=sky.Local(), image={image})"))
    result = skyinfra(project, "deploy", "--auto-approve", check=False)
    assert result.returncode == 1
    assert "the reason" in result.stderr
    skyinfra(project, "destroy", "--auto-approve")
    until(lambda: not processes(project))


@pytest.mark.slow
def test_a_dead_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = project_with(tmp_path, stack_of("sky.ComputePool(provider=sky.Local())"))
    skyinfra(project, "deploy", "--auto-approve")
    try:
        # As a reboot of this machine ends them: a runner that was killed alone comes back.
        for name in ("watchdog.pid", "runner.pid"):
            pid = int((project / ".skyinfra" / "quickstart" / "pool" / "pool-0" / name).read_text())
            os.killpg(pid, signal.SIGKILL)
        until(lambda: not processes(project, "skyinfra.runner"))
        monkeypatch.chdir(project)
        with pytest.raises(sky.FleetUnreachable) as caught:
            sky.connect("quickstart", timeout=5)
        assert "127.0.0.1" in str(caught.value)
        found = status(project)
        assert found["pools"][0]["problem"]
        assert found["pools"][0]["nodes"][0]["state"] == "not reachable"
        result = skyinfra(project, "run", "quickstart", "main.py", check=False)
        assert result.returncode == 1
        assert "module.pool.terraform_data.head" in skyinfra(project, "plan", "--json").stdout
        # A deploy starts local nodes that died, after a reboot of this machine for instance.
        skyinfra(project, "deploy", "--auto-approve")
        assert status(project)["pools"][0]["nodes"][0]["state"] == "ready"
    finally:
        skyinfra(project, "destroy", "--auto-approve")
    assert not (project / ".skyinfra").exists()
