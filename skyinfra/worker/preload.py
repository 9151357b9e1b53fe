"""Preloads the modules that the image declares in the fork server of the workers, so that workers start quickly."""

from __future__ import annotations

import importlib
import json
import multiprocessing.forkserver
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyinfra.node import device, processes

# The modules for the fork server, as JSON, see `announce`.
VARIABLE = "SKYINFRA_PRELOAD"


def announce(modules: Sequence[str], *, packages: Path, env: Mapping[str, str]) -> None:
    """Makes the fork server import *modules* before its next worker.

    packages: the first folder on its import path. env: variables that libraries read while they are imported. A fork
    server with other parameters is replaced; its workers stay.
    """
    wanted = json.dumps({"modules": [*modules], "packages": str(packages), "env": dict(env)}) if modules else None
    if wanted == os.environ.get(VARIABLE):
        return
    if wanted is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = wanted
    # The standard library has no public function that ends it.
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def load(text: str, devices: Sequence[str] = device.FILES) -> None:
    """In the fork server: imports the modules in *text*, and logs those that cannot be imported.

    Where one of *devices* is open afterwards, the process starts anew without preloading: it must not be forked, since
    every slot would inherit the device.
    """
    wanted = json.loads(text)
    os.environ.update(wanted["env"])
    if os.path.isdir(wanted["packages"]):  # noqa: PTH112 - as the worker does
        sys.path.insert(0, wanted["packages"])
    for name in wanted["modules"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a module may raise anything; the worker may not need it
            print(f"preload: {name} cannot be imported: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    opened = sorted({file for file in processes.open_files("self") if file.startswith(tuple(devices))})
    if opened:
        names = ", ".join(wanted["modules"])
        print(
            f"preload: importing {names} opens {', '.join(opened)}; nothing is preloaded", file=sys.stderr, flush=True
        )
        del os.environ[VARIABLE]
        for name in wanted["env"]:
            os.environ.pop(name, None)
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this program once more


def seed_anew() -> None:
    """In a worker process: gives PyTorch, where the fork server has imported it, random numbers of this process's own.

    Python does so for `random`, and Dask for numpy.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
