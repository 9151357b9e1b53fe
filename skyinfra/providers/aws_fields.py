"""Checks of values that AWS would refuse in the middle of a plan, and the IAM permissions of a deploy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from skyinfra.errors import InvalidField
from skyinfra.providers.data import Strings

_ACTIONS = Path(__file__).with_name("aws_actions.json")
# The metadata service shows the tags of an instance by their keys, so EC2 takes no spaces and slashes there; S3 and IAM
# take no comma.
_LABEL = re.compile(r"[A-Za-z0-9+=._:@-]{1,128}")
_TAKEN = re.compile(r"(?i:aws:|skyinfra:)|Name$|\.{1,2}$|_index$")
_VALUE = re.compile(r"[\w +=.:/@-]{0,256}")
_LABELS = 40
# How the regions of a partition begin, as botocore's partitions.json has it.
_PARTITIONS = {
    "cn-": "aws-cn",
    "us-gov-": "aws-us-gov",
    "eusc-": "aws-eusc",
    "us-iso-": "aws-iso",
    "us-isob-": "aws-iso-b",
    "eu-isoe-": "aws-iso-e",
    "us-isof-": "aws-iso-f",
}


def _zones(given: tuple[str, ...]) -> tuple[str, ...]:
    for zone in given:
        if not re.fullmatch(r"[a-z]{2,4}(-[a-z]+)+-\d[a-z]", zone):
            raise InvalidField(
                "expected an Availability Zone such as us-east-1a",
                field="AWS.zones",
                given=zone,
                hint="For a Local Zone or Wavelength Zone give subnet_ids.",
            )
    return given


def _types(given: tuple[str, ...]) -> tuple[str, ...]:
    for name in given:
        if not re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", name):
            raise InvalidField("expected a machine type such as p5.48xlarge", field="AWS.instance_types", given=name)
    return given


def check_labels(labels: Mapping[str, str], *, role: bool = True) -> None:
    """Raises `InvalidField` where *labels* cannot be tags of EC2. role: whether a role gets them too."""
    names: dict[str, str] = {}
    for key, value in labels.items():
        other = names.setdefault(key.lower(), key)
        if role and other != key:
            raise InvalidField(
                f"differs from {other} in case alone, and IAM takes both for one name",
                field="labels",
                given=key,
                hint="Leave one of them out, or give it another name.",
            )
        if not _LABEL.fullmatch(key) or _TAKEN.match(key):
            raise InvalidField(
                "expected a name of letters, digits and + - = . _ : @, at most 128 characters; not Name, and not "
                "beginning with aws: or skyinfra:, which are taken",
                field="labels",
                given=key,
            )
        if not _VALUE.fullmatch(value):
            raise InvalidField(
                "expected at most 256 letters, digits, spaces and + - = . _ : / @", field=f"labels[{key}]", given=value
            )
    if len(labels) > _LABELS:
        raise InvalidField(
            f"at most {_LABELS}: AWS takes 50 tags, and some are taken", field="labels", given=len(labels)
        )


Zones = Annotated[Strings, AfterValidator(_zones)]
MachineTypes = Annotated[Strings, AfterValidator(_types)]


def permissions() -> dict[str, Any]:
    """The IAM actions of a deploy, by part of modules/aws: those that Terraform calls, and others with a reason."""
    found: dict[str, Any] = json.loads(_ACTIONS.read_text(encoding="utf-8"))
    return found


def partition(region: str) -> str:
    """Returns the AWS partition of a region, which has accounts and prices of its own."""
    return next((name for begins, name in _PARTITIONS.items() if region.startswith(begins)), "aws")
