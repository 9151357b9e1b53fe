"""What a stack costs is shown with its plan, and before anybody is asked whether to go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terraform_projects.commands import skyinfra
from terraform_projects.synthesized import project_of

# A plan in which Terraform's part needs no cloud: the choices are those of AWS, the module is left out.
AWS = "[sky.ComputePool(name='mig', nodes=2, provider=sky.AWS(), accelerator='H100:8/3g.40gb')]"
NO_CLOUD = (
    "document = {'//': document['//'], 'resource': {'terraform_data': {'a': {}}}, 'terraform': {'backend': {'local': "
    "{'path': str(Path.cwd() / 'state')}}}}"
)


def test_plan_and_deploy_show_it_before_they_go_on(tmp_path: Path) -> None:
    project = project_of(tmp_path, AWS, change=NO_CLOUD)
    planned = skyinfra(project, "plan").stdout
    assert planned.index("1 to create") < planned.index("$110.08") < planned.index("$79,257.60")
    cost = json.loads(skyinfra(project, "plan", "--json").stdout)["cost"]
    assert (cost["usd_per_hour"], cost["pools"][0]["price"]["date"]) == (110.08, "2026-07-20")
    refused = skyinfra(project, "deploy", check=False)
    assert refused.returncode == 2
    assert refused.stderr.index("$79,257.60") < refused.stderr.index("nobody can be asked here")
    assert not (project / "state").exists()


@pytest.mark.slow
def test_a_stack_of_this_machine_costs_nothing(tmp_path: Path) -> None:
    pools = "[sky.ComputePool(provider=sky.Local())]"
    project = project_of(tmp_path, pools, change=NO_CLOUD)
    assert skyinfra(project, "plan").stdout.splitlines()[-1] == "s costs nothing: it runs on this machine"


@pytest.mark.slow
def test_a_head_that_all_of_the_internet_reaches_is_said(tmp_path: Path) -> None:
    networks = "{'a': '0.0.0.0/0', 'b': '10.0.0.0/8'}.items()"
    pools = f"[sky.ComputePool(name=name, provider=sky.AWS(allow_cidrs=[cidr])) for name, cidr in {networks}]"
    # The module is left out here, so the plan itself fails.
    said = skyinfra(project_of(tmp_path, pools), "plan", check=False).stderr
    assert "a: allow_cidrs lets all of the internet (0.0.0.0/0) reach the port" in said
    assert "b: allow_cidrs" not in said
