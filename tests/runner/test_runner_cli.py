"""What `skyinfra-runner` says to the person, without a node that serves."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode, h100, on_slot

from skyinfra.runner import cli

MakeNode = Callable[..., RunningNode]


def test_a_configuration_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.json"
    assert cli.main(["boot", "--config", str(file)]) == 2
    file.write_text('{"version": 1, "nod": "n1"}')
    assert cli.main(["boot", "--detach", "--config", str(file)]) == 2
    shown = capsys.readouterr().err
    assert f"InvalidNodeConfig: {file}: cannot be read: No such file or directory" in shown
    assert f"{file}.nod: unknown field\nDid you mean node" in shown
    assert "Traceback" not in shown


def test_nodes_of_a_machine_without_linux(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = make_node(cpu_slots=1)
    before = sorted(node.path.iterdir())
    monkeypatch.setattr("sys.platform", "darwin")
    assert cli.main(["boot", "--detach", "--config", str(node.file)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("NotSupported: sky.Local: nodes of this machine need Linux\n")
    assert "sky.SSH" in shown and "Traceback" not in shown
    assert sorted(node.path.iterdir()) == before, "nothing is started"


@pytest.mark.parametrize(("secret", "message"), [(None, "cannot be read: No such file"), ("short", "the file holds 5")])
def test_a_secret_that_cannot_be_used(make_node: MakeNode, secret: str | None, message: str) -> None:
    node = make_node(cpu_slots=1)
    file = node.path / "secret"
    file.unlink()
    if secret is not None:
        file.write_text(secret)
    refused = node.run("boot", "--detach", check=False)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "short" not in refused.stderr


def test_an_unknown_failure_is_one_line_here_and_a_traceback_in_the_log(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = make_node(cpu_slots=1)
    monkeypatch.setattr("skyinfra.runner.partition_cli.NodeConfig.load", lambda path: 1 / 0)
    assert cli.main(["partition", "--config", str(node.file)]) == 1
    expected = (
        f"skyinfra-runner failed: ZeroDivisionError: division by zero; {node.directory.log_file} has the details\n"
    )
    assert capsys.readouterr().err == expected
    assert "Traceback" in node.directory.log_file.read_text()


def test_partition_and_check(make_node: MakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node = make_node(accelerator=h100((("3g.40gb", 0, 4),)))
    arguments = ["partition", "--config", str(node.file)]
    assert cli.main([*arguments, "--check"]) == 1
    differs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert differs == [
        {"event": "differs", "gpu": 0, "action": "mode", "on": True},
        {"event": "differs", "gpu": 0, "action": "create", "profile": "3g.40gb", "start": 0, "size": 4},
    ]
    assert cli.main(arguments) == 0
    done = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(e["event"], e.get("phase")) for e in done] == [
        ("partition", "mode"),
        ("partition", "create"),
        ("standing", None),
    ]
    assert cli.main([*arguments, "--check"]) == 0
    assert capsys.readouterr().out == ""


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["boot"])
    assert caught.value.code == 2
    assert "--config" in capsys.readouterr().err


def wheel(folder: Path) -> Path:
    """A wheel of one module, which needs no index to install."""
    file = folder / "greeting-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("greeting.py", "TEXT = 'hello from a package'\n")
        archive.writestr("greeting-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        archive.writestr(
            "greeting-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("greeting-1.0.dist-info/RECORD", "greeting.py,,\n")
    return file


def greet() -> tuple[str, str]:
    import subprocess
    import sys

    import greeting  # type: ignore[import-not-found]

    program = [sys.executable, "-c", "import greeting; print(greeting.TEXT)"]
    return greeting.TEXT, subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_packages_of_the_image_are_there_for_tasks_and_their_programs(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node(cpu_slots=1, pip=(str(wheel(tmp_path)),))
    node.boot()
    with node.client() as client:
        assert on_slot(client, "n1/0", greet) == ("hello from a package",) * 2
    before = node.directory.prepared_file.stat().st_mtime_ns
    node.boot()
    assert node.directory.prepared_file.stat().st_mtime_ns == before
    node.configure(pip=(str(tmp_path / "absent-1.0-py3-none-any.whl"),))
    failed = node.run("boot", "--detach", check=False)
    assert failed.returncode == 1
    assert "absent-1.0-py3-none-any.whl" in failed.stderr


@pytest.mark.parametrize("arguments", [["--check", "--force"], ["--dry-run", "--reboot"]])
def test_what_changes_nothing_forces_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["partition", "--layout", "1g.10gb", *arguments])
    assert caught.value.code == 2
    assert "nothing is changed here" in capsys.readouterr().err
