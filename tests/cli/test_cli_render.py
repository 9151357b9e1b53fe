"""``skyinfra render``: the user data and variables of a stack, in each form."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support import ROOT
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.bootstrap import runner_wheel
from skyinfra.cli.app import app
from skyinfra.compiler import compile_pool
from skyinfra.stack import module_inputs
from skyinfra.terraform.project import Project

POOLS = """
import skyinfra as sky
from cdktf import App
KEY = "ssh-ed25519 AAAA ${x}"
app = App()
sky.FleetStack(app, "s", pools=[
    sky.ComputePool(name="gpu", nodes=2, provider=sky.AWS(ssh_public_key=KEY), accelerator="H100:8/1g.10gb*7"),
    sky.ComputePool(name="here", provider=sky.Local(simulate=True), accelerator="H100"),
])
app.synth()
"""
KEY = "ssh-ed25519 AAAA ${x}"
POOL = sky.ComputePool(name="gpu", nodes=2, provider=sky.AWS(ssh_public_key=KEY), accelerator="H100:8/1g.10gb*7")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was synthesized; rendering it again synthesizes nothing anew, which takes its time."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "main.py").write_text(POOLS)
    (folder / "cdktf.json").write_text('{"app": "python main.py"}')
    Project.find(folder).synth()
    again = "cp cdktf.out/manifest.earlier.json cdktf.out/manifest.json"
    (folder / "cdktf.json").write_text(json.dumps({"app": again}))
    return folder


def render(project: Path, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["render", str(project), *options])
    if isinstance(result.exception, sky.SkyinfraError):
        assert result.exception.exit_code == code
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_what_the_modules_get_is_written_as_it_was_declared(project: Path, tmp_path: Path) -> None:
    render(project, "--out", str(tmp_path))
    inputs = module_inputs(compile_pool(POOL, "s"), "../../..")
    written = json.loads((tmp_path / "s-gpu.tfvars.json").read_text())
    assert {key: written[key] for key in inputs} == inputs
    assert set(written) - set(inputs) == {"runner_file"}
    assert (tmp_path / written["runner_file"]).is_file()
    for role in ("head", "worker"):
        assert (tmp_path / f"s-gpu.{role}.yaml").read_text() == inputs[f"user_data_{role}"]
    assert json.loads((tmp_path / "s-here.head.json").read_text())["pool"] == "here"


@pytest.mark.parametrize("form", ["script", "container"])
def test_other_forms_hold_the_same_files(project: Path, tmp_path: Path, form: str) -> None:
    render(project, "--stack", "s", "--format", "cloud-config", "--out", str(tmp_path / "a"), code=2)
    text = render(project, "--format", form, "--out", str(tmp_path / "b"), code=2)
    assert "s/here" in text and "no cloud-config" in text
    one = tmp_path / "one"
    one.mkdir()
    (one / "main.py").write_text(POOLS.replace('    sky.ComputePool(name="here"', "    #"))
    (one / "cdktf.json").write_text('{"app": "python main.py"}')
    rows = json.loads(render(one, "--format", form, "--out", str(tmp_path / "c"), "--json"))["files"]
    names = {Path(row["file"]).name for row in rows}
    assert {"s-gpu.head.sh", "s-gpu.worker.sh", "s-gpu.tfvars.json"} < names
    script = tmp_path / "c" / "s-gpu.head.sh"
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    text = script.read_text()
    document = yaml.safe_load(module_inputs(compile_pool(POOL, "s"), ".")["user_data_head"])
    for file in document["write_files"]:
        has_units = form == "script"
        assert (file["path"] in text) == (has_units or not file["path"].startswith("/etc/systemd/")), file["path"]
    assert json.loads((tmp_path / "c" / "s-gpu.tfvars.json").read_text())["user_data_head"] == text


def test_sizes(project: Path) -> None:
    rows = {row["file"]: row for row in json.loads(render(project, "--sizes", "--json"))["files"]}
    assert rows["s-gpu.head.yaml"]["parts"]["/opt/skyinfra/steps.json"] > 100
    assert rows["s-gpu.head.yaml"]["compressed"] <= 15_000
    assert "AWS takes 16384 bytes" in render(project, "--sizes")


@pytest.mark.parametrize(
    ("options", "message"),
    [((), "--out DIR"), (("--sizes", "--format", "tar"), "cloud-config, script, container"), (("--stack", "x"), "s")],
)
def test_what_makes_no_sense(project: Path, options: tuple[str, ...], message: str) -> None:
    assert message in render(project, *options, code=2)


def test_the_readme_of_the_module_names_the_command() -> None:
    assert "skyinfra render" in (ROOT / "modules" / "aws" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("cluster", "suffix"), [("sbatch", "sbatch"), ("kubernetes", "yaml")])
def test_pools_on_clusters_come_with_the_runner(project: Path, tmp_path: Path, cluster: str, suffix: str) -> None:
    shown = render(project, "--stack", "s", "--format", cluster, "--out", str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    wheel = next(name for name in names if name.endswith(".whl"))
    assert names == sorted([f"s-gpu.{suffix}", f"s-here.{suffix}", wheel])
    assert wheel in (tmp_path / f"s-gpu.{suffix}").read_text()
    assert "s/here" in shown
    assert "user data" not in shown
    # Config maps have room for 1 MiB.
    assert (tmp_path / wheel).stat().st_size < 2**20


def test_the_runner_alone_for_nodes_that_fetch_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["render", "--runner", str(tmp_path / "out")])
    wheel = runner_wheel.wheel()
    assert result.exit_code == 0 and (tmp_path / "out" / wheel.name).read_bytes() == wheel.content
    declared = re.search(r'runner="(\S+)"', result.output)
    assert declared and declared[1] == f"https://HOST/{wheel.name}#sha256={wheel.sha256}"
    again = CliRunner().invoke(app, ["render", "--runner", str(tmp_path), "--json"])
    assert json.loads(again.output)["sha256"] == wheel.sha256


def test_a_module_is_a_folder_for_terraform(project: Path, tmp_path: Path, terraform_program: str) -> None:
    render(project, "--out", str(tmp_path), "--module")
    assert {path.name for path in tmp_path.iterdir()} == {"s-gpu", "s-here"}
    gpu, here = tmp_path / "s-gpu", tmp_path / "s-here"
    source = ROOT / "modules" / "aws"
    module = {path.name for path in source.iterdir() if path.is_file()}
    wheel = runner_wheel.wheel().name
    written = {*module, "core", "terraform.tfvars.json", "provider.tf.json", wheel}
    assert {path.name for path in gpu.iterdir()} == written
    # What it calls stands below it here.
    assert (gpu / "main.tf").read_bytes() == (source / "main.tf").read_bytes().replace(b'"../core"', b'"./core"')
    assert (gpu / "core" / "main.tf").read_bytes() == (source.parent / "core" / "main.tf").read_bytes()
    assert json.loads((gpu / "provider.tf.json").read_text())["provider"]["aws"]["region"] == "us-east-1"
    inputs = json.loads((here / "terraform.tfvars.json").read_text())
    assert inputs["root"] == ".skyinfra"
    for command in (["init", "-no-color"], ["plan", "-no-color", "-input=false"]):
        done = subprocess.run([terraform_program, *command], cwd=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout
    assert re.search(r"Plan: \d+ to add, 0 to change, 0 to destroy", done.stdout)


def test_other_modules_of_the_stack_are_no_pools(project: Path, tmp_path: Path) -> None:
    """docs/declaration.md has one beside its pools, which take outputs of it."""
    shutil.copytree(project, tmp_path / "beside")
    file = tmp_path / "beside" / "cdktf.out" / "stacks" / "s" / "cdk.tf.json"
    document = json.loads(file.read_text())
    document["module"]["vpc"] = {"source": "terraform-aws-modules/vpc/aws", "cidr": "10.0.0.0/16"}
    file.write_text(json.dumps(document))
    for way in ([], ["--module"], ["--format", "sbatch"]):
        written = render(tmp_path / "beside", *way, "--out", str(tmp_path / "out"), "--json")
        assert {row["fleet"] for row in json.loads(written)["files"]} == {"s/gpu", "s/here"}
    document["module"]["gpu"] |= {"vpc_id": "${local.gpu_vpc_id}", "subnet_ids": "${local.gpu_subnet_ids}"}
    file.write_text(json.dumps(document))
    for way in ([], ["--module"]):
        text = render(tmp_path / "beside", *way, "--out", str(tmp_path / "out"), code=2)
        assert text.startswith("s/gpu: no file of variables holds outputs") and "subnet_ids" in text
    assert "s-gpu.head.yaml" in render(tmp_path / "beside", "--sizes")


def test_a_module_needs_a_folder(project: Path) -> None:
    assert "--module" in render(project, "--sizes", "--module", code=2)
    assert "--module" in render(project, "--out", "x", "--module", "--format", "sbatch", code=2)
