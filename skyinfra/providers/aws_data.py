"""The IAM permissions of a deploy on AWS, from aws_actions.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ACTIONS = Path(__file__).with_name("aws_actions.json")


def permissions() -> dict[str, Any]:
    """The IAM actions of a deploy, by part of modules/aws: those that Terraform calls, and others with a reason."""
    found: dict[str, Any] = json.loads(_ACTIONS.read_text(encoding="utf-8"))
    return found


def partition(region: str) -> str:
    """The AWS partition of a region, which has accounts and prices of its own."""
    return "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"
