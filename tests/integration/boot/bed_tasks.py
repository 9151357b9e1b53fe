"""Tasks that tests ship to booted nodes. They travel by value: the nodes have no test modules."""

from __future__ import annotations

import os
import time
from pathlib import Path

import skyinfra as sky
from skyinfra.protocol.instance import instance_info


@sky.compute
def look() -> tuple[str, str, int, str]:
    """Where a task runs: node, slot, user, device."""
    found = instance_info()
    return found.node, found.slot, os.getuid(), os.environ["CUDA_VISIBLE_DEVICES"]


@sky.compute
def work(number: int, seconds: float) -> tuple[int, str]:
    """Leaves the file ``started-NUMBER`` in its node's folder, then takes *seconds*. *number*, and the node."""
    (Path(os.environ["SKYINFRA_NODE_DIR"]) / f"started-{number}").touch()
    time.sleep(seconds)
    return number, instance_info().node
