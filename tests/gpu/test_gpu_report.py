"""`python -m benchmarks gpu` on a fake driver: what the report says, and what it does not."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, debian_torch

SHOWN = {"date", "skyinfra", "python", "system", "distribution", "driver", "cuda", "torch", "report", "schema_version"}


def test_the_report_says_what_was_found_on_which_gpus(
    fake_machine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = fake_machine("h100_80gb", DRIVER="580.95.05", CUDA="13000")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SECRET_TOKEN", "hunter2hunter2")
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks", "gpu", "--report", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=machine.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = file.read_text()
    found = json.loads(text)
    assert set(found) == {*SHOWN, "gpus", "rows", "doctor", "said", "failed"}
    assert (found["driver"], found["cuda"], found["failed"]) == ("580.95.05", "13.0", None)
    assert [(each["name"], each["mig"]) for each in found["gpus"]] == [("NVIDIA H100 80GB HBM3", "off")]
    assert found["gpus"][0]["memory_gib"] == pytest.approx(80, abs=2)
    slots = found["rows"][0]
    assert slots["what"] == "NVIDIA H100 80GB HBM3: slots" and slots["ratio"] == 1.0 and slots["seconds"] > 0
    assert found["doctor"] and {each["result"] for each in found["doctor"]} <= {"ok", "wrong", "unknown"}
    # What tells this machine, its account or its GPUs from others is not told to others.
    for private in (str(tmp_path), str(ROOT), "hunter2", "GPU-", "/root", f"@{socket.gethostname()}"):
        assert private not in text
    assert socket.gethostname() not in text.replace("localhost", "") or len(socket.gethostname()) < 4
    assert f'"{getpass.getuser()}"' not in text


@pytest.mark.slow
@pytest.mark.skipif(not debian_torch.there(), reason="Debian's PyTorch is not here: make torch")
def test_slots_train_with_pytorch(fake_machine: Callable[..., Any], tmp_path: Path) -> None:
    machine = fake_machine("h100_80gb,h100_80gb", DRIVER="580.95.05", CUDA="13000")
    folder, file = tmp_path / "dist-packages", tmp_path / "report.json"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks", "gpu", "--report", str(file)]
    variables = machine.environment()
    for name, value in debian_torch.variables(folder).items():
        variables[name] = f"{variables[name]}:{value}" if name in variables else value
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {each["what"]: each for each in json.loads(file.read_text())["rows"]}
    assert {"training on the CPU, steps", "training on all 2 slots at once"} <= rows.keys()
    assert all(each["ratio"] > 0 for what, each in rows.items() if what.startswith("training"))


def test_a_machine_without_a_driver_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu, gpu_report

    def missing() -> None:
        raise gpu_report.pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(gpu_report.pynvml, "nvmlInit", missing)
    monkeypatch.setattr("sys.argv", ["benchmarks", "gpu", "--report", str(tmp_path / "report.json")])
    assert list(gpu.run()) == []
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["gpus"] == [] and found["said"] == ["this machine has no NVIDIA driver"]


def test_a_failure_is_named_without_its_words(tmp_path: Path) -> None:
    from benchmarks.gpu_report import Report

    def failing() -> object:
        raise RuntimeError(f"cannot open {tmp_path}")
        yield

    with pytest.raises(RuntimeError):
        list(Report().kept(failing(), tmp_path / "report.json"))  # type: ignore[arg-type]
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text)["failed"] == "RuntimeError" and str(tmp_path) not in text
