"""What the fork server of the workers imports before it forks them: a slot starts in a moment then, with all of it.

Only what the image declares: a library that opened a device while it was imported would hand that to every slot.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing.forkserver
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# Tells the fork server what to import: JSON, see `announce`.
VARIABLE = "SKYINFRA_PRELOAD"
# A process that has one of them open must not be forked for other slots.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/neuron", "/dev/accel")


def announce(modules: Sequence[str], *, packages: Path, env: Mapping[str, str]) -> None:
    """Has *modules* imported by the fork server from its next worker on.

    packages: the folder that comes first on its import path. env: variables that libraries read while they are
    imported. One that runs with others is replaced by a new one; the workers that it has forked stay.
    """
    wanted = json.dumps({"modules": [*modules], "packages": str(packages), "env": dict(env)}) if modules else None
    if wanted == os.environ.get(VARIABLE):
        return
    if wanted is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = wanted
    # The one of the standard library that is public starts it, and none ends it.
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def load(text: str, devices: Sequence[str] = DEVICES) -> None:
    """In the fork server: imports what *text* says. A module that cannot be imported is left out, and that logged.

    Where one of *devices* is open afterwards, the process begins anew, without any of them.
    """
    wanted = json.loads(text)
    os.environ.update(wanted["env"])
    if os.path.isdir(wanted["packages"]):  # noqa: PTH112 - as the worker does
        sys.path.insert(0, wanted["packages"])
    for name in wanted["modules"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a module may raise anything; the worker may do without it
            print(f"preload: {name} cannot be imported: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    opened = _open_devices(devices)
    if opened:
        names = ", ".join(wanted["modules"])
        print(
            f"preload: importing {names} opens {', '.join(opened)}; nothing is preloaded", file=sys.stderr, flush=True
        )
        del os.environ[VARIABLE]
        for name in wanted["env"]:
            os.environ.pop(name, None)
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this program once more


def _open_devices(devices: Sequence[str]) -> list[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)  # noqa: PTH115 - a device, as the kernel names it
            if target.startswith(tuple(devices)):
                found.add(target)
    return sorted(found)
