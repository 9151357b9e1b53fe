"""Pools whose user data tests look into: their files and steps."""

from __future__ import annotations

import json
from typing import Any

import yaml

import skyinfra as sky
from skyinfra.compiler import Deployment, compile_pool

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def aws(accelerator: Any = "H100:8/3g.40gb+2g.20gb+1g.10gb*2", **fields: Any) -> Deployment:
    """Returns a compiled pool of AWS."""
    pool = sky.ComputePool(**{"name": "p", "provider": sky.AWS(), "accelerator": accelerator, **fields})
    return compile_pool(pool, "s")


def files(text: str) -> dict[str, str]:
    """Returns the files of a cloud-config by path."""
    assert text.startswith("#cloud-config\n")
    document = yaml.load(text, _LOADER)
    assert set(document) == {"bootcmd", "write_files", "runcmd"}
    return {file["path"]: file["content"] for file in document["write_files"]}


def steps(text: str) -> dict[str, dict[str, Any]]:
    """Returns the steps of a first boot by name, in order."""
    document = json.loads(files(text)["/opt/skyinfra/steps.json"])
    return {step["name"]: step for step in document["steps"]}
