"""Machines that stand already, for real: sshd, systemd, Terraform, tasks, another layout, and given back as found."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from booted_nodes import image as bed_image
from booted_nodes.fleet import Bed
from booted_nodes.hosts import Hosts, answers, traces
from support import ROOT
from tasks_on_nodes.booted import look
from terraform_projects.commands import environment, skyinfra, until

from skyinfra.client import Pool, open_pool
from skyinfra.terraform.project import Project

pytestmark = pytest.mark.xdist_group("booted-hosts")


@pytest.fixture
def hosts(bed: Bed, tmp_path: Path, terraform_program: str) -> Iterator[Hosts]:
    made = Hosts(bed, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def deployed() -> Iterator[Callable[..., str]]:
    """``deployed(project)``: what the deploy said. It is destroyed after the test."""
    with ExitStack() as stack:

        def deploy(here: Path, *, check: bool = True) -> str:
            done = skyinfra(here, "deploy", "--auto-approve", check=check)
            stack.callback(skyinfra, here, "destroy", "--auto-approve", check=False)
            assert check or done.returncode != 0
            return " ".join((done.stdout + done.stderr).replace("│", " ").split())

        yield deploy


def opened(here: Path) -> Pool:
    return open_pool(Project.find(here).stack("lab").fleet("lab"))


def slots(here: Path) -> dict[str, int]:
    """Tasks that ran on every slot, by node; as another user than root, on a device each."""
    with opened(here) as pool:
        seen = look() @ pool
    assert all(uid != 0 for _, _, uid, _ in seen)
    assert len({(node, device) for node, _, _, device in seen}) == len(seen)
    names = [node for node, *_ in seen]
    return {name: names.count(name) for name in sorted(set(names))}


def test_a_host_becomes_a_node_and_is_given_back(
    hosts: Hosts, deployed: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = hosts.start("gpu1")
    # A greeting at each login, in words that an answer may have, and a command for logins in the configuration here.
    machine.execute("sh", "-c", "printf 'echo ready; echo Welcome; echo\\n' | tee /root/.bashrc >/home/ubuntu/.bashrc")
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh/config").write_text("Host *\n  RemoteCommand tmux attach\n  RequestTTY yes\n")
    monkeypatch.setenv("HOME", str(home))
    before = traces(machine)
    here = hosts.project(hosts.host(machine, "ubuntu"), accelerator="H100/3g.40gb")
    deployed(here)
    name = f"lab-{machine.address.replace('.', '-')}"
    assert slots(here) == {name: 2}
    # The secret is root's alone, and in no list of processes, log or file of whoever logs in.
    secret = Project.find(here).stack("lab").fleet("lab").secret
    there = machine.execute("grep", "-rlF", secret, "/etc", "/opt", "/home", "/tmp", "/var", check=False).stdout.split()
    assert sorted(there) == ["/etc/skyinfra/secret", "/opt/skyinfra/delivered/secret"]
    assert {machine.execute("stat", "-c", "%U%a", path).stdout.strip() for path in there} == {"root600"}
    started = machine.show("skyinfra-runner", "MainPID")
    assert not re.search(r"^  [-+~±] ", skyinfra(here, "plan").stdout, re.MULTILINE)
    assert machine.show("skyinfra-runner", "MainPID") == started
    skyinfra(here, "destroy", "--auto-approve")
    assert traces(machine) == before


@pytest.mark.slow
def test_a_host_by_its_name_and_a_server_on_it(hosts: Hosts, deployed: Callable[..., str], tmp_path: Path) -> None:
    """`ssh`, `rsync` and `scp` by name, through real sshd; and a web server of the host at a port of this machine."""
    bed_image.install_programs({"ssh": "openssh-client", "rsync": "rsync"})
    machine = hosts.start("gpu1")
    deployed(here := hosts.project(hosts.host(machine, "ubuntu"), accelerator="H100/3g.40gb"))
    node = f"lab-{machine.address.replace('.', '-')}"
    host = f"lab-lab-{node}"
    home = tmp_path / "home"
    home.mkdir()
    assert skyinfra(here, "ssh", "lab/lab", "--config", HOME=str(home)).stdout == f"{host}\n"
    known = tmp_path / "known_hosts"
    known.write_text(f"{machine.address} {hosts.key_of(machine)}\n")
    options = ["-F", str(home / ".ssh/config"), "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={known}"]

    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert run("ssh", *options, host, "whoami") == "ubuntu\n"
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "data").write_bytes(os.urandom(10**6))
    run("rsync", "-a", "-e", shlex.join(["ssh", *options]), f"{sent}/", f"{host}:there/")
    run("scp", "-q", *options, f"{host}:there/data", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == (sent / "data").read_bytes()

    serve = ("python3", "-m", "http.server", "8123", "--bind", "127.0.0.1", "--directory", "/home/ubuntu/there")
    machine.execute("systemd-run", "--unit=web", *serve)
    with opened(here) as pool:
        forward = pool.forward(node, 8123)

        def read() -> bytes | None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{forward.port}/data") as found:
                return bytes(found.read())
            return None

        assert until(read, seconds=30) == (sent / "data").read_bytes()
    machine.execute("systemctl", "stop", "web")
    skyinfra(here, "destroy", "--auto-approve", HOME=str(home))
    assert host not in (home / ".ssh/skyinfra.config").read_text()


@pytest.mark.slow
def test_the_lab_is_as_it_is_written(hosts: Hosts, tmp_path: Path) -> None:
    """docs/tutorials/lab.md, with the address and the login of a booted machine, and packages from the bed."""
    machine = hosts.start("gpu1", gpus=",".join(["h100_80gb"] * 8))
    before = traces(machine)
    here, colleague = tmp_path / "lab", tmp_path / "colleague"
    text = (ROOT / "docs" / "tutorials" / "lab.md").read_text()
    for folder in (here, colleague):
        folder.mkdir()
    for name, body in re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', text, re.DOTALL):
        (here / name).write_text(body)
    program, (changed,) = here / "main.py", re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    host = ", ".join(f"{key}={value!r}" for key, value in hosts.host(machine, "ubuntu").items())
    pool = "provider=sky.SSH(hosts=[HOST]),"
    for old, new in (
        ('sky.Host("10.0.0.7", user="ubuntu")', f"sky.Host({host})"),
        (pool, f'{pool} image=sky.Image(wheelhouse="{hosts.index}"),'),
    ):
        assert program.read_text().count(old) == 1
        program.write_text(program.read_text().replace(old, new))
    commands = [line[2:].split() for line in text.splitlines() if line.startswith("$ skyinfra ")]
    deploy, status, manifest, ssh, plan, again, destroy = [each[1:] for each in commands]
    try:
        skyinfra(here, *deploy)
        assert skyinfra(here, *status).stdout.count("  ready") == 15
        assert manifest[2:] == [">", "gpus.json"]
        (colleague / "gpus.json").write_text(skyinfra(here, *manifest[:2]).stdout)
        (colleague / "gpus.json").chmod(0o600)
        shutil.copy2(here / "task.py", colleague)
        words = [sys.executable, "task.py"]
        done = subprocess.run(words, cwd=colleague, env=environment(), capture_output=True, text=True, check=False)
        assert done.stdout == "10 GB 40 GB 80 GB\n", done.stderr
        assert skyinfra(here, *ssh, HOME=str(tmp_path)).stdout.startswith("lab-gpus-")
        program.write_text(re.sub(r"^SHARED = .*\n", changed, program.read_text(), flags=re.MULTILINE))
        assert "1 slot destroyed, 2 created, 1 kept; 7 GPUs stay as they are" in skyinfra(here, *plan).stdout
        skyinfra(here, *again)
        until(lambda: skyinfra(here, *status).stdout.count("  ready") == 16, seconds=90)
    finally:
        skyinfra(here, *destroy, HOME=str(tmp_path))
    assert traces(machine) == before


@pytest.mark.slow
def test_two_hosts_another_layout_another_host_and_back(hosts: Hosts, deployed: Callable[..., str]) -> None:
    machines = [hosts.start(f"gpu{number}") for number in (1, 2, 3)]
    before = [traces(machine) for machine in machines]
    declared = [hosts.host(machines[0]), hosts.host(machines[1], "ubuntu"), hosts.host(machines[2])]
    names = [f"lab-{machine.address.replace('.', '-')}" for machine in machines]
    here = hosts.project(*declared[:2], accelerator="H100/3g.40gb")
    deployed(here)
    assert slots(here) == dict.fromkeys(names[:2], 2)
    started = [machine.show("skyinfra-runner", "MainPID") for machine in machines[:2]]

    here = hosts.project(*declared[:2], accelerator="H100/1g.10gb")
    said = deployed(here)
    assert re.search(rf"{names[0]} GPU 0, {names[1]} GPU 0|2 GPUs", said) and "before" in said, said
    until(lambda: slots(here) == dict.fromkeys(names[:2], 7), seconds=60)
    assert [machine.show("skyinfra-runner", "MainPID") for machine in machines[:2]] == started

    # One comes, one goes: the head is disturbed by neither.
    here = hosts.project(declared[0], declared[2], accelerator="H100/1g.10gb")
    deployed(here)
    until(lambda: slots(here) == dict.fromkeys((names[0], names[2]), 7), seconds=60)
    assert machines[0].show("skyinfra-runner", "MainPID") == started[0]
    assert traces(machines[1]) == before[1]

    # What is declared and reaches a node when it is made sets the hosts up again.
    here = hosts.project(declared[0], declared[2], accelerator="H100/1g.10gb", image='env={"A": "1"}')
    deployed(here)
    until(lambda: slots(here) == dict.fromkeys((names[0], names[2]), 7), seconds=60)
    assert machines[0].show("skyinfra-runner", "MainPID") != started[0]

    # A host that is gone stops the destroy, until it is let go.
    machines[2].kill()
    failed = skyinfra(here, "destroy", "--auto-approve", check=False)
    assert failed.returncode != 0 and f"SKYINFRA_GONE={machines[2].address}" in failed.stdout + failed.stderr
    skyinfra(here, "destroy", "--auto-approve", SKYINFRA_GONE=machines[2].address)
    assert traces(machines[0]) == before[0]


@pytest.mark.slow
def test_what_cannot_be_a_node_is_refused_and_left_alone(
    hosts: Hosts, deployed: Callable[..., str], tmp_path: Path
) -> None:
    machine = hosts.start("gpu1")
    before = traces(machine)
    other = hosts.key.with_name("other")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    wrong = " ".join(other.with_suffix(".pub").read_text().split()[:2])
    said = deployed(hosts.project(hosts.host(machine, host_key=wrong)), check=False)
    assert "has another host key than is declared or known" in said
    unknown = hosts.host(machine)
    del unknown["host_key"]
    said = deployed(hosts.project(unknown), check=False)
    assert "is not known" in said and f"ssh-keyscan {machine.address}" in said
    said = deployed(hosts.project(hosts.host(machine, "plain")), check=False)
    assert "has no sudo without a password" in said
    said = deployed(hosts.project(hosts.host(machine, key_file=str(other))), check=False)
    assert "cannot be reached by ssh" in said and "Permission denied" in said
    assert traces(machine) == before
    machine.execute("mv", "/usr/bin/python3", "/usr/bin/python3.away")
    said = deployed(hosts.project(hosts.host(machine)), check=False)
    assert "there is no python3" in said
    machine.execute("mv", "/usr/bin/python3.away", "/usr/bin/python3")
    machine.execute("mkdir", "-p", "/etc/skyinfra")
    (machine.root / "etc/skyinfra/fleet").write_text("old/mig 1234\n")
    said = deployed(hosts.project(hosts.host(machine)), check=False)
    assert "it is a node of the fleet old/mig already" in said
    skyinfra(tmp_path / "project", "destroy", "--auto-approve")
    assert machine.read("/etc/skyinfra/fleet") == "old/mig 1234\n", "a fleet of somebody else was ended"


@pytest.mark.slow
def test_a_host_is_reached_through_another_one(hosts: Hosts, deployed: Callable[..., str]) -> None:
    bastion, machine = hosts.start("bastion"), hosts.start("gpu1")
    machine.execute("sh", "-c", f"echo ListenAddress {machine.address} >/etc/ssh/sshd_config.d/listen.conf")
    here = hosts.project(hosts.host(machine, "ubuntu", via=hosts.host(bastion, "plain")))
    deployed(here)
    assert sum(slots_of_cpu(here).values()) >= 1
    came = machine.execute("journalctl", "-u", "ssh", "--no-pager").stdout
    accepted = [line for line in came.splitlines() if "Accepted publickey" in line]
    assert accepted
    assert all(f"from {bastion.address}" in line for line in accepted), accepted
    skyinfra(here, "destroy", "--auto-approve")
    assert "/etc/skyinfra" not in traces(machine)[0]


def slots_of_cpu(here: Path) -> dict[str, int]:
    with opened(here) as pool:
        names = [slot.node for slot in pool.slots()]
    return {name: names.count(name) for name in names}


@pytest.mark.slow
def test_a_host_that_goes_away_in_the_middle_is_said(hosts: Hosts, deployed: Callable[..., str]) -> None:
    machine = hosts.start("gpu1")
    here = hosts.project(hosts.host(machine), image='run=["sleep 20"]')

    def cut() -> None:
        until(lambda: machine.read("/etc/skyinfra/fleet"), seconds=120)
        machine.kill()

    thread = threading.Thread(target=cut)
    thread.start()
    said = deployed(here, check=False)
    thread.join()
    assert machine.address in said and ("cannot be reached" in said or "is not ready" in said)
    machine.start()
    until(lambda: answers(machine.address), seconds=60)
    deployed(here)
    skyinfra(here, "destroy", "--auto-approve")
