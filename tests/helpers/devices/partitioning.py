"""``skyinfra-runner partition`` on a machine with the fake driver: its runs, what they print, and what then exists."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from typing import Any
from unittest import mock

from fake_nvml.fake_machine import FakeMachine

from skyinfra.mig import Placement
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig
from skyinfra.runner import cli

MIXED = "3g.40gb+2g.20gb+1g.10gb*2"
SEVEN = "1g.10gb*7"
EIGHT = ",".join(["h100_80gb"] * 8)
A100 = NodeAccelerator(
    *("A100-40GB", "nvidia", 1, 40.0, "a100_40gb"),
    layouts=((Placement("3g.20gb", 0, 4), Placement("2g.10gb", 4, 2)),),
)
# Those after which the machine is another; after every other call it is what it was before.
CHANGING = {
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
}


def program(machine: FakeMachine, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = machine.python("-m", "skyinfra.runner", "partition", *arguments)
    assert "Traceback" not in done.stderr
    return done


def run(machine: FakeMachine, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """As `program`, in this process: ten times as fast."""
    command = ["partition", *arguments]
    path = {"PATH": machine.environment()["PATH"]}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine.loaded(**settings))
        stack.enter_context(mock.patch.dict(os.environ, path))
        stack.enter_context(mock.patch("skyinfra.gpu.machine._ROOT", machine.root))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = cli.main(command)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def events(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def phases(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [event["phase"] for event in events(done) if event["event"] == "partition"]


def profiles(machine: FakeMachine) -> list[list[str]]:
    """What stands on each GPU, by start."""
    placed = [sorted((i["start"], i["profile"]) for i in gpu["instances"]) for gpu in machine.show()]
    return [[profile for _, profile in gpu] for gpu in placed]


def changes(machine: FakeMachine) -> int:
    """How often something was changed since the calls were forgotten."""
    return sum(count for function, count in machine.calls().items() if function in CHANGING)


def config(machine: FakeMachine, accelerator: NodeAccelerator = A100) -> list[str]:
    """A node configuration of one A100 in a folder that remembers a reboot: its arguments."""
    node = NodeConfig(1, "demo", "mig", "n1", "aws", True, "127.0.0.1:0", accelerator)
    file = machine.folder / "node.json"
    file.write_text(node.dumps())
    return ["--config", str(file)]
