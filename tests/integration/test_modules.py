"""The modules as HCL: formatted, typed, described, the same core everywhere, usable without Python."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT, module_source
from terraform_projects.commands import SCRIPTS, environment, processes, until

import skyinfra as sky
from skyinfra.bootstrap import bundled
from skyinfra.client import open_pool
from skyinfra.protocol.manifest import Manifest
from skyinfra.providers import read
from skyinfra.terraform.program import Terraform, find_program

# Those that people call have a README; the others are called by them.
MODULES = sorted(path.parent for path in (ROOT / "modules").glob("*/README.md"))
SIBLINGS = sorted({*(path for path in (ROOT / "modules").iterdir() if path.is_dir())} - {*MODULES})
CORE = {"name", "stack", "node_count", "user_data_head", "user_data_worker", "slots", "scheduler_port"}
# Inputs that a module has where its place has what they ask for.
ABLE = {"machine_types", "image", "disk_gb", "spot", "ssh_public_key", "allow_cidrs", "labels"}

# Machines that stand already, containers and processes: they have the image, keys and firewall that they have.
NO_CLOUD = {
    "ssh": ("image", "ssh_public_key", "allow_cidrs"),
    "container": ("ssh_public_key", "allow_cidrs"),
    "local": ("image", "ssh_public_key", "allow_cidrs"),
}
# What one module has to have where another has it too: the same type.
COMMON = CORE | ABLE | {"runner_file", "versions", "user_data_revision"}


def variables(module: Path) -> dict[str, str]:
    """The bodies of the variables of *module*."""
    text = "".join(path.read_text() for path in sorted(module.glob("*.tf")))
    return dict(re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL))


def type_of(body: str) -> str:
    found = re.search(r"^  type +=(.*?)(?=^  \w|\Z)", body, re.MULTILINE | re.DOTALL)
    return "".join(found[1].split()) if found else ""


def test_what_modules_share_stands_once() -> None:
    assert [path.name for path in SIBLINGS] == ["core", "google", "hosts", "market"]
    for module in MODULES:
        called = {path.name for path in bundled.modules([module.name], ROOT / "modules")} - {module.name}
        # Nodes of local are processes, whose configuration is complete only once the head listens.
        assert ("core" in called) is (module.name != "local")
    files = [path for path in (ROOT / "modules").rglob("*") if path.suffix in (".sh", ".py", ".tf")]
    texts = [
        path.read_bytes()
        for path in files
        if "examples" not in path.parts and path.name not in ("moved.tf", "variables.tf") and path.stat().st_size > 1000
    ]
    assert len(texts) == len(set(texts)) > 40


def test_the_core_inputs_have_the_same_types_everywhere() -> None:
    of_aws = variables(ROOT / "modules" / "aws")
    for module in MODULES:
        for name, body in variables(module).items():
            if name in COMMON:
                assert type_of(body) == type_of(of_aws[name]) != "", f"{module.name}: {name}"


def terraform(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*find_program(), *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_a_module_is_whole(module: Path, tmp_path: Path) -> None:
    for name in ("main.tf", "variables.tf", "README.md"):
        assert (module / name).is_file()
    assert terraform(module, "fmt", "-check", "-diff", "-recursive").stdout == ""
    blocks, data = variables(module), read(module.name)
    # The head of local nodes takes a port that is free.
    assert set(blocks) >= CORE - ({"scheduler_port"} if module.name == "local" else set())
    for name in ABLE:
        assert (name in blocks) is (data.takes(name) and name not in NO_CLOUD.get(module.name, ())), name
    for name, body in blocks.items():
        assert re.search(r"^  description = ", body, re.MULTILINE), f"{name} has no description"
        kind = re.search(r"^  type += (.*)", body, re.MULTILINE)
        assert kind and kind.group(1) != "any", f"{name} has no type"
        assert re.search(rf"`{name}`", (module / "README.md").read_text()), f"{name} is not in the README"
    text = "".join(path.read_text() for path in module.glob("*.tf"))
    assert re.search(r'output "fleet" \{[^}]*sensitive\s+= true', text, re.DOTALL)
    assert len(re.findall(r"^  required_version = ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("module", SIBLINGS, ids=lambda path: path.name)
def test_a_module_that_others_call_is_whole(module: Path) -> None:
    assert terraform(module, "fmt", "-check", "-diff").stdout == ""
    text = "".join(path.read_text() for path in module.glob("*.tf"))
    for kind in ("variable", "output"):
        for name, body in re.findall(rf'^{kind} "(\w+)" \{{\n(.*?)^\}}', text, re.MULTILINE | re.DOTALL):
            assert re.search(r"^  description = ", body, re.MULTILINE), f"{name} has no description"
            assert kind == "output" or "any" not in re.findall(r"\b\w+\b", type_of(body)), f"{name} has no type"
            assert kind == "output" or re.search(rf"\bvar\.{name}\b", text), f"{name} is not used"


# Inputs that make no sense at a module, and what is said of them.
REFUSED = (
    ("local", "node_count = 0", "at least 1"),
    ("container", 'image = "-v"', "the name of an image"),
    ("container", 'labels = { "skyinfra.node" = "x" }', "which is taken"),
    ("container", 'engine = "crun"', "docker, podman"),
    ("container", 'host = "gpu1"', "ssh://user@host"),
    ("container", 'network = "bridge"', "do not find each other"),
    ("container", 'gpus = ["GPU-1", "GPU-1"]', "none twice"),
    ("container", "port = 70000", "1 to 65535"),
)


def _refused(folder: Path, *given: tuple[str, str]) -> str:
    """What a plan of modules with these lines says, in one line."""
    common = 'name = "x"\n user_data_head = "{}"'
    calls = [
        f'module "x{number}" {{\n source = "{module_source(module)}"\n {common}\n {line}\n}}\n'
        for number, (module, line) in enumerate(given)
    ]
    (folder / "main.tf").write_text("".join(calls))
    assert terraform(folder, "init").returncode == 0
    result = terraform(folder, "plan", "-no-color")
    assert result.returncode == 1
    return " ".join(result.stderr.replace("│", " ").split())


def test_inputs_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    """Each in a module of its own; one plan."""
    said = _refused(tmp_path, *((module, line) for module, line, _ in REFUSED))
    assert said.count("Error: Invalid value for variable") == len(REFUSED)
    assert not [words for _, _, words in REFUSED if words not in said], said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node_count = 2", "user_data_worker: needed"),
        ('node_count = 2\n user_data_worker = "x"\n gpus = ["a", "b", "c"]', "3 are given, which 2 nodes cannot share"),
        ('user_data_worker = "@SKYINFRA_BUCKET@/versions.json"', "versions: the user data ask"),
    ],
)
def test_inputs_of_containers_that_do_not_go_together_are_refused(line: str, words: str, tmp_path: Path) -> None:
    assert words in _refused(tmp_path, ("container", line))


def test_the_example_of_the_containers_readme_is_valid(tmp_path: Path) -> None:
    example = re.search(r"```hcl\n(.*?)```", (ROOT / "modules" / "container" / "README.md").read_text(), re.DOTALL)
    assert example
    (tmp_path / "main.tf").write_text(example.group(1).replace("./modules/container", module_source("container")))
    for name in re.findall(r'"([\w.-]+\.(?:sh|whl))"', example.group(1)):
        (tmp_path / name).write_text("#!/bin/sh\n")
    assert terraform(tmp_path, "init").returncode == 0
    planned = terraform(tmp_path, "plan", "-no-color")
    assert planned.returncode == 0, planned.stderr
    assert "module.cpu.terraform_data.worker" in planned.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node_count = 2", "1 hosts are given"),
        ("hosts = []", "at least one"),
        ('hosts = [{ address = "a" }, { address = "A" }]\n node_count = 2', "none twice"),
        ('hosts = [{ address = "-oProxyCommand=x" }]', "an address is a name"),
        ('hosts = [{ address = "a", user = "x;y" }]', "a user is a name"),
        ('hosts = [{ address = "a", host_key = "a ssh-ed25519 AAAA" }]', "begins with its kind"),
        ('hosts = [{ address = "a" }, { address = "b" }]\n node_count = 2', "user_data_worker: needed"),
        ('user_data_worker = "@SKYINFRA_BUCKET@/versions.json"', "versions: the user data ask"),
    ],
)
def test_inputs_that_hosts_cannot_have_are_refused(line: str, words: str, tmp_path: Path) -> None:
    hosts = "" if "hosts =" in line else '\n hosts = [{ address = "a" }]'
    (tmp_path / "main.tf").write_text(
        f'module "x" {{\n source = "{module_source("ssh")}"\n name = "x"\n user_data_head = "x"\n {line}{hosts}\n}}\n'
    )
    assert terraform(tmp_path, "init").returncode == 0
    result = terraform(tmp_path, "plan", "-no-color")
    assert result.returncode == 1
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_the_example_of_its_readme_works_without_python(tmp_path: Path) -> None:
    readme = (ROOT / "modules" / "local" / "README.md").read_text()
    example = re.search(r"```hcl\n(.*?)```", readme, re.DOTALL)
    assert example
    (tmp_path / "main.tf").write_text(example.group(1).replace("./modules/local", f"{ROOT}/modules/local"))
    made = Terraform(tmp_path)
    made.prepare()
    with made.planned(lambda event: None) as plan:
        made.apply_plan(plan, lambda event: None)
    try:
        manifest = Manifest.read(made.outputs()["fleet_cpu"])
        with open_pool(manifest) as pool:
            assert [slot.slot for slot in pool.slots()] == ["cpu-0/0", "cpu-0/1", "cpu-1/0", "cpu-1/1"]
            assert sky.compute(sum)([1, 2]) @ pool == [3, 3, 3, 3]
        with made.planned(lambda event: None) as plan:
            assert plan.empty
    finally:
        with made.planned(lambda event: None, destroy=True) as plan:
            made.apply_plan(plan, lambda event: None)
    until(lambda: not processes(tmp_path))
    assert not (tmp_path / ".skyinfra").exists()


def test_destroying_needs_neither_python_nor_the_runner(tmp_path: Path) -> None:
    """node.sh alone stops a node whose environment is gone, and never a process that only has its number."""
    folder = tmp_path / "fleet" / "pool" / "node"
    folder.mkdir(parents=True)
    (folder / "node.json").write_text(json.dumps({}))
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "runner.pid").write_text(str(stranger.pid))
    script = ROOT / "modules" / "local" / "node.sh"
    for _ in range(2):
        subprocess.run(["sh", script, "down"], env={"PATH": "/usr/bin:/bin", "FOLDER": str(folder)}, check=True)
        assert not folder.exists()
    assert stranger.poll() is None, "a process of somebody else was killed"
    stranger.kill()
    stranger.wait()


def test_a_missing_runner_is_named(tmp_path: Path) -> None:
    script = ROOT / "modules" / "local" / "node.sh"
    env = {"PATH": "/usr/bin:/bin", "FOLDER": str(tmp_path / "n"), "RUNNER": "no-such-runner", "CONFIGURATION": "{}"}
    result = subprocess.run(["sh", script, "up"], env={**env, "WAIT": "5"}, capture_output=True, text=True)
    assert result.returncode == 1
    assert "no-such-runner was not found" in result.stderr and "SKYINFRA_RUNNER" in result.stderr
    assert not (tmp_path / "n").exists()
    assert (SCRIPTS / "skyinfra-runner").exists()
