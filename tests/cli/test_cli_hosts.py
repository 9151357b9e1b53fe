"""``skyinfra ssh --config``: nodes by name for ssh and what uses it, beside the configuration that is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.protocol.manifest import Endpoint, Login, Manifest, ManifestNode, Via
from skyinfra.ssh import ways
from skyinfra.ssh.hosts import forget_hosts, write_hosts

HEAD = ManifestNode("p-0", "i-0", "10.0.0.1", "203.0.113.1", "us-east-1a", head=True)
OTHER = ManifestNode("p-1", "i-1", "10.0.0.2", None, "us-east-1a")
FLEET = Manifest(1, "s", "p", "aws", Endpoint("10.0.0.1", 8786), (HEAD, OTHER), (), "x" * 32)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses that answer at port 22."""
    found = {"203.0.113.1"}
    monkeypatch.setattr(ways, "_answers", found.__contains__)
    return found


def configure(fleet: Manifest, file: Path, *arguments: str) -> Any:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(fleet.to_json()))
    return CliRunner().invoke(app, ["ssh", str(file), "--config", *arguments])


def hosts(home: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (home / ".ssh/skyinfra.config").read_text().splitlines():
        if line.startswith("Host "):
            lines = found.setdefault(line.split()[1], [])
        elif line.startswith("    "):
            lines.append(line.strip())
    return found


def effective(home: Path, host: str) -> dict[str, str]:
    """The options that OpenSSH reads from it."""
    if shutil.which("ssh") is None:
        pytest.skip("there is no ssh")
    command = ["ssh", "-G", "-F", str(home / ".ssh/config"), host]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Some versions put the addresses of jumps into brackets.
    found = done.stdout.replace("[", "").replace("]", "")
    return dict(line.split(" ", 1) for line in found.splitlines())


def test_nodes_are_hosts_of_ssh(home: Path, answering: set[str], tmp_path: Path) -> None:
    done = configure(FLEET, tmp_path / "fleet.json")
    assert done.exit_code == 0, done.exception
    assert done.stdout.splitlines()[:2] == ["s-p-p-0", "s-p-p-1"]
    # ssh takes the home from the list of accounts, as nothing else here does.
    assert f"ssh -F {home}/.ssh/config" in done.output
    found = effective(home, "s-p-p-0")
    assert (found["hostname"], found["user"], found["port"]) == ("203.0.113.1", "ubuntu", "22")
    found = effective(home, "s-p-p-1")
    assert (found["hostname"], found["proxyjump"]) == ("10.0.0.2", "ubuntu@203.0.113.1")
    assert effective(home, "elsewhere")["hostname"] == "elsewhere"
    assert [oct((home / ".ssh" / name).stat().st_mode & 0o777) for name in (".", "config", "skyinfra.config")] == [
        *("0o700", "0o600", "0o600")
    ]


def test_the_login_that_a_host_declares(home: Path, answering: set[str], tmp_path: Path) -> None:
    login = Login("me", 2222, str(tmp_path / "my keys/lab"), "you@bastion:2200")
    fleet = replace(FLEET, provider="ssh", nodes=(replace(HEAD, ssh=login), replace(OTHER, ssh=Login())))
    configure(fleet, tmp_path / "fleet.json")
    found = effective(home, "s-p-p-0")
    assert (found["user"], found["port"], found["proxyjump"]) == ("me", "2222", "you@bastion:2200")
    assert found["identityfile"] == login.key_file
    # ssh takes the rest by itself.
    assert hosts(home)["s-p-p-1"] == ["HostName 10.0.0.2"]
    configure(fleet, tmp_path / "fleet.json", "--user", "root")
    assert effective(home, "s-p-p-0")["user"] == "root"


def test_the_way_of_the_cloud_where_no_port_is_open(home: Path, answering: set[str], tmp_path: Path) -> None:
    answering.clear()
    configure(FLEET, tmp_path / "fleet.json")
    assert hosts(home)["s-p-p-1"] == [
        "HostName i-1",
        "User ubuntu",
        "ProxyCommand aws ssm start-session --target=i-1 --region=us-east-1 --document-name AWS-StartSSHSession "
        "--parameters portNumber=%p",
    ]
    nodes = tuple(replace(node, zone="europe-west4-a") for node in FLEET.nodes)
    via = Via("iap", "p-0-1a2b3c", zone="europe-west4-a", project="lab")
    gcp = replace(FLEET, provider="gcp", nodes=nodes, via=via)
    configure(gcp, tmp_path / "fleet.json")
    assert hosts(home)["s-p-p-1"] == [
        "HostName p-1-1a2b3c",
        "User ubuntu",
        "ProxyCommand gcloud compute start-iap-tunnel p-1-1a2b3c %p --listen-on-stdin --verbosity=warning "
        "--zone=europe-west4-a --project=lab",
    ]
    behind = replace(FLEET, provider="verda", via=Via("ssh", "me@gateway", port=2200))
    configure(behind, tmp_path / "fleet.json")
    assert hosts(home)["s-p-p-1"] == ["HostName 10.0.0.2", "User root", "ProxyJump me@gateway:2200"]


def test_who_is_not_reached_is_left_out_and_said(home: Path, answering: set[str], tmp_path: Path) -> None:
    far = replace(
        FLEET, provider="verda", nodes=(replace(HEAD, public_address=None), replace(OTHER, address="10.0.0.3"))
    )
    refused = configure(far, tmp_path / "fleet.json")
    assert isinstance(refused.exception, sky.NotSupported) and "nothing answers at port 22" in str(refused.exception)
    assert not (home / ".ssh").exists()
    answering.add("10.0.0.3")
    done = configure(far, tmp_path / "fleet.json")
    assert set(hosts(home)) == {"s-p-p-1"}
    assert "left out, for nothing answers at their port 22: p-0" in done.output


BEFORE = b"# mine\r\nHost *\n\tUser me # \xe9\n\n  Include nothing\nHost s-p-p-0\n  Port 1\n\n# no newline at the end"


def test_what_was_there_stays_byte_for_byte(home: Path, answering: set[str], tmp_path: Path) -> None:
    (home / "dotfiles").mkdir()
    (home / ".ssh").mkdir(mode=0o700)
    config = home / ".ssh/config"
    (home / "dotfiles/ssh").write_bytes(BEFORE)
    (home / "dotfiles/ssh").chmod(0o640)
    config.symlink_to("../dotfiles/ssh")
    for _ in range(3):
        configure(FLEET, tmp_path / "fleet.json")
        include, _, rest = config.read_bytes().partition(b"\n")
        assert include.decode() == f'Include "{home}/.ssh/skyinfra.config"' and rest == BEFORE
    assert config.is_symlink() and (home / "dotfiles/ssh").stat().st_mode & 0o777 == 0o640
    # It counts first, and stands in no host.
    assert effective(home, "s-p-p-0")["user"] == "ubuntu"
    assert sorted(each.name for each in (home / ".ssh").iterdir()) == ["config", "skyinfra.config"]


def test_nodes_that_vanish_vanish_and_other_fleets_stay(home: Path, answering: set[str], tmp_path: Path) -> None:
    configure(replace(FLEET, pool="q"), tmp_path / "q.json")
    configure(FLEET, tmp_path / "fleet.json")
    assert set(hosts(home)) == {"s-p-p-0", "s-p-p-1", "s-q-p-0", "s-q-p-1"}
    configure(replace(FLEET, nodes=(HEAD,)), tmp_path / "fleet.json")
    assert set(hosts(home)) == {"s-p-p-0", "s-q-p-0", "s-q-p-1"}


def test_projects_with_the_same_names_do_not_overwrite_one_another(
    home: Path, answering: set[str], tmp_path: Path
) -> None:
    answering.add("203.0.113.9")
    mine, theirs = tmp_path / "mine/fleet.json", tmp_path / "theirs/fleet.json"
    other = replace(FLEET, nodes=(replace(HEAD, public_address="203.0.113.9"),))
    configure(FLEET, mine)
    refused = configure(other, theirs)
    assert isinstance(refused.exception, sky.InvalidField)
    assert f"s/p of {mine} has hosts of these names" in str(refused.exception) and "--replace" in str(refused.exception)
    assert hosts(home)["s-p-p-0"][0] == "HostName 203.0.113.1"
    configure(other, theirs, "--replace")
    assert hosts(home)["s-p-p-0"][0] == "HostName 203.0.113.9" and set(hosts(home)) == {"s-p-p-0"}
    # Other fleets whose names make the same hosts.
    twin = replace(other, stack="s-p", pool="p", nodes=(replace(HEAD, name="0"),))
    assert isinstance(configure(twin, tmp_path / "twin.json").exception, sky.InvalidField)
    # What is gone keeps no names.
    theirs.unlink()
    assert configure(FLEET, mine).exit_code == 0
    assert hosts(home)["s-p-p-0"][0] == "HostName 203.0.113.1"


def test_a_destroyed_stack_has_no_hosts(home: Path, answering: set[str], tmp_path: Path) -> None:
    forget_hosts(tmp_path, "s")
    assert not (home / ".ssh").exists()
    for stack in ("s", "t"):
        fleet = replace(FLEET, stack=stack)
        assert len(write_hosts(str(tmp_path), fleet, ways.ways(fleet, None), replace=False)) == 2
    configure(replace(FLEET, stack="u"), tmp_path / "fleet.json")
    forget_hosts(tmp_path / "elsewhere", "t")
    forget_hosts(tmp_path, "s")
    assert set(hosts(home)) == {"t-p-p-0", "t-p-p-1", "u-p-p-0", "u-p-p-1"}


@pytest.mark.parametrize(
    "fleet",
    [
        replace(FLEET, nodes=(replace(HEAD, public_address="203.0.113.1\n    ProxyCommand touch /tmp/x"),)),
        replace(FLEET, nodes=(replace(HEAD, public_address="-oProxyCommand=touch"),)),
        replace(FLEET, nodes=(replace(HEAD, public_address="$(touch x)"),)),
        replace(FLEET, nodes=(replace(HEAD, name="*"),)),
        replace(FLEET, nodes=(replace(HEAD, name="x y"),)),
        replace(FLEET, stack="*", pool="!"),
        replace(FLEET, nodes=(replace(HEAD, ssh=Login(user="me\nProxyCommand x")),)),
        replace(FLEET, nodes=(replace(HEAD, ssh=Login(key_file='a"\nProxyCommand x "')),)),
        replace(FLEET, nodes=(replace(HEAD, ssh=Login(via="you@bastion;touch x")),)),
        replace(FLEET, nodes=(replace(HEAD, public_address=None, id="i-1;touch x"),)),
        replace(FLEET, nodes=(replace(HEAD, public_address=None, zone="%h a"),)),
    ],
    ids=lambda fleet: repr((fleet.stack, fleet.nodes[0].public_address, fleet.nodes[0].name))[:40],
)
def test_a_manifest_runs_nothing_here(
    fleet: Manifest, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "_answers", lambda address: not address.startswith("10."))
    refused = configure(fleet, tmp_path / "fleet.json")
    assert isinstance(refused.exception, sky.InvalidManifest), refused.output
    assert str(refused.exception).startswith(f"{tmp_path / 'fleet.json'}.")
    assert not (home / ".ssh").exists()


def test_what_does_not_go_together(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    for arguments in (("p-0",), ("--", "ls")):
        assert "names all nodes and opens no shell" in str(configure(FLEET, file, *arguments).exception)
    assert "needs --config" in str(CliRunner().invoke(app, ["ssh", str(file), "--replace"]).exception)
    assert "a container has no SSH server" in str(configure(replace(FLEET, provider="container"), file).exception)
    assert "on the machine where it was deployed" in str(configure(replace(FLEET, provider="local"), file).exception)


def test_two_at_once_lose_nothing(home: Path, answering: set[str], tmp_path: Path) -> None:
    """Each process changes the file as the other one left it."""
    program = (
        "import sys; from pathlib import Path; from skyinfra.ssh import hosts, ways\n"
        "from skyinfra.protocol.manifest import Manifest, Login\n"
        "fleet = Manifest.load(Path(sys.argv[1]))\n"
        "for _ in range(30):\n"
        "    found = {'p-0': ways.Way('203.0.113.1', Login())}\n"
        "    made = hosts.write_hosts(sys.argv[1], fleet, found, replace=False)\n"
        "    print(len(made), 'host in', file=sys.stderr)\n"
    )
    running = []
    for number in range(3):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(replace(FLEET, stack=f"s{number}").to_json()))
        command = [sys.executable, "-c", program, str(file)]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    for process in running:
        assert process.communicate(timeout=60)[1].count(b"1 host in") == 30
    assert set(hosts(home)) == {f"s{number}-p-p-0" for number in range(3)}
    assert (home / ".ssh/config").read_text().count("Include") == 1


def test_a_configuration_that_cannot_be_written_is_said(home: Path, answering: set[str], tmp_path: Path) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh/config").mkdir()
    refused = configure(FLEET, tmp_path / "fleet.json")
    assert isinstance(refused.exception, sky.NotSupported) and "cannot be written" in str(refused.exception)
