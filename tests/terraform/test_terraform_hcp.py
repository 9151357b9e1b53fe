"""Driving a real terraform whose state, or whose runs, are HCP Terraform's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hcp.server import ORGANIZATION, Hcp
from terraform_projects.driven import APPLY, NO_CAPACITY, carry_out_all

import skyinfra as sky
from skyinfra.terraform.cloud_errors import explain
from skyinfra.terraform.program import Terraform

RESOURCES = {
    "variable": {"value": {"default": "one"}},
    "resource": {
        "terraform_data": {
            "a": {"input": "${var.value}"},
            "secret": {"triggers_replace": '${sensitive("s3cret-value")}'},
        }
    },
    "output": {
        "a": {"value": "${terraform_data.a.output}"},
        "secret": {"value": "${terraform_data.secret.triggers_replace}", "sensitive": True},
    },
}
Make = Callable[[str], tuple[Hcp, Terraform]]


@pytest.fixture
def make(tmp_path: Path, terraform_program: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    servers = []

    def start(mode: str) -> tuple[Hcp, Terraform]:
        hcp = Hcp(tmp_path / "hcp", terraform_program, mode=mode)
        servers.append(hcp)
        for name, value in hcp.client_environment().items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / "stack"
        folder.mkdir()
        cloud = {"hostname": hcp.hostname, "organization": ORGANIZATION, "workspaces": {"name": "fleet"}}
        write(folder, {"terraform": {"cloud": cloud}, **RESOURCES})
        terraform = Terraform(folder)
        terraform.prepare()
        return hcp, terraform

    yield start
    for server in servers:
        server.close()


def declare(stack: Terraform, resources: dict[str, object], **outputs: str) -> None:
    """Other resources, and outputs, than those that are there."""
    file = Path(stack.working_dir) / "main.tf.json"
    cloud = json.loads(file.read_text())["terraform"]
    values = {name: {"value": value} for name, value in outputs.items()}
    output = {"output": values} if values else {}
    write(file.parent, {"terraform": cloud, "resource": {"terraform_data": resources}, **output})


def write(folder: Path, declared: object) -> None:
    (folder / "main.tf.json").write_text(json.dumps(declared))


@pytest.mark.parametrize("mode", ["local", pytest.param("remote", marks=pytest.mark.slow)])
def test_plan_apply_output_destroy(make: Make, mode: str) -> None:
    hcp, stack = make(mode)
    events = carry_out_all(stack)
    shown = f"https://{hcp.hostname}/app/{ORGANIZATION}/fleet/runs/run-3"
    assert any(event.text == shown for event in events) == (mode == "remote")
    with stack.planned(lambda e: None) as plan:
        assert (plan.run or "").startswith(shown.rpartition("/")[0]) if mode == "remote" else plan.run is None
    assert hcp.state("fleet")["resources"] == []
    assert bool(hcp.runs) == (mode == "remote")
    assert not list(Path(stack.working_dir).glob("*.tfstate*"))


@pytest.mark.slow
def test_every_kind_of_change_of_a_remote_run(make: Make) -> None:
    """Such a run is shown as text; that anything changes must not be missed."""
    kept, gone = {"input": "kept"}, {"input": "gone"}
    changed, again = {"input": "one"}, {"triggers_replace": "one"}
    _, stack = make("remote")
    declare(stack, {"k": kept, "g": gone, "c": changed, "r": again})
    with stack.planned(lambda e: None) as plan:
        stack.apply_plan(plan, lambda e: None)
    declare(stack, {"k": kept, "c": {"input": "two"}, "r": {"triggers_replace": "two"}, "n": {"count": 2}})
    with stack.planned(lambda e: None) as plan:
        assert set(plan.changes) == {
            ("update", "terraform_data.c"),
            ("replace", "terraform_data.r"),
            ("delete", "terraform_data.g"),
            ("create", "terraform_data.n[0]"),
            ("create", "terraform_data.n[1]"),
        }
        stack.apply_plan(plan, lambda e: None)
    declare(stack, {"k": kept, "c": {"input": "two"}, "r": {"triggers_replace": "two"}, "n": {"count": 2}}, b="new")
    with stack.planned(lambda e: None) as plan:
        assert not plan.empty and plan.changes == () and plan.output_changes
        stack.apply_plan(plan, lambda e: None)
    assert stack.outputs() == {"b": "new"}


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_what_fails_says_why(make: Make, mode: str) -> None:
    hcp, stack = make(mode)
    declare(stack, {"a": {"input": '${file("/no/such/file")}'}})
    with pytest.raises(sky.TerraformFailed) as caught, stack.planned(lambda e: None):
        pass
    first, reason, *more = str(caught.value).splitlines()
    assert first == "terraform plan failed" and reason.startswith("Invalid function argument"), reason
    assert 'no file exists at "/no/such/file"' in " ".join(more) and len(more) < 6, more
    failing = {"provisioner": [{"local-exec": {"command": "echo the reason >&2; exit 3"}}]}
    declare(stack, {"a": failing, "b": {}})
    with pytest.raises(sky.TerraformFailed) as caught, stack.planned(lambda e: None) as plan:
        stack.apply_plan(plan, lambda e: None)
    assert str(caught.value) == "terraform apply failed\nterraform_data.a: the reason"
    # What exists is in the state.
    assert {each["name"] for each in hcp.state("fleet")["resources"]} == {"a", "b"}
    assert not hcp.workspaces["fleet"].locked


def test_an_interruption_says_where_what_was_begun_goes_on(make: Make, tmp_path: Path) -> None:
    hcp, stack = make("remote")
    command = f"touch {tmp_path}/begun; while ! test -e {tmp_path}/go; do sleep 0.1; done"
    declare(stack, {"a": {"provisioner": [{"local-exec": {"command": command}}]}})
    process = subprocess.Popen([sys.executable, "-c", APPLY, str(stack.working_dir)], stdout=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        (tmp_path / "go").touch()
    assert process.returncode == 130
    [run] = hcp.runs
    assert f"What was begun is still running at https://{hcp.hostname}/app/{ORGANIZATION}/fleet/runs/{run}" in printed
    hcp.wait()
    assert hcp.runs[run].status == "applied"
    assert [each["name"] for each in hcp.state("fleet")["resources"]] == ["a"]


def test_a_token_that_is_not_taken(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hcp, stack = make("local")
    file = Path(hcp.client_environment()["TF_CLI_CONFIG_FILE"])
    file.write_text(file.read_text().replace("token-of-a-person", "another"))
    with pytest.raises(sky.TerraformFailed, match=r"(?i)unauthorized") as caught:
        stack.prepare()
    assert type(caught.value) is sky.TerraformFailed
    assert caught.value.hint == f"The token is not accepted, or has expired: terraform login {hcp.hostname}"
    file.write_text("")
    with pytest.raises(sky.TerraformFailed, match="terraform login"):
        stack.prepare()


def test_a_workspace_that_is_locked(make: Make) -> None:
    hcp, stack = make("local")
    hcp.workspaces["fleet"].locked = True
    with pytest.raises(sky.StateLocked) as caught, stack.planned(lambda e: None):
        pass
    first, wait, last = str(caught.value).splitlines()
    assert first == f"the state is locked: the workspace {ORGANIZATION}/fleet is locked in HCP Terraform"
    assert wait == "Nothing was changed. Wait until it has ended, and run this again."
    assert last.endswith(f"-chdir={stack.working_dir} force-unlock {ORGANIZATION}/fleet")


def test_what_a_cloud_refuses_in_a_remote_run_is_known(make: Make) -> None:
    """Such a run's errors are broken into lines of 78 characters."""
    _, stack = make("remote")
    refused = {"precondition": [{"condition": "${self.input != 1}", "error_message": NO_CAPACITY}]}
    declare(stack, {"a": {"input": 1, "lifecycle": [{"postcondition": refused["precondition"]}]}})
    with pytest.raises(sky.CapacityUnavailable) as caught, stack.planned(lambda e: None) as plan:
        stack.apply_plan(plan, lambda e: None)
    assert caught.value.message == explained(NO_CAPACITY).message
    assert "us-east-1b, us-east-1d." in str(caught.value)


def explained(text: str) -> sky.TerraformFailed:
    found = explain("plan", [("", f"Resource postcondition failed\n{text}")])
    assert found is not None
    return found
