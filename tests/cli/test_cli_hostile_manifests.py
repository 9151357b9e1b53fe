"""A manifest is data: whatever stands in it, no program of this machine takes it for an option, a command or a file.

Public reports of the kind: CVE-2017-1000117 (git, Mercurial, Subversion: ``ssh://-oProxyCommand=...``), CVE-2023-51385
(OpenSSH: metacharacters in names that a ProxyCommand expands), dora-rs/dora#3133, libfuse/sshfs#362, TigerVNC#2131.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra import port_forward
from skyinfra.cli.app import app
from skyinfra.protocol._schema import FilePath, Form
from skyinfra.protocol.manifest import Endpoint, Login, Manifest, ManifestNode, ManifestSlot, Via
from skyinfra.ssh import ways

LOGIN = Login("me", 2222, "/home/me/.ssh/lab", "you@gate:2200")
HEAD = ManifestNode("p-0", "i-0", "10.0.0.1", "203.0.113.1", "us-east-1a", "p5", head=True, ssh=LOGIN)
FLEET = Manifest(
    *(1, "s", "p", "aws", Endpoint("127.0.0.1", 1), (HEAD,), (ManifestSlot(0, "gpu", "H100", "3g.40gb", 0),), "x" * 32),
    via=Via("ssh", "me@gate", 2200, "us-east-1", "us-east-1a", "lab"),
)
HOSTILE = {
    "an option of ssh": "-oProxyCommand=touch ran",
    "an option without a blank": "-oProxyCommand=touch${IFS}ran",
    "a long option": "--profile=evil",
    "a command of a shell": "`touch ran`",
    "a variable of a shell": "$(touch ran)",
    "another command": "x;touch ran",
    "a line of a configuration": "x\n  ProxyCommand touch ran",
    "a quote": 'x" -oProxyCommand="touch ran',
    "a token of ssh": "%h`touch ran`",
    "a file for the AWS CLI": "file:///etc/passwd",
    "a file for gcloud": "--flags-file=/etc/passwd",
    "an address with an option": "me@-oProxyCommand=touch ran",
    "escapes": "\x1b]0;x\x07",
    "NUL": "x\0y",
    "a folder above": "../../etc",
}
# They are shown, and nothing else: what a slot is called, and the secret, which is derived from.
SHOWN = {"machine_type", "accelerator", "profile", "secret"}
# Every file of the package that starts programs, and whose words they get beside the package's own. A new one is
# written here, and where its words come from elsewhere, tested below.
STARTS = {
    "cli/execute.py": "ssh, aws, gcloud: names, addresses, users of the manifest: tested below",
    "ssh/ways.py": "ssh -G: addresses and users of the manifest, behind its dashes: tested below",
    "port_forward.py": "ssh, aws, gcloud: targets of the manifest: tested below",
    "deploy/missing_nodes.py": "node.sh: the variables that the state has: tests/deploy/test_lost.py",
    "deploy/upgrade.py": "the runner of this machine: the stack's folder",
    "client/notifying.py": "the command of the user",
    "sync/project.py": "git: paths of the project",
    "terraform/program.py": "terraform: the project's own",
    "terraform/project.py": "the app of cdktf.json",
    "notebook/serve_jupyter.py": "on a node, as a task",
    "doctor/vendors.py": "on a node: tools of vendors",
    "first_boot/buckets.py": "on a node: the folder of a bucket, which is declared in a few kinds of letters",
    "first_boot/engine.py": "on a node: the steps of its user data",
    "first_boot/programs.py": "on a node: the steps of its user data",
    "gpu/amd/smi.py": "on a node: numbers of its GPUs",
    "elastic/groups.py": "on a node: the runner itself, in a folder beside that of the head",
    "idle/ending.py": "on a node: systemctl, which shuts it down",
    "gpu/machine.py": "on a node: units of its systemd",
    "node/detach.py": "on a node: the runner itself",
    "node/probe.py": "on a node: a shell that does nothing",
    "readings/vendors.py": "on a node: tools of vendors",
    "runner/answers.py": "on a node: journalctl",
    "runner/commands.py": "on a node: what a member of the fleet gives to `exec`",
    "runner/prepare.py": "on a node: packages of the image",
    "runner/upgrade.py": "on a node: the runner itself",
    "worker/preload.py": "on a node: this program again",
    "worker/scripts.py": "on a node: the script of a member of the fleet",
}
FILE: Form = typing.get_args(FilePath)[1]
_CALLS = {
    "Popen",
    "run",
    "call",
    "check_output",
    "check_call",
    "execv",
    "execvp",
    "execvpe",
    "execve",
    "system",
    "popen",
}


def test_every_file_that_starts_a_program_is_known() -> None:
    package = Path(sky.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if (of in ("subprocess", "os") and node.func.attr in _CALLS) or node.func.attr == "create_subprocess_exec":
                found.add(str(file.relative_to(package)))
    assert found == {*STARTS}


def texts(kind: type, value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The path of every text of a document, in JSON, and its name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        found = getattr(value, field.name)
        if isinstance(found, str) and typing.get_origin(plain(hints[field.name])) is not typing.Literal:
            yield (*path, field.name), field.name
        for index, each in enumerate(found if isinstance(found, tuple) else (found,)):
            if dataclasses.is_dataclass(each):
                at = (field.name, index) if isinstance(found, tuple) else (field.name,)
                yield from texts(type(each), each, (*path, *at))


def plain(kind: Any) -> Any:
    """The kind beside None."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(each for each in typing.get_args(kind) if each is not type(None))
    return kind


TEXTS = {".".join(map(str, path)): (path, name) for path, name in texts(Manifest, FLEET)}


def changed(path: tuple[Any, ...], text: str) -> dict[str, Any]:
    document: Any = FLEET.to_json()
    at = document
    for part in path[:-1]:
        at = at[part]
    assert path[-1] in at
    at[path[-1]] = text
    return document


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that write down their words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    record = tmp_path / "words"
    record.touch()
    program = f"import json, sys\nprint(json.dumps(sys.argv), file=open({str(record)!r}, 'a'))\nsys.exit(1)\n"
    for name in ("ssh", "scp", "aws", "gcloud", "docker", "podman", "kubectl"):
        (folder / name).write_text(f"#!{sys.executable}\n{program}")
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ways, "_answers", lambda address: False)
    monkeypatch.setattr(port_forward, "_answers", lambda *given: False)
    monkeypatch.chdir(tmp_path)
    return record


COMMANDS = {
    "ssh": ["ssh", "fleet.json"],
    "ssh with a command": ["ssh", "fleet.json", "--", "ls"],
    "hosts": ["ssh", "fleet.json", "--config"],
    "status of jobs, through the way to the head": ["jobs", "fleet.json"],
}


@pytest.mark.parametrize("way", HOSTILE)
@pytest.mark.parametrize("field", TEXTS)
def test_no_text_of_a_manifest_is_anything_but_data(
    programs: Path, monkeypatch: pytest.MonkeyPatch, field: str, way: str
) -> None:
    """It is refused where it is read, by its field; what is only shown reaches no program."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda program, line: became.append(line))
    path, name = TEXTS[field]
    Path("fleet.json").write_text(json.dumps(changed(path, HOSTILE[way])))
    if name == "key_file" and FILE.has(HOSTILE[way]):
        # Any file may be one. It is the word behind -i, which runs nothing.
        line = ways.ssh_line(fleet := Manifest.load(Path("fleet.json")), fleet.nodes[0], (), user=None)
        assert line is not None and line[line.index(HOSTILE[way]) - 1] == "-i" and line.count(HOSTILE[way]) == 1
        return
    if name not in SHOWN:
        with pytest.raises(sky.InvalidManifest, match=r"expected") as refused:
            Manifest.load(Path("fleet.json"))
        assert refused.value.field.replace("[", ".").replace("]", "") == f"fleet.json.{field}"
    for command in list(COMMANDS.values())[:3]:
        done = CliRunner().invoke(app, command)
        assert name in SHOWN or isinstance(done.exception, sky.InvalidManifest), done.output
    assert not any(HOSTILE[way] in word for line in became for word in line)
    assert HOSTILE[way] not in programs.read_text() and not Path("ran").exists()


@pytest.mark.parametrize("kind", ["ssh", "ssm", "iap"])
@pytest.mark.parametrize("way", HOSTILE)
def test_the_way_to_a_head_starts_nothing_else(programs: Path, kind: str, way: str) -> None:
    document = changed(("via", "target"), HOSTILE[way])
    document["via"]["kind"] = kind
    Path("fleet.json").write_text(json.dumps(document))
    done = CliRunner().invoke(app, COMMANDS["status of jobs, through the way to the head"])
    assert isinstance(done.exception, sky.InvalidManifest)
    assert programs.read_text() == "" and not Path("ran").exists()


def test_every_text_that_programs_get_has_a_form() -> None:
    """A field that is new has one, or is among those that are only shown."""
    for path, name in TEXTS.values():
        kind: Any = Manifest
        for part in path:
            if isinstance(part, int):
                kind = typing.get_args(kind)[0]
                continue
            kind = plain(typing.get_type_hints(kind, include_extras=True)[part])
        form = typing.get_args(kind)[1] if typing.get_origin(kind) is typing.Annotated else None
        assert isinstance(form, Form) != (name in SHOWN), path


def test_words_stand_behind_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that nobody checked is no option."""
    evil = "-oProxyCommand=touch ran"
    monkeypatch.setattr(ways, "_answers", lambda address: False)
    node = dataclasses.replace(HEAD, address=evil, public_address=None, ssh=Login(), id=evil, zone=evil)
    fleet = dataclasses.replace(FLEET, provider="ssh", nodes=(node,))
    line = ways.ssh_line(fleet, node, ("ls", "-l"), user=None)
    assert line is not None and line[line.index("--") :] == ["--", evil, "ls -l"]
    aws = ways.session_line(dataclasses.replace(fleet, provider="aws"), node, ())
    assert aws is not None and evil not in aws and f"--target={evil}" in aws
    head = Endpoint("10.0.0.1", 8786)
    ssh = port_forward.command(Via("ssh", evil), head, 1)
    assert ssh[-2:] == ["--", evil]
    ssm = port_forward.command(Via("ssm", evil, region=evil), head, 1)
    assert f"--target={evil}" in ssm and f"--region={evil}" in ssm and evil not in ssm
    iap = port_forward.command(Via("iap", "head", zone=evil, project=evil), head, 1)
    assert f"--zone={evil}" in iap and f"--project={evil}" in iap and evil not in iap
    # The machine is an argument of gcloud, which takes options behind it: it is read in no form of an option.
    assert iap[3] == "head"
    for hostile in (evil, "--flags-file=/etc/passwd", "-v"):
        with pytest.raises(sky.InvalidManifest, match=r"via\.target"):
            Manifest.read(dataclasses.replace(FLEET, via=Via("iap", hostile)).to_json())
        with pytest.raises(sky.InvalidManifest, match=r"nodes\[0\]\.name"):
            Manifest.read(dataclasses.replace(FLEET, nodes=(dataclasses.replace(HEAD, name=hostile),)).to_json())


def test_a_real_ssh_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker is made where the word is an option: otherwise this would show nothing."""
    if shutil.which("ssh") is None:
        pytest.skip("there is no ssh")
    monkeypatch.chdir(tmp_path)
    evil = "-oProxyCommand=touch ran"
    subprocess.run(["ssh", "-F", "/dev/null", evil, "host"], capture_output=True, timeout=30, check=False)
    assert Path("ran").exists()
    Path("ran").unlink()
    node = dataclasses.replace(HEAD, public_address=evil, ssh=Login())
    line = ways.ssh_line(dataclasses.replace(FLEET, nodes=(node,)), node, (), user=None)
    assert line is not None
    done = subprocess.run([line[0], "-F", "/dev/null", *line[1:]], capture_output=True, timeout=30, check=False)
    assert done.returncode == 255 and not Path("ran").exists()


def test_what_was_always_there_is_read() -> None:
    """Names, ids and addresses as clouds give them."""
    ids = (
        "i-0abc",
        "5612345678901234567",
        "/subscriptions/1/resourceGroups/g/vm",
        "ocid1.instance.oc1.iad.abc",
        "12",
        "",
    )
    for given in ids:
        node = dataclasses.replace(HEAD, id=given)
        assert Manifest.read(dataclasses.replace(FLEET, nodes=(node,)).to_json()).nodes[0].id == given
    for address in ("10.0.0.1", "2001:db8::1", "fe80::1%eth0", "gpu1.lab", "my_host", "[::1]", ""):
        assert Manifest.read(dataclasses.replace(FLEET, head=Endpoint(address, 0)).to_json()).head.address == address
    for zone in ("us-east-1a", "Uocm:PHX-AD-1", "Sweden, SE", "1", "fsn1-dc14", ""):
        node = dataclasses.replace(HEAD, zone=zone, ssh=Login("me@corp.example", 22, "~/my keys/lab", "gate"))
        assert Manifest.read(dataclasses.replace(FLEET, nodes=(node,)).to_json()).nodes[0].zone == zone


HOST = {"HOST": "10.0.0.1", "SSH_USER": "root", "SSH_PORT": "0", "HOST_KEY": "", "KEY_FILE": ""}
VIA = {"VIA": "gate", "VIA_USER": "me", "VIA_PORT": "22", "VIA_HOST_KEY": "", "VIA_KEY_FILE": ""}


@pytest.mark.parametrize("way", [*HOSTILE, None])
@pytest.mark.parametrize("name", [*HOST, *VIA, "KNOWN_AS"])
def test_what_a_cloud_says_of_a_machine(programs: Path, name: str, way: str | None) -> None:
    """The program that sets machines up over SSH gets their addresses from the provider of Terraform."""
    text = "" if way is None else HOSTILE[way].replace("\0", "\n")
    given = {**HOST, **VIA, "KNOWN_AS": "skyinfra-azure-/subscriptions/1", **({name: text} if way else {})}
    script = Path(sky.__file__).parent.parent / "modules/hosts/host.sh"
    environment = {**os.environ, **given, "FLEET": "s/p", "FLEET_ID": "1", "NODE": "p-0", "PATIENCE": "0"}
    done = subprocess.run(["sh", str(script), "claim"], env=environment, capture_output=True, text=True, check=False)
    words = programs.read_text()
    assert done.returncode != 0 and not Path("ran").exists()
    if way is None:
        assert '"-T", "--", "10.0.0.1"' in words
    elif name not in ("HOST_KEY", "KEY_FILE", "VIA_HOST_KEY", "VIA_KEY_FILE", "KNOWN_AS") and way != "a folder above":
        assert "ssh takes no such" in done.stderr and words == ""
    elif any(each in text for each in ("\n", "\x1b")) or text.startswith("-"):
        assert "ssh takes no such key" in done.stderr
        assert words == ""
