from __future__ import annotations

import os
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import build
from fake_nvml.fake_machine import FakeMachine
from hypothesis import settings
from support import ROOT, missing

pytest_plugins = [
    "local_fleets.client_fixtures",
    "local_fleets.node_fixtures",
    "cloud_modules.failing_clouds",
    "front_ends.browser",
    "front_ends.notebooks",
    "devices.nvml_contract",
]

# Assertions of these say what they compared, as those of tests do.
pytest.register_assert_rewrite("checks", "terraform_projects")

# Timing decides no test.
settings.register_profile("skyinfra", deadline=None)
settings.load_profile("skyinfra")

# Terraform and the aws provider take a quarter of their time for the garbage that reading 13 MB of schemas leaves.
os.environ.setdefault("GOGC", "400")

# Output that is written at once hides what tasks see where it is not.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shell starts what runs in its background with Ctrl-C ignored, which programs inherit; those of the tests do not.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _hangup_as_before() -> Iterator[None]:
    """A runner that a test calls in this process ignores SIGHUP from then on, which later programs would inherit."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    if signal.getsignal(signal.SIGHUP) is not before:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def terraform_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that is a real terraform, or the embedded one."""
    from skyinfra import TerraformNotFound
    from skyinfra.terraform.program import find_program

    try:
        program = find_program()
    except TerraformNotFound:
        missing("terraform")
        raise
    if len(program) == 1:
        return program[0]
    file = tmp_path_factory.mktemp("terraform") / "terraform"
    file.write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture(scope="session")
def fake_driver() -> Path:
    """The folder of the fake NVIDIA driver, built."""
    if build.compiler() is None:
        missing("a C compiler (gcc)")
    return build.build(ROOT / "build" / "fake-nvml")


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory, where there is one: for what replaces a file thousands of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def fake_machine(fake_driver: Path, memory_path: Path) -> Callable[..., FakeMachine]:
    """``fake_machine("h100_80gb,a30", old=False, LINGER="2")``: a machine with these GPUs and settings."""

    def make(gpus: str = "h100_80gb", *, old: bool = False, **settings: Any) -> FakeMachine:
        return FakeMachine(fake_driver, memory_path, gpus, settings, old)

    return make


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the person who runs it has set, and none asks a registry for versions."""
    for name in ("SKYINFRA_DEBUG", "SKYINFRA_RUNNER", "CDKTF_OUTDIR", "CDKTF_CONTEXT_JSON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHECKPOINT_DISABLE", "1")
    configuration = os.environ.get("TF_CLI_CONFIG_FILE")
    if configuration and not Path(configuration).exists():
        monkeypatch.delenv("TF_CLI_CONFIG_FILE")
