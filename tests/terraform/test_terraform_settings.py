"""What Terraform is told by the environment, and what is said of what it prints; with a program in its place."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.deploy.apply import carry_out
from skyinfra.deploy.last_run import last_run
from skyinfra.deploy.orphans import find_orphans
from skyinfra.errors import signals
from skyinfra.terraform.program import Terraform, find_program
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack
from skyinfra.terraform.text import lines, pieces

S3 = {"s3": {"bucket": "b", "key": "k", "region": "us-east-1"}}


def program(folder: Path, script: str) -> Path:
    file = folder / "bin" / "terraform"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def stack(folder: Path, backend: dict[str, dict[str, str]] | None = None) -> SynthesizedStack:
    given = backend or {"local": {"path": str(folder / "s.tfstate"), "workspace_dir": str(folder / "s.tfstate.d")}}
    return synthesized(folder, sky.ComputePool(provider=sky.Local()), backend=given)


@pytest.mark.parametrize("named", [{"TERRAFORM_BINARY_NAME": "./bin/terraform"}, {"PATH": "bin:/usr/bin:/bin"}])
def test_a_relative_program_is_found_from_the_folder_of_the_stack_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str]
) -> None:
    file = program(tmp_path, "exit 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TERRAFORM_BINARY_NAME", raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert find_program() == (str(file),)
    stack(tmp_path).terraform().prepare()


@pytest.mark.parametrize("data", [".data", "/absolute"])
def test_the_workspace_is_that_of_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    monkeypatch.delenv("TF_WORKSPACE", raising=False)
    made = stack(tmp_path)
    (made.folder / ".terraform").mkdir()
    (made.folder / ".terraform" / "environment").write_text("old")
    folder = tmp_path / "shared" if data.startswith("/") else made.folder / data
    folder.mkdir()
    (folder / "environment").write_text("dev")
    assert made.workspace == "old"
    monkeypatch.setenv("TF_DATA_DIR", str(folder) if data.startswith("/") else data)
    assert made.workspace == "dev" and made.state_file == tmp_path / "s.tfstate.d" / "dev" / "terraform.tfstate"


@pytest.mark.parametrize(("shared", "inits"), [(False, 1), (True, 2)])
def test_a_data_folder_is_set_up_and_one_of_all_stacks_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool, inits: int
) -> None:
    monkeypatch.setenv("TERRAFORM_BINARY_NAME", str(program(tmp_path, f'echo "$1" >> {tmp_path}/ran')))
    made = stack(tmp_path)
    (made.folder / ".terraform").mkdir()  # of before
    folder = tmp_path / "shared" if shared else made.folder / ".data"
    monkeypatch.setenv("TF_DATA_DIR", str(folder) if shared else ".data")
    made.prepared()
    folder.mkdir()
    made.prepared()
    assert (tmp_path / "ran").read_text() == "init\n" * inits


def test_a_state_in_a_bucket_that_no_stack_owns_is_found_by_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"mode": "managed", "type": "t", "name": "n", "instances": [{}]}
    state = json.dumps({"version": 4, "resources": [row]})
    monkeypatch.setenv("TERRAFORM_BINARY_NAME", str(program(tmp_path, f"if [ $1 = state ]; then echo '{state}'; fi")))
    made = stack(tmp_path, S3)
    monkeypatch.setenv("TF_DATA_DIR", ".data")
    assert not find_orphans(Project.find(tmp_path), ())
    (made.folder / ".data").mkdir()
    [orphan] = find_orphans(Project.find(tmp_path), ())
    assert orphan.stack.name == "s" and len(orphan.resources) == 1


def interrupting(folder: Path, *commands: str, number: str = "INT") -> Path:
    """A Terraform that somebody interrupts in each of the *commands*; every plan has a change."""
    change = {"type": "planned_change", "change": {"action": "create", "resource": {"addr": "module.cpu.t.n"}}}
    script = f"""
        if echo {" ".join(commands)} | grep -qw "$1"; then
            trap "exit 1" INT
            kill -{number} $PPID
            while :; do sleep 0.05; done
        fi
        case $1 in
            plan) echo '{json.dumps(change)}'; exit 2;;
            show) echo '{{}}';;
        esac
    """
    return program(folder, script)


def test_a_signal_that_another_thread_gets_ends_the_wait_for_terraform() -> None:
    def end(*_: object) -> None:
        raise SystemExit

    def get() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    ours, theirs = os.pipe()
    before = signal.signal(signal.SIGUSR1, end)
    try:
        with os.fdopen(ours, "rb") as stream, pytest.raises(SystemExit):
            threading.Thread(target=get).start()
            list(pieces(stream))
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(theirs)


def test_lines_come_inpieces() -> None:
    assert list(lines(["a", "b\nc\n\nd", "", "e"])) == ["ab", "c", "", "de"]


@pytest.mark.parametrize(
    ("number", "ends"), [("INT", KeyboardInterrupt), ("TERM", SystemExit), ("HUP", SystemExit)], ids=str
)
def test_an_interruption_of_what_only_reads_ends_the_program(
    number: str, ends: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an error: a program that tries again after each error would never end."""
    made = stack(tmp_path, S3)
    made.data_folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for command in ("state", "output", "init"):
        monkeypatch.setenv("TERRAFORM_BINARY_NAME", str(interrupting(tmp_path, command, number=number)))
        if command == "init":  # for what is read then, as the folder is that of all stacks
            monkeypatch.setenv("TF_DATA_DIR", str(tmp_path))
        monkeypatch.setattr(signals, "_last", float("-inf"))
        with pytest.raises(ends) as caught:
            if command == "state":
                find_orphans(Project.find(tmp_path), ())
            else:
                sky.connect("s")
        if isinstance(caught.value, SystemExit):
            assert caught.value.code == 128 + signal.Signals[f"SIG{number}"]


@pytest.mark.parametrize(
    ("command", "destroy", "said"),
    [
        ("init", False, "Nothing was changed."),
        ("plan", True, "Nothing was changed."),
        (
            "apply",
            False,
            "The state is saved.\nRun `skyinfra deploy s` to go on, or `skyinfra destroy s` to remove what exists.",
        ),
        ("apply", True, "The state is saved.\nRun `skyinfra destroy s` to go on."),
    ],
)
def test_an_interruption_says_what_to_run_next(
    command: str, destroy: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERRAFORM_BINARY_NAME", str(interrupting(tmp_path, command)))
    made = stack(tmp_path)
    with pytest.raises(sky.DeployInterrupted) as caught:
        carry_out(made, destroy=destroy)
    assert str(caught.value) == f"terraform {command} was interrupted\n{said}" and caught.value.exit_code == 130
    kept = last_run(made)
    assert (kept.message if kept else None) == (str(caught.value) if command == "apply" else None)


@pytest.mark.parametrize("command", ["outputs", "pull_state"])
def test_a_command_that_prints_the_state_and_fails_is_not_quoted(tmp_path: Path, command: str) -> None:
    file = program(tmp_path, """echo '{"password": "s3cret"}'; exit 1""")
    with pytest.raises(sky.TerraformFailed, match="terraform printed no reason") as caught:
        getattr(Terraform(tmp_path, (str(file),)), command)()
    assert "s3cret" not in str(caught.value)


def test_what_init_prints_is_its_reason(tmp_path: Path) -> None:
    file = program(tmp_path, "echo 'the reason'; exit 1")
    with pytest.raises(sky.TerraformFailed, match="the reason"):
        Terraform(tmp_path, (str(file),)).prepare()


def test_a_provider_that_is_added_later_is_pinned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"cat {tmp_path}/added >> .terraform.lock.hcl; test ! -e {tmp_path}/fails"
    monkeypatch.setenv("TERRAFORM_BINARY_NAME", str(program(tmp_path, script)))
    made, kept = stack(tmp_path), tmp_path / "terraform.s.lock.hcl"
    (tmp_path / "added").write_text("one\n")
    made.prepared(anew=True)
    assert kept.read_text() == "one\n"
    (tmp_path / "added").write_text("two\n")
    made.prepared(anew=True)
    assert kept.read_text() == "one\ntwo\n"
    # Nothing is written where nothing is new, nor where Terraform refuses.
    (tmp_path / "added").write_text("")
    written = kept.stat().st_mtime_ns
    made.prepared(anew=True)
    (tmp_path / "added").write_text("three\n")
    (tmp_path / "fails").touch()
    with pytest.raises(sky.TerraformFailed):
        made.prepared(anew=True)
    assert kept.read_text() == "one\ntwo\n" and kept.stat().st_mtime_ns == written


def test_a_terraform_that_knows_no_lock_file_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'Error: Extraneous JSON object property\n\nNo argument or block type is named "use_lockfile".'
    monkeypatch.setenv("TERRAFORM_BINARY_NAME", str(program(tmp_path, f"cat >&2 <<'X'\n{said}\nX\nexit 1")))
    with pytest.raises(sky.TerraformFailed) as caught:
        stack(tmp_path, S3).prepared()
    assert "Terraform 1.10" in str(caught.value) and "use_lockfile=False" in str(caught.value)
