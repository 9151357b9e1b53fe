"""stacks/aws-mig in a workspace of HCP Terraform that runs Terraform itself: the real provider, a moto server."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hcp.server import ORGANIZATION, Hcp
from moto_aws.cloud import Cloud
from moto_aws.projects import Project, secrets_of
from support import ROOT

# test_hcp shows both modes with nodes of this machine, in a quarter of the time.
pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_a_remote_run_deploys_and_destroys(cloud: Cloud, tmp_path: Path, terraform_program: str) -> None:
    before = cloud.existing()
    project = Project(tmp_path / "project", cloud)
    shutil.copy(ROOT / "stacks" / "aws-mig" / "main.py", project.folder)
    given = project.environment.get("TF_CLI_CONFIG_FILE")
    hcp = Hcp(tmp_path / "hcp", terraform_program, mode="remote", environment=project.environment)
    try:
        project.environment.update(hcp.client_environment(Path(given).read_text() if given else ""))
        project.environment.update(TF_CLOUD_ORGANIZATION=ORGANIZATION, TF_CLOUD_HOSTNAME=hcp.hostname)
        # Credentials of the cloud are the worker's alone.
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del project.environment[name]

        shown = project.run("plan")
        assert re.search(r"^aws-mig: \d+ to create$", shown, re.MULTILINE) and "PER HOUR" in shown, shown
        assert f"https://{hcp.hostname}/app/{ORGANIZATION}/aws-mig/runs/run-" in shown
        assert cloud.existing() == before

        project.run("deploy", "--auto-approve", "--no-wait")
        assert {i["InstanceType"] for i in cloud.instances("mig")} == {"p5.48xlarge"}
        assert len(cloud.instances("mig")) == 2 and len(cloud.instances("cpu")) == 1
        assert "everything is as declared" in project.run("deploy", "--auto-approve", "--no-wait")

        fleets = json.loads(project.run("status", "--json"))["stacks"][0]
        assert fleets["stack"] == "aws-mig" and len(fleets["pools"]) == 2, fleets

        project.run("destroy", "--auto-approve")
        assert cloud.existing() == before
        secrets = {secret for state in hcp.workspaces["aws-mig"].states for secret in secrets_of(json.loads(state))}
        assert len(secrets) == 2
        logs = [log.decode() for run in hcp.runs.values() for log in run.logs.values()]
        assert not any(secret in text for secret in secrets for text in (*project.printed, *logs))
    finally:
        hcp.close()
    assert not list(project.folder.glob("*.tfstate*"))
