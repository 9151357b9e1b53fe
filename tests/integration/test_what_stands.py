"""Resources that stand and are easily forgotten: of stacks that were renamed, and of deploys that failed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from front_ends.on_terminal import Leaving
from terraform_projects.commands import environment, left, processes, skyinfra, until
from terraform_projects.synthesized import project_of

PROGRAM = """
import skyinfra as sky
from cdktf import App
app = App()
sky.FleetStack(app, {name!r}, pools=[sky.ComputePool(name="cpu", provider=sky.Local(){more})])
"""

SECRET = re.compile(r"([0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}){2}")


def project(folder: Path, name: str = "old", *, more: str = "", synth: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
    (folder / "main.py").write_text(PROGRAM.format(name=name, more=more) + ("app.synth()\n" if synth else ""))
    return folder


def without_module(folder: Path, name: str = "old") -> Path:
    """A project whose plan needs nothing but Terraform: no cdktf, and no nodes."""
    state = f"'terraform': {{'backend': {{'local': {{'path': '../../../terraform.{name}.tfstate'}}}}}}"
    document = f"{{'//': document['//'], {state}, 'resource': {{'terraform_data': {{'a': {{}}}}}}}}"
    return project_of(folder, "[sky.ComputePool(provider=sky.Local())]", change=f"document = {document}", name=name)


def test_a_program_that_writes_no_stacks_is_refused(tmp_path: Path) -> None:
    here = project(tmp_path)
    skyinfra(here, "synth")
    project(tmp_path, more=", nodes=3", synth=False)
    # As every command that synthesizes.
    refused = skyinfra(here, "deploy", "--auto-approve", check=False)
    assert refused.returncode == 1 and "app.synth()" in refused.stderr
    assert "old" not in refused.stdout
    # What was synthesized before can still be looked at.
    assert "old/cpu is not deployed" in skyinfra(here, "status").stdout


@pytest.mark.slow
def test_a_renamed_stack_is_named_and_destroyed_from_its_state_alone(tmp_path: Path) -> None:
    here = project(tmp_path)
    skyinfra(here, "deploy", "--auto-approve")
    state = here / "terraform.old.tfstate"
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    project(tmp_path, "new")
    planned = skyinfra(here, "plan")
    assert "+ cpu node cpu-0" in planned.stdout
    for said in (planned.stderr, skyinfra(here, "status").stdout):
        assert "No declared stack owns 5 resources in terraform.old.tfstate." in said
        assert "skyinfra destroy old" in said
    shutil.rmtree(here / "cdktf.out")
    (orphan,) = json.loads(skyinfra(here, "status", "--json").stdout)["orphans"]
    assert (orphan["stack"], orphan["resources"], orphan["workspace"]) == ("old", 5, None)
    skyinfra(here, "destroy", "old", "--auto-approve")
    assert not left(here)
    until(lambda: not processes(here))
    assert not (here / "cdktf.out" / "stacks" / "old").exists()
    assert "owns" not in skyinfra(here, "plan").stderr
    refused = skyinfra(here, "destroy", "old", check=False)
    assert refused.returncode == 2 and "no such stack" in refused.stderr


@pytest.mark.slow
def test_a_deploy_that_was_cut_off_shows_in_status(tmp_path: Path) -> None:
    here = project(tmp_path, more=', image=sky.Image(run=["touch begun; sleep 600"])')
    deploy = subprocess.Popen(
        [sys.executable, "-m", "skyinfra.cli", "deploy", "--auto-approve"],
        cwd=here,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: list(here.glob(".skyinfra/**/begun")))
    assert "A deploy, begun at" in skyinfra(here, "status").stdout
    deploy.send_signal(signal.SIGINT)
    deploy.wait()
    shown = skyinfra(here, "status", check=False)
    assert shown.returncode == 1
    assert "old/cpu is partly deployed: 5 resources" in shown.stdout
    assert "The last deploy, begun at" in shown.stdout and "was interrupted" in shown.stdout
    (stack,) = json.loads(skyinfra(here, "status", "--json", check=False).stdout)["stacks"]
    assert stack["incomplete"] and stack["last_run"]["verb"] == "deploy"
    (file,) = here.glob("cdktf.out/stacks/old/last-run.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # Of a deploy that was killed nothing is said but that.
    file.write_text(json.dumps({"verb": "deploy", "began": "2026-11-23T00:00:00+00:00", "message": None}))
    shown = skyinfra(here, "status", check=False)
    assert shown.returncode == 1 and "begun at 2026-11-23T00:00:00+00:00, was killed." in shown.stdout
    skyinfra(here, "destroy", "--auto-approve")
    assert "old/cpu is not deployed" in skyinfra(here, "status").stdout
    until(lambda: not processes(here))


@pytest.mark.slow
def test_a_deploy_whose_terminal_closes_saves_its_state(tmp_path: Path) -> None:
    here = project(tmp_path, more=', image=sky.Image(run=["touch begun; sleep 600"])')
    command = [sys.executable, "-m", "skyinfra.cli", "deploy", "--auto-approve"]
    deploy = Leaving(command, here, environment())
    until(lambda: deploy.read() or list(here.glob(".skyinfra/**/begun")))
    assert deploy.close() == 128 + signal.SIGHUP
    # No Terraform goes on alone, and no lock is left.
    shown = skyinfra(here, "status", check=False).stdout
    assert "old/cpu is partly deployed: 5 resources" in shown and "was interrupted" in shown
    skyinfra(here, "destroy", "--auto-approve")
    until(lambda: not processes(here))


def test_states_of_declared_stacks_are_no_orphans(tmp_path: Path) -> None:
    here = without_module(tmp_path, "a")
    for name in ("a", "b"):
        (here / f"terraform.{name}.tfstate").write_text(
            json.dumps({"version": 4, "resources": [{"mode": "managed", "type": "t", "name": "n", "instances": [{}]}]})
        )
    said = skyinfra(here, "plan", check=False).stderr
    assert "No declared stack owns 1 resource in terraform.b.tfstate" in said and said.count("No declared stack") == 1


@pytest.mark.slow
def test_states_of_other_workspaces(tmp_path: Path) -> None:
    here = project(tmp_path)
    skyinfra(here, "deploy", "--auto-approve", TF_WORKSPACE="dev")
    project(tmp_path, "new")
    said = skyinfra(here, "plan").stderr
    assert "5 resources in terraform.old.tfstate.d/dev/terraform.tfstate" in said
    assert "TF_WORKSPACE=dev skyinfra destroy old" in said
    skyinfra(here, "destroy", "old", "--auto-approve", TF_WORKSPACE="dev")
    until(lambda: not processes(here))


@pytest.mark.slow
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    here = without_module(tmp_path)
    skyinfra(here, "synth")
    for name in ("cdktf.out/stacks/old", "."):
        (here / name).chmod(0o777)
        refused = skyinfra(here, "plan", check=False)
        assert refused.returncode == 1 and "chmod go-w" in refused.stderr, name


def test_what_others_could_read_is_closed(tmp_path: Path) -> None:
    here = without_module(tmp_path)
    files = [here / f"terraform.old.tfstate{suffix}" for suffix in ("", ".backup")] + [here / "log"]
    for file in files:
        file.touch(0o644)
    skyinfra(here, "plan", TF_LOG="debug", TF_LOG_PATH=str(here / "log"))
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3


# A terraform whose files hold 2,048 bytes at most while it applies: a disk that is full.
FULL_DISK = '#!/bin/bash\nfor word in "$@"; do [ "$word" = apply ] && ulimit -f 2; done\nexec {program} "$@"\n'


@pytest.mark.slow
def test_a_state_that_cannot_be_saved_is_kept(tmp_path: Path, terraform_program: str) -> None:
    here = project(tmp_path)
    program = tmp_path / "terraform-on-a-full-disk"
    program.write_text(FULL_DISK.format(program=terraform_program))
    program.chmod(0o755)
    failed = skyinfra(here, "deploy", "--auto-approve", check=False, TERRAFORM_BINARY_NAME=str(program))
    assert failed.returncode == 1 and "the state was not saved" in failed.stderr
    assert "intact" not in failed.stderr
    (file,) = here.glob("cdktf.out/stacks/old/errored-*.tfstate")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = SECRET.search(file.read_text())
    assert secret is not None and secret[0] not in failed.stderr + failed.stdout
    command = failed.stderr.rstrip().splitlines()[-1]
    (here / "terraform.old.tfstate").unlink()  # cut off in the middle
    subprocess.run([terraform_program, *command.split()[1:]], check=True, capture_output=True)
    skyinfra(here, "destroy", "--auto-approve")
    until(lambda: not processes(here))


@pytest.mark.slow
def test_the_debug_log_of_terraform_hides_the_secret(tmp_path: Path, terraform_program: str) -> None:
    here = without_module(tmp_path)
    secret = str(uuid.uuid4()) + str(uuid.uuid4())
    program = tmp_path / "terraform-that-logs"
    program.write_text(f'#!/bin/sh\necho "[DEBUG] triggers_replace = {secret}" >&2\nexec {terraform_program} "$@"\n')
    program.chmod(0o755)
    shown = skyinfra(here, "plan", TF_LOG="debug", TERRAFORM_BINARY_NAME=str(program))
    assert "[DEBUG] triggers_replace = (secret)" in shown.stderr and secret not in shown.stderr
    assert "[DEBUG]" not in skyinfra(here, "plan", TERRAFORM_BINARY_NAME=str(program)).stderr


@pytest.mark.slow
def test_a_configuration_that_cannot_be_evaluated_keeps_nobody_from_destroying(tmp_path: Path) -> None:
    here = project(tmp_path)
    skyinfra(here, "deploy", "--auto-approve")
    file = here / "cdktf.out" / "stacks" / "old" / "cdk.tf.json"
    document = json.loads(file.read_text())
    document["data"] = {"terraform_remote_state": {"gone": {"backend": "local", "config": {"path": "nowhere"}}}}
    file.write_text(json.dumps(document))
    skyinfra(here, "destroy", "--auto-approve")
    assert not left(here)
    until(lambda: not processes(here))


@pytest.mark.slow
def test_another_layout_is_planned_as_an_update_in_place(tmp_path: Path) -> None:
    here = project(tmp_path, more=', accelerator="H100/3g.40gb"')
    main = here / "main.py"
    main.write_text(main.read_text().replace("sky.Local()", "sky.Local(simulate=True)"))
    skyinfra(here, "deploy", "--auto-approve")
    main.write_text(main.read_text().replace("3g.40gb", "7g.80gb"))
    planned = skyinfra(here, "plan")
    assert "~ cpu head" in planned.stdout and "old: 1 to update" in planned.stdout
    deployed = skyinfra(here, "deploy", "--auto-approve")
    assert "cpu head updated" in deployed.stderr and "head destroyed" not in deployed.stderr
    skyinfra(here, "destroy", "--auto-approve")


@pytest.mark.slow
def test_nodes_that_end_are_named_with_what_runs_there(tmp_path: Path) -> None:
    here = project(tmp_path, more=", nodes=2")
    skyinfra(here, "deploy", "--auto-approve")
    (here / "task.py").write_text("import time\ntime.sleep(600)\n")
    for name in ("first", "second"):
        skyinfra(here, "run", "--detach", "--name", name, "old/cpu", "task.py")
    until(lambda: skyinfra(here, "jobs", "list", "old/cpu").stdout.count("running") == 2)
    project(tmp_path)
    planned = skyinfra(here, "plan")
    assert "- cpu node cpu-1" in planned.stdout
    assert re.search(r"cpu-1 is destroyed, for it is not declared any more: ends there: (first|second)", planned.stderr)
    assert "cpu-0 is" not in planned.stderr
    refused = skyinfra(here, "deploy", "--replace", 'module.cpu.terraform_data.node["cpu-0"]', check=False)
    assert "cpu-0 is replaced, for --replace asks for it: ends there: " in refused.stderr
    assert "the 2 jobs of the fleet go on with the next head" in refused.stderr
    again = ("--replace", 'module.cpu.terraform_data.node["cpu-0"]', "--replace", "module.cpu.terraform_data.state")
    assert "the 2 jobs of the fleet end with its head" in skyinfra(here, "deploy", *again, check=False).stderr
    skyinfra(here, "destroy", "--auto-approve")
