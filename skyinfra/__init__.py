"""skyinfra: infrastructure as code for accelerator fleets.

The public names are imported on first use, so that ``import skyinfra`` costs milliseconds and starts no Node, no
Dask and no boto3.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skyinfra import _errors
from skyinfra._errors import *  # noqa: F403 - the exception tree is public as it stands

if TYPE_CHECKING:
    from skyinfra.client.futures import Future as Future
    from skyinfra.client.pool import Pool as Pool
    from skyinfra.client.task import Gather as Gather
    from skyinfra.client.task import Task as Task
    from skyinfra.client.task import compute as compute
    from skyinfra.client.task import gather as gather
    from skyinfra.protocol.instance import current_accelerator as current_accelerator
    from skyinfra.protocol.instance import instance_info as instance_info

__version__ = "0.1.0"

# public name -> module that defines it, or None where the name is a module itself
_LAZY: dict[str, str | None] = {
    "Accelerator": "skyinfra.accelerators",
    "AcceleratorSpec": "skyinfra.accelerators",
    "NVIDIA": "skyinfra.accelerators",
    "Future": "skyinfra.client.futures",
    "Gather": "skyinfra.client.task",
    "Pool": "skyinfra.client.pool",
    "Task": "skyinfra.client.task",
    "accelerators": None,
    "compute": "skyinfra.client.task",
    "current_accelerator": "skyinfra.protocol.instance",
    "gather": "skyinfra.client.task",
    "instance_info": "skyinfra.protocol.instance",
    "is_amd": "skyinfra.accelerators",
    "is_nvidia": "skyinfra.accelerators",
    "is_tpu": "skyinfra.accelerators",
    "is_trainium": "skyinfra.accelerators",
    "mig": None,
}

__all__ = sorted(["__version__", *_errors.__all__, *_LAZY])


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'skyinfra' has no attribute {name!r}")
    module = _LAZY[name]
    value = (
        importlib.import_module(f"skyinfra.{name}")
        if module is None
        else getattr(importlib.import_module(module), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
