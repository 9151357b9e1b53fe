"""The schemas of what ``--json`` prints: made from one source, one for each command, and what is printed fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from front_ends.schemas import valid
from support import ROOT
from terraform_projects.synthesized import synthesized
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli import stacks
from skyinfra.cli.app import app
from skyinfra.preflight.report import Line, Report
from skyinfra.terminal import tables
from skyinfra.terraform.text import Event
from tools import schemas

PARTED = (
    "version: v1\nmig-configs:\n  half:\n    - devices: all\n      mig-enabled: true\n      mig-devices: {3g.40gb: 2}\n"
)
PRINTED = {
    "offers": ["offers", "H100:8", "--json"],
    "recommend": ["recommend", "llama-3-70b", "--json"],
    "mig-layout": ["mig", "show", "H100", "3g.40gb+1g.10gb*2", "--json"],
    "mig-profiles": ["mig", "profiles", "A30", "--json"],
    "mig-layouts": ["mig", "layouts", "A30", "--json"],
    "mig-pack": ["mig", "pack", "1g.10gb*20, 3g.40gb*4", "--provider", "aws", "--json"],
    "mig-import": ["mig", "import", "parted.yaml", "--config", "half", "--accelerator", "H100:2", "--json"],
}


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_no_schema_is_stale() -> None:
    assert not schemas.stale()


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_fits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parted.yaml").write_text(PARTED)
    found = valid(name, printed(*PRINTED[name]))
    assert found["schema_version"] == tables.SCHEMA_VERSION
    # What is too much, and what is missing, is seen.
    for wrong in ({**found, "more": 1}, {key: value for key, value in found.items() if key != "schema_version"}):
        with pytest.raises(jsonschema.ValidationError):
            valid(name, json.dumps(wrong))


def test_every_field_of_a_pool_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = sky.cheapest([sky.AWS(profile="a"), sky.GCP(zones=["us-central1-a"]), sky.RunPod()])
    image = sky.Image(runner=f"https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={'a' * 64}")
    costly = {"max_hourly_cost": 100, "budget": sky.Budget(usd=900)}
    several = sky.ComputePool(name="p", accelerator="H100:8", provider=places, image=image, **costly)
    ends = {"stop_after_idle": "1h", "max_lifetime": "9h", "vcpus": 4, "memory_gb": 8}
    volumes = {"/data": sky.Volume(name="v", provider=sky.AWS(zones=["us-east-1a"]), size_gb=9)}
    aws = sky.ComputePool(name="q", provider=sky.AWS(zones=["us-east-1a"]), volumes=volumes, **ends)
    sick = sky.ComputePool(name="r", nodes=2, provider=sky.AWS(), replace_sick=True)
    stacks.show_choices([synthesized(tmp_path, several, aws, sick)], as_json=True)
    found = valid("synth", capsys.readouterr().out)["stacks"][0]["pools"]
    assert len(found[0]["places"]) == 3 and found[0]["by_price"] and found[1]["volumes"] and found[2]["replace_sick"]


def test_other_documents_of_layouts_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parted.yaml").write_text(PARTED)
    valid("mig-layout", printed("mig", "check", "H100", "3g.40gb*2"))
    valid("mig-import", printed("mig", "import", "parted.yaml", "--config", "half", "--json"))
    impossible = CliRunner().invoke(app, ["mig", "show", "H100", "4g.40gb*2", "--json"])
    assert impossible.exit_code == 2 and not valid("mig-layout", impossible.stdout)["fits"]


def test_a_report_and_the_events_of_a_deploy_fit(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_document(Report("s", (Line("p", "quota", "fail", "0 of 8", "ask for more"),)).to_json())
    valid("preflight", capsys.readouterr().out)
    stacks.print_step(Event("output", "module.p.x.y", text="what a program prints"))
    assert capsys.readouterr().out == ""
    stacks.print_step(Event("done", "module.p.x.y", "create", 1.23456))
    assert valid("deploy-event", capsys.readouterr().out)["seconds"] == 1.235
    stacks.print_event("error", error="CloudRefused", message="no quota")
    valid("deploy-event", capsys.readouterr().out)


def test_every_command_with_json_has_a_schema_and_stands_in_the_document() -> None:
    named = {
        " ".join(re.sub(r" STACK/POOL| --runner DIR| PATH| REMOTE| JOB", "", part).split()[1:]).removesuffix(" --json")
        for command, _ in schemas.DOCUMENTS.values()
        for part in command.split(", ")
    }

    def look(path: str, command: Any) -> None:
        for name, each in getattr(command, "commands", {}).items():
            look(f"{path} {name}".strip(), each)
        # The result of a job is whatever the task returned.
        if any("--json" in parameter.opts for parameter in command.params) and path != "jobs result":
            assert path.removesuffix(" list") in named, path

    look("", typer.main.get_command(app))
    text = (ROOT / "docs" / "command-line.md").read_text()
    for name, (command, _) in schemas.DOCUMENTS.items():
        assert f"[{name}](schemas/{name}.json)" in text, name
        assert command.split(",")[0] in text, command
