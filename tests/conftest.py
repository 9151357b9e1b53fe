from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NPM = ROOT / "tests" / "npm" / "node_modules" / ".bin"


def missing(what: str) -> None:
    """A part that a test needs is not here: a failure under CI, a skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing on this machine", pytrace=False)
    pytest.skip(f"{what} is missing on this machine")


@pytest.fixture(scope="session")
def terraform_program() -> str:
    """A real terraform, or the embedded one."""
    from skyinfra import TerraformNotFound
    from skyinfra.terraform import find_program

    try:
        return find_program()[0]
    except TerraformNotFound:
        missing("terraform")
        raise


def cdk_program(library: str) -> str:
    """The npm command line of cdktf or cdktn."""
    if shutil.which("node") is None:
        missing("node")
    program = NPM / library
    if not program.exists():
        missing(f"{library}-cli")
    return str(program)


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the person who runs it has set, and none asks a registry for versions."""
    for name in ("SKYINFRA_DEBUG", "SKYINFRA_RUNNER", "CDKTF_OUTDIR", "CDKTF_CONTEXT_JSON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHECKPOINT_DISABLE", "1")
    monkeypatch.setenv("JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION", "1")
    monkeypatch.setenv("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "1")
    configuration = os.environ.get("TF_CLI_CONFIG_FILE")
    if configuration and not Path(configuration).exists():
        monkeypatch.delenv("TF_CLI_CONFIG_FILE")
