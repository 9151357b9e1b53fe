"""``skyinfra init``, ``skyinfra`` alone, ``-C``, and the manifest for others."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from front_ends.on_terminal import on_terminal, plain
from front_ends.schemas import valid
from support import ROOT, python_path
from terraform_projects import synthesized
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra import cli, console
from skyinfra.cli import init
from skyinfra.cli.app import app
from skyinfra.compiler import compile_pool
from skyinfra.terraform.project import Project


def skyinfra(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "skyinfra.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path()},
        text=True,
        **({"capture_output": True} | options),
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """The output of ``skyinfra`` without a command in a folder."""

    def run(folder: Path) -> str:
        monkeypatch.chdir(folder)
        result = CliRunner().invoke(app, [])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0
        return str(result.stdout)

    return run


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_init_writes_a_project_a_script_and_a_notebook(tmp_path: Path) -> None:
    done = invoked("init", str(tmp_path / "my lab"), "--stack", "lab")
    assert done.exit_code == 0
    folder = tmp_path / "my lab"
    files = {"cdktf.json", "main.py", ".gitignore", "train.py", "notebook.ipynb"}
    assert {path.name for path in folder.iterdir()} == files
    commands = done.stdout.partition("Next:\n")[2].splitlines()
    assert [line.strip() for line in commands] == [
        f"cd '{folder}'",
        "skyinfra deploy",
        "skyinfra run lab/mig train.py --epochs 3",
        "skyinfra destroy",
    ]
    ran = subprocess.run(
        [sys.executable, "train.py", "--epochs", "2"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert ran.stdout.count("loss") == 2
    notebook = json.loads((folder / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        compile("".join(cell["source"]), "cell", "exec")
    assert 'sky.connect("lab", "mig")' in "".join(cells[0]["source"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


@pytest.mark.parametrize(
    ("there", "taken"), [({"cdktf", "cdktn"}, "cdktn"), ({"cdktf"}, "cdktf"), ({"cdktn"}, "cdktn"), (set(), "cdktn")]
)
def test_init_takes_the_library_that_is_installed(
    there: set[str], taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        init.importlib.util,
        "find_spec",
        lambda name, *rest: (name in there or None) if name in ("cdktf", "cdktn") else known(name, *rest),
    )
    out = invoked("init", str(tmp_path)).stdout
    assert f"from {taken} import App" in (tmp_path / "main.py").read_text()
    assert f"It declares with {taken}, " in out
    assert (f'-m pip install "skyinfra[{taken}]"' in out) == (not there)
    # What is asked for is taken, and said.
    other = tmp_path / "other"
    out = invoked("init", str(other), "--library", "cdktf").stdout
    assert "from cdktf import App" in (other / "main.py").read_text() and "archived" in out


def test_a_project_shows_machines_that_end_by_themselves(tmp_path: Path) -> None:
    invoked("init", str(tmp_path))
    lines = [
        line.removeprefix("        # ") for line in (tmp_path / "main.py").read_text().splitlines() if "# " in line
    ]
    text = "\n".join(lines[1:]).rstrip(",")
    made = compile_pool(eval(text, {"sky": sky}), "demo")
    assert made.worker.idle_seconds == 1800.0 and made.pool.provider.kind == "aws"


@pytest.mark.parametrize(("example", "file"), [("tour", "tour.py"), ("jobs", "job.py"), ("gang", "gang.py")])
def test_examples_are_those_of_the_repository(example: str, file: str, tmp_path: Path) -> None:
    out = invoked("init", str(tmp_path), "--example", example).stdout
    assert (tmp_path / file).read_text() == (ROOT / "examples" / file).read_text()
    assert f"  python {file}\n" in out
    assert {path.name for path in tmp_path.iterdir()} == {"cdktf.json", "main.py", ".gitignore", file}
    refused = invoked("init", str(tmp_path / "x"), "--example", example, "--stack", "other")
    assert "quickstart" in str(refused.exception) and not (tmp_path / "x").exists()


def test_the_example_without_python_has_its_module(tmp_path: Path) -> None:
    out = invoked("init", str(tmp_path), "--example", "hcl", "--stack", "lab").stdout
    module = {path.name: path.read_bytes() for path in (tmp_path / "modules" / "local").iterdir()}
    assert module == {path.name: path.read_bytes() for path in (ROOT / "modules" / "local").iterdir()}
    assert 'stack = "lab"' in (tmp_path / "main.tf").read_text()
    assert "terraform init && terraform apply" in out and "umask 077" in out


def test_an_example_that_does_not_exist(tmp_path: Path) -> None:
    refused = invoked("init", str(tmp_path), "--example", "hlc")
    assert "Did you mean hcl?" in str(refused.exception) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_example_without_python_is_a_fleet(tmp_path: Path, terraform_program: str) -> None:
    invoked("init", str(tmp_path), "--example", "hcl")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": python_path()}

    def terraform(*arguments: str) -> str:
        done = subprocess.run(
            [terraform_program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    terraform("init", "-no-color")
    try:
        terraform("apply", "-auto-approve", "-no-color")
        (tmp_path / "fleet.json").write_text(terraform("output", "-json", "fleet_mig"))
        (tmp_path / "hello.py").write_text("print('hello')\n")
        assert skyinfra(tmp_path, "run", "fleet.json", "hello.py").stdout == "hello\n"
    finally:
        terraform("destroy", "-auto-approve", "-no-color")


def test_skyinfra_alone_says_where_one_stands(
    project: Path, alone: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "skyinfra init" in alone(tmp_path_factory.mktemp("nowhere"))
    found = alone(project)
    assert "lab: deployed, no machine of it is bought." in found
    # Nothing listens at port 1, and nobody waits for it.
    assert "lab/mig: 2 nodes, 4 slots (simulated), its head does not answer" in found
    assert "skyinfra run lab/mig SCRIPT" in found
    (project / "terraform.lab.tfstate").unlink()
    assert "lab: not deployed." in alone(project)
    (project / "cdktf.out" / "manifest.json").unlink()
    assert "nothing is synthesized yet" in alone(project)
    (project / "cdktf.json").write_text("{")
    with pytest.raises(sky.ProjectNotFound, match=r"cdktf\.json"):
        alone(project)


def test_it_says_what_a_cloud_costs_and_where_a_state_is(tmp_path: Path, alone: Callable[[Path], str]) -> None:
    pool = sky.ComputePool(name="h100", provider=sky.AWS(region="us-east-1"), accelerator="H100:8")
    backend = {"local": {"path": "../../../terraform.lab.tfstate"}}
    stack = synthesized.synthesized(tmp_path / "declared", pool, name="lab", backend=backend)
    assert "It would cost $55." in alone(tmp_path / "declared")
    assert stack.state_file is not None
    attributes = {"instance_type": "p5.48xlarge", "availability_zone": "us-east-1a", "arn": "arn:aws:ec2:x"}
    machine = {
        "mode": "managed",
        "type": "aws_instance",
        "name": "head",
        "module": "module.h100",
        "provider": 'module.h100.provider["registry.terraform.io/hashicorp/aws"]',
        "instances": [{"attributes": attributes}],
    }
    stack.state_file.write_text(json.dumps({"version": 4, "outputs": {}, "resources": [machine]}))
    found = alone(tmp_path / "declared")
    assert "lab: partly deployed, at $55." in found
    attributes["instance_type"] = "x9.huge"
    stack.state_file.write_text(json.dumps({"version": 4, "outputs": {}, "resources": [machine]}))
    assert "lab: partly deployed, the price of x9.huge is not known." in alone(tmp_path / "declared")
    # What it takes to go on comes first.
    assert "Next:\n  skyinfra deploy lab " in found and "skyinfra destroy lab" in found
    synthesized.synthesized(tmp_path / "declared", pool, name="lab", backend={"s3": {}})
    assert "Terraform keeps its state elsewhere (s3)" in alone(tmp_path / "declared")


def test_a_stack_that_lacks_a_pool_or_whose_deploy_failed_is_partly_deployed(
    project: Path, alone: Callable[[Path], str]
) -> None:
    assert "lab: deployed" in alone(project) and "skyinfra deploy" not in alone(project)
    folder = Project.find(project).stack("lab").folder
    (folder / "last-run.json").write_text(
        json.dumps({"verb": "deploy", "began": "2026-01-01T00:00:00", "message": "x"})
    )
    found = alone(project)
    assert "lab: partly deployed" in found and "The last deploy, begun at 2026-01-01T00:00:00, failed." in found
    assert "Next:\n  skyinfra deploy lab " in found
    (folder / "last-run.json").write_text(
        json.dumps({"verb": "destroy", "began": "2026-01-01T00:00:00", "message": "x"})
    )
    found = alone(project)
    assert found.index("skyinfra destroy lab") < found.index("skyinfra deploy lab")
    (folder / "last-run.json").unlink()
    file = project / "terraform.lab.tfstate"
    state = json.loads(file.read_text())
    state["outputs"] = {"fleet_other": state["outputs"]["fleet_mig"]}
    file.write_text(json.dumps(state))
    assert "lab: partly deployed" in alone(project)


@pytest.mark.parametrize(
    ("word", "command"),
    [("up", "deploy"), ("down", "destroy"), ("ps", "status"), ("version", "--version"), ("apply", "deploy")],
)
def test_commands_of_others_name_ours(word: str, command: str) -> None:
    done = invoked(word)
    assert done.exit_code == 2 and f"No such command '{word}'. It is, here: skyinfra {command}" in done.output


@pytest.mark.parametrize(
    ("word", "command"), [("lst", "list"), ("ls", "logs or list"), ("log", "logs"), ("cancle", "cancel")]
)
def test_a_mistyped_command_of_jobs_is_no_stack(word: str, command: str) -> None:
    done = invoked("jobs", word)
    assert done.exit_code == 2 and f"No such command '{word}'. Did you mean {command}? Of a stack" in done.output


def test_yes_has_the_spellings_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for option in ("-y", "--yes", "--auto-approve"):
        assert isinstance(invoked("deploy", option).exception, sky.ProjectNotFound)


def test_a_removed_folder_is_no_defect(tmp_path: Path) -> None:
    command = f"mkdir x; cd x; rmdir ../x; exec {sys.executable} -m skyinfra.cli status"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1 and "defect" not in done.stderr
    assert done.stderr == "error: the current folder: No such file or directory\nChange into one that exists.\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "f"), "f: Permission denied\n"),
        (OSError(errno.EROFS, "Read-only file system", b"f"), "f: Read-only file system\n"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device\n"),
        # Of a process or a socket, and of a file that skyinfra should have.
        (PermissionError(errno.EPERM, "Operation not permitted"), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "f"), None),
    ],
)
def test_what_the_disk_of_a_person_refuses_is_no_defect(
    error: OSError, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("skyinfra.cli.app.app", fail)
    monkeypatch.setattr("skyinfra.cli.catch", lambda handler: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr().err
    assert ended.value.code == 1
    if said is not None:
        assert shown == f"error: {said}"
    assert ("This is a defect of skyinfra" in shown) == (said is None)


def test_another_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.parent)
    missing = invoked("-C", "nowhere", "status")
    assert missing.exit_code == 2 and "nowhere: No such file or directory" in missing.output
    found = invoked("-C", str(project))
    assert found.exit_code == 0 and "lab: deployed" in found.stdout


def test_a_manifest_goes_to_a_file_that_nobody_else_reads(project: Path) -> None:
    source = project / "source.json"
    fleet = Project.find(project).stack("lab").known_fleets()["mig"]
    source.write_text(json.dumps(fleet.to_json()))
    with (project / "fleet.json").open("w") as file:
        done = skyinfra(project, "manifest", "source.json", capture_output=False, stdout=file, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert (project / "fleet.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((project / "fleet.json").read_text()) == fleet.to_json()
    assert "secret" in done.stderr and fleet.secret not in done.stderr
    # A pipe, as to ssh.
    assert json.loads(invoked("manifest", str(source)).stdout) == fleet.to_json()


def test_a_manifest_is_not_shown_on_a_terminal(project: Path) -> None:
    source = project / "source.json"
    fleet = Project.find(project).stack("lab").known_fleets()["mig"]
    source.write_text(json.dumps(fleet.to_json()))
    code, text = on_terminal("manifest", "source.json", folder=project)
    assert code == 2 and "--show-secret" in plain(text) and fleet.secret not in text
    assert fleet.secret in invoked("manifest", str(source), "--show-secret").stdout


def test_a_deploy_for_programs_says_its_error_as_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = invoked("deploy", "--json")
    assert isinstance(failed.exception, sky.ProjectNotFound)
    event = valid("deploy-event", failed.stdout)
    assert (event["event"], event["error"]) == ("error", "ProjectNotFound") and "cdktf.json" in event["message"]


def test_every_error_of_a_detailed_plan_is_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options, code in (([], 2), (["--detailed-exitcode"], 1)):
        failed = invoked("plan", *options).exception
        assert isinstance(failed, sky.ProjectNotFound) and failed.exit_code == code


def test_an_option_of_ours_behind_the_script_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the script's, as python has it: who means us waits for a job that is none."""
    monkeypatch.chdir(tmp_path)
    behind = ("train.py", "--detach", "--lr", "1", "--secret=KEY=value")
    said = invoked("run", "lab/mig", *behind).stderr
    assert "--detach, --secret: handed to train.py" in said and "value" not in said
    for quiet in (("train.py", "--", "--detach"), ("train.py", "--name", "x"), ("--detach", "train.py")):
        assert "handed to" not in invoked("run", "lab/mig", *quiet).stderr


def test_what_stands_in_the_standard_input_and_is_not_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("one\ntwo\n")
    commands = (("run", "lab/mig", "train.py"), ("exec", "lab/mig", "--", "cat"))

    def said(stdin: Any) -> set[bool]:
        monkeypatch.setattr("sys.stdin", stdin)
        found = console.unread()
        assert console.unread() is found  # nothing is taken from it
        # CliRunner gives commands an input of its own.
        monkeypatch.setattr("skyinfra.cli.run.unread", lambda: found)
        monkeypatch.setattr("skyinfra.cli.execute.unread", lambda: found)
        return {"does not get the standard input" in invoked(*each).stderr for each in commands}

    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing, "w") as other:
        assert said(pipe) == {False}
        other.write("one\n")
        other.flush()
        assert said(pipe) == {True} and pipe.read(4) == "one\n"
    with (tmp_path / "text").open() as file:
        assert said(file) == {True}
        # As a shell that reads line by line, and calls us for each.
        os.lseek(file.fileno(), 4, os.SEEK_SET)
        assert said(file) == {False}
    with Path(os.devnull).open() as nothing:
        assert said(nothing) == {False}
    assert said(None) == {False}


@pytest.mark.parametrize("command", ["deploy", "watch"])
def test_patience_is_a_time_or_a_number_of_seconds(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("0", "90", "1.5h", "2d"):  # which is read before there is found to be no project
        assert isinstance(invoked(command, "--patience", text).exception, sky.ProjectNotFound), text
    for text in ("soon", "-1", "90 s", "1e9"):
        failed = invoked(command, "--patience", text).exception
        assert f"--patience: expected a length of time (given: '{text}')" in str(failed), failed
