"""What nodes are handed at boot is a cloud-config that cloud-init takes, every word of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from first_boots.cloud_config import problems, schema
from support import ROOT

HEAD = "#cloud-config\n"
FILES = sorted(
    [*(ROOT / "tests" / "golden").glob("aws-*.yaml"), *(ROOT / "modules" / "aws" / "examples").rglob("*.yaml")]
)


@pytest.fixture(scope="module")
def rules() -> dict[str, Any]:
    return schema()


@pytest.mark.parametrize("file", [pytest.param(file, id=f"{file.parent.name}-{file.stem}") for file in FILES])
def test_committed_user_data(file: Path, rules: dict[str, Any]) -> None:
    assert problems(file.read_text(encoding="utf-8"), rules) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runcmd:\n  - [a]\n", "#cloud-config"),
        (f"{HEAD}runcmd:\n  - [a]\nruncmd:\n  - [b]\n", "'runcmd' is there twice"),
        (f"{HEAD}write_files:\n  - path: /a\n    path: /b\n", "'path' is there twice"),
        (f"{HEAD}wirte_files:\n  - path: /a\n", "wirte_files: unknown"),
        (f"{HEAD}write_files:\n  - path: /a\n    mode: '0644'\n", "write_files.0: "),
        (f"{HEAD}write_files:\n  - path: /a\n    permissions: 420\n", "write_files.0.permissions: "),
        (f"{HEAD}runcmd:\n  a: b\n", "runcmd: "),
        (f"{HEAD}apt_update: true\n", "apt_update: deprecated"),
        (f"{HEAD}runcmd: [\n", "expected"),
    ],
)
def test_mistakes_are_found(text: str, said: str, rules: dict[str, Any]) -> None:
    assert said in "\n".join(problems(text, rules))
