from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _needs_terraform(terraform_program: str) -> None:
    """Every test here drives a real Terraform."""
