from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import missing


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


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the person who runs it has set, and none asks a registry for versions."""
    for name in ("SKYINFRA_DEBUG", "SKYINFRA_RUNNER", "CDKTF_OUTDIR", "CDKTF_CONTEXT_JSON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHECKPOINT_DISABLE", "1")
    configuration = os.environ.get("TF_CLI_CONFIG_FILE")
    if configuration and not Path(configuration).exists():
        monkeypatch.delenv("TF_CLI_CONFIG_FILE")
