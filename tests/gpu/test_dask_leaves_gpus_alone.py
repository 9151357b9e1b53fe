"""Dask asks NVML of its own accord, keeps it open, and does not expect what it answers to users who are not root."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_nvml.fake_machine import FakeMachine
from local_fleets.running_node import RunningNode

MACHINE = "h100_80gb"


def test_a_user_serves_a_machine_with_partitions(
    make_node: Callable[..., RunningNode], fake_machine: Callable[..., FakeMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = fake_machine(MACHINE)
    machine.python("-m", "skyinfra.runner", "partition", "--layout", "3g.40gb").check_returncode()
    machine.forget_calls()
    for name, value in machine.environment(UNPRIVILEGED="1").items():
        monkeypatch.setenv(name, value)
    # The accelerators of this node are none: whatever is asked of NVML is not asked by the runner.
    node = make_node(cpu_slots=1)
    assert node.boot().state == "ready"
    node.quiet_log()
    assert not machine.calls()
