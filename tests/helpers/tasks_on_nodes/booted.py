"""Tasks that tests ship to booted nodes. They travel by value: the nodes have no test modules."""

from __future__ import annotations

import os
import subprocess
import time
from importlib import metadata
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


@sky.compute
def stay(number: int, node: str) -> tuple[int, str]:
    """On *node*: goes on until it is interrupted, and does not end then either. Elsewhere: *number*, and that node."""
    here = instance_info().node
    folder = Path(os.environ["SKYINFRA_NODE_DIR"])
    (folder / f"started-{number}").touch()
    while here == node:
        time.sleep(0.1)
        if sky.interrupted():
            (folder / f"interrupted-{number}").touch()
    return number, here


@sky.compute
def package(name: str) -> str:
    """The version of an installed package."""
    return metadata.version(name)


@sky.compute
def output_of(command: str) -> str:
    """What a shell command prints."""
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
