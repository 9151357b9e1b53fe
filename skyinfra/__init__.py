"""skyinfra: infrastructure as code for accelerator fleets.

The public names are imported on first use, so that ``import skyinfra`` costs milliseconds and starts no Node, no
Dask and no boto3. They stand in one table, from which `tools/build_stubs.py` writes what type checkers see.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

from skyinfra import errors as _errors
from skyinfra.errors import *

__version__ = "0.1.0"

# Module -> its public names. The exceptions, all of them public, stand in skyinfra.errors.
_NAMES = {
    "skyinfra.accelerators": "NVIDIA Accelerator AcceleratorSpec is_amd is_nvidia is_tpu is_trainium",
    "skyinfra.client": "AsyncJob AsyncPool Future GangWarning Job Pool connect connect_async current_pool wait",
    "skyinfra.deploy.kept": "KeptJob kept_jobs",
    "skyinfra.packing": "pack",
    "skyinfra.pool": "Budget ComputePool Image Range Worker",
    "skyinfra.protocol.gang": "Gang gang",
    "skyinfra.protocol.instance": "InstanceInfo current_accelerator instance_info",
    "skyinfra.protocol.interruption": "Interruption",
    "skyinfra.protocol.jobs": "JobInfo",
    "skyinfra.protocol.manifest": "Manifest",
    "skyinfra.protocol.secrets": "Secret",
    "skyinfra.providers.base": "cheapest",
    "skyinfra.providers.mounts": "Mount",
    "skyinfra.providers.volumes": "Volume",
    "skyinfra.recommendation": "recommend",
    "skyinfra.stack": "FleetStack",
    "skyinfra.tasks": "Gather Task cls compute gather",
    "skyinfra.terraform.backends": "HCPTerraform LocalState S3",
    "skyinfra.worker.checkpoints": "SpotCheckpointer",
    "skyinfra.worker.interruption": "interrupted interruption on_interrupt",
    "skyinfra.worker.stateful": "enter exit",
    "skyinfra.worker.streaming": "progress",
    "skyinfra.program.views": "files synced",
}
# Modules that are public names themselves.
_MODULES = ("accelerators", "mig", "offers", "plugins")
# What the declaration calls in rooms above it, when it is used as the whole program, and what IPython calls.
_UPWARD = {
    "_enter": "skyinfra.deploy.session:enter",
    "_leave": "skyinfra.deploy.session:leave",
    "load_ipython_extension": "skyinfra.magic:load_ipython_extension",
    "unload_ipython_extension": "skyinfra.magic:unload_ipython_extension",
}


def _of_providers() -> dict[str, str]:
    """Returns the names of each provider, of the line ``exports = "MODULE: NAMES"`` of its data file; none on nodes."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("providers/*.toml")):
        with file.open(encoding="utf-8") as lines:
            line = next(line for line in lines if line.startswith("exports = "))
        module, names = line.split('"')[1].split(": ")
        found[f"skyinfra.providers.{module}"] = names
    return found


_PROVIDERS = _of_providers()
_NAMES |= _PROVIDERS
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_errors.__all__, *_LAZY, *_MODULES, "__version__"])

_prewarm: Any = None
# cdktf, cdktn and `skyinfra synth` set it for the programs that they run.
if "CDKTF_CONTEXT_JSON" in os.environ:
    with contextlib.suppress(ModuleNotFoundError):  # no node has it
        _prewarm = importlib.import_module("skyinfra.prewarm")
        _prewarm.start()


def __getattr__(name: str) -> Any:
    if _prewarm is not None:
        _prewarm.wait()
    if name in _MODULES:
        return importlib.import_module(f"skyinfra.{name}")
    module, _, attribute = _UPWARD.get(name, f"{_LAZY.get(name, '')}:{name}").partition(":")
    if not module and not _PROVIDERS and name[:1].isupper():
        module = "skyinfra.providers"
    if not module:
        raise _errors.no_attribute(name, "sky")
    try:
        value = globals()[name] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("skyinfra."):
            error.add_note(
                f"Nodes have what runners need of skyinfra, and sky.{name} is none of it: "
                f'sky.Image(runner="skyinfra=={__version__}") installs all of it there.'
            )
        raise
    return value


def __dir__() -> list[str]:
    return __all__
