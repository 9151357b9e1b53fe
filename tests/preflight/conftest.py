from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws
from moto_aws.account import Cloud

import skyinfra as sky


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """An account with credentials in the environment, quotas that suffice, and every image."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-value")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    # Its 600 images take longer to make than a test takes.
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    with mock_aws():
        yield Cloud(tmp_path)


@pytest.fixture
def pool() -> Callable[..., sky.ComputePool]:
    """``pool("H100:8", nodes=2, aws={...})``"""

    def make(accelerator: Any = None, *, name: str = "p", aws: dict[str, Any] | None = None, **fields: Any) -> Any:
        return sky.ComputePool(name=name, provider=sky.AWS(**(aws or {})), accelerator=accelerator, **fields)

    return make
