"""Packages that stumble over the UUID of a slot's device: which versions `doctor` names, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checks.doctor import doctor, install
from fake_nvml.fake_machine import FakeMachine
from local_fleets.running_node import BIG, RunningNode, h100

from skyinfra.doctor import incompatible_packages

Machine = Callable[..., FakeMachine]


@pytest.mark.parametrize(
    ("name", "version", "whole", "partitioned"),
    [
        ("vllm", "0.20.1", "wrong", "wrong"),
        ("vllm", "0.5.2+cu124", "wrong", "wrong"),
        ("vllm", "0.24.0", None, "ok"),
        ("vllm", "1.0", None, "ok"),
        ("torch", "1.12.1", None, None),
        ("torch", "1.13.1+cu117", None, "wrong"),
        ("torch", "2.11.0+cu130", None, "ok"),
        ("deepspeed", "0.17.5", "ok", "ok"),
        ("sglang", "0.4.6.post2", None, "unknown"),
        ("sglang", "0.5.14", None, None),
        ("numpy", "2.0", None, None),
    ],
)
def test_versions(tmp_path: Path, name: str, version: str, whole: str | None, partitioned: str | None) -> None:
    install(tmp_path, name, version)
    for partitions, wanted in ((False, whole), (True, partitioned)):
        found = list(incompatible_packages.checks([str(tmp_path)], partitions=partitions))
        assert [each.result for each in found] == ([] if wanted is None else [wanted])
        for each in found:
            assert each.found.startswith(f"{name} {version} ")
            assert "#" in each.to_do, "what is known has a source"


def test_a_node_says_what_to_set(fake_machine: Machine, make_node: Callable[..., RunningNode]) -> None:
    machine = fake_machine("h100_80gb")
    node = make_node(accelerator=h100(BIG), simulate=False)
    install(node.directory.packages, "vllm", "0.20.1")
    config = ("--config", str(node.file))
    _, found = doctor(machine, *config)
    assert (found["vllm and device UUIDs"].result, found["vllm and device UUIDs"].wanted) == (
        "wrong",
        "vllm 0.24 or later",
    )
    assert machine.python("-m", "skyinfra.runner", "partition", *config).returncode == 0
    install(node.directory.packages, "torch", "2.11.0")
    _, found = doctor(machine, *config)
    assert found["torch and partitions"].result == "ok"
    assert "a larger partition" in found["torch and partitions"].to_do
