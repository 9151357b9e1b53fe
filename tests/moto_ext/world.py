"""What a test says about the world: the JSON file named by ``MOTO_EXT_WORLD``, read at every call.

``no_capacity``: machine types that EC2 has no capacity for: ``TYPE``, ``TYPE/spot`` or ``TYPE/REGION``.
``not_offered``: [machine type, zone] that are not offered, though moto lists them.
``refuse``: actions that AWS refuses, each ``{"action", "code", "message", "status"}``; ``after``: calls that it lets
through before, ``times``: how many it refuses then, all where it is left out.
``quotas``: the value of a quota by its code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from moto.ec2.models import EC2Backend
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

FILE = "MOTO_EXT_WORLD"


def told(what: str) -> Any:
    """What the test says of *what*; an empty list where it says nothing."""
    path = Path(os.environ.get(FILE, os.devnull))
    return json.loads(path.read_text()).get(what, []) if path.is_file() else []


def offered_in(backend: Any, kind: str) -> list[str]:
    """The zones of the backend's region that offer a machine type."""
    listed = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(backend.region_name, [])
    not_offered = told("not_offered")
    return sorted(
        each["Location"]
        for each in listed
        if each["InstanceType"] == kind and [kind, each["Location"]] not in not_offered
    )


def install() -> None:
    describe = EC2Backend.describe_instance_type_offerings

    def _describe(self: Any, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
        not_offered = told("not_offered")
        found = describe(self, *arguments, **options)
        return [each for each in found if [each["InstanceType"], each["Location"]] not in not_offered]

    EC2Backend.describe_instance_type_offerings = _describe
