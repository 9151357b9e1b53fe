"""Nodes of this machine, and a state in HCP Terraform: where that runs Terraform itself, it is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hcp.server import ORGANIZATION, Hcp
from terraform_projects.commands import copy_quickstart, processes, skyinfra, until


# tests/terraform/test_terraform_hcp.py drives Terraform with such a state and such runs.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local", "remote"])
def test_nodes_of_this_machine(tmp_path: Path, terraform_program: str, mode: str) -> None:
    project = copy_quickstart(tmp_path)
    program = project / "main.py"
    backend = f'backend=sky.HCPTerraform(organization="{ORGANIZATION}", workspace="here"), '
    text, count = re.subn(r"pools=\[", f"{backend}pools=[", program.read_text())
    assert count == 1
    program.write_text(text)
    hcp = Hcp(tmp_path / "hcp", terraform_program, mode=mode)
    environment = {**hcp.client_environment(), "TF_CLOUD_HOSTNAME": hcp.hostname}
    try:
        if mode == "remote":
            _is_refused(project, environment, hcp)
        else:
            _serves(project, environment, hcp)
    finally:
        hcp.close()


def _is_refused(project: Path, environment: dict[str, str], hcp: Hcp) -> None:
    done = skyinfra(project, "deploy", "--auto-approve", check=False, **environment)
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :]
    assert "has nodes of this machine (pool mig), and its workspace runs Terraform in HCP Terraform: https://" in error
    assert "Set the workspace's execution mode to local" in error
    assert [run.status for run in hcp.runs.values()] == ["planned_and_saved"]
    assert not hcp.workspaces["here"].states


def _serves(project: Path, environment: dict[str, str], hcp: Hcp) -> None:
    try:
        skyinfra(project, "deploy", "--auto-approve", **environment)
        assert not list(project.glob("*.tfstate*")) and hcp.state("here")["resources"]
        (project / "job.py").write_text("print('it ran')\n")
        assert "it ran" in skyinfra(project, "run", "quickstart/mig", "job.py", **environment).stdout
        planned = json.loads(skyinfra(project, "plan", "--json", **environment).stdout)
        assert planned["changes"] == [] and "run" not in planned
    finally:
        skyinfra(project, "destroy", "--auto-approve", **environment)
    until(lambda: not processes(project))
    assert hcp.state("here")["resources"] == []
