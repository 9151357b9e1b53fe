"""Containers: from a declaration to module inputs; what is refused says what would work."""

from __future__ import annotations

from typing import Any

import pytest

import skyinfra as sky
from skyinfra.bootstrap import user_data
from skyinfra.compiler import Deployment, compile_pool

PARTED = sky.accelerators.Custom("H100-3g.40gb", memory="40GB")


def compiled(container: dict[str, Any] | None = None, **fields: Any) -> Deployment:
    return compile_pool(sky.ComputePool(name="p", provider=sky.Container(**(container or {})), **fields), "s")


def inputs(container: dict[str, Any] | None = None, **fields: Any) -> dict[str, object]:
    return compiled(container, **fields).selection.inputs


def test_a_container_costs_nothing_and_has_an_image() -> None:
    selection = compiled().selection
    assert (selection.machine_types, selection.price_note) == (("container",), "this machine")
    assert selection.image.startswith("python:") and not selection.prices
    assert compiled({"image": "registry.example.com/own:1"}).selection.image == "registry.example.com/own:1"


def test_what_is_declared_reaches_the_module_and_nothing_else() -> None:
    assert inputs() == {"scheduler_port": 8786, "wait_seconds": 600, "gpus": []}
    own = {"engine": "podman", "network": "mine", "host": "ssh://me@gpu1", "port": 9000}
    assert inputs(own) == {**inputs(), **own}
    assert compiled(own).selection.price_note == "another machine of yours"


@pytest.mark.parametrize(
    ("container", "scheduler"),
    [
        ({}, "0.0.0.0:8786"),
        ({"port": 9000}, "0.0.0.0:8786"),
        ({"network": "mine", "port": 9000}, "0.0.0.0:8786"),
        ({"network": "host"}, "127.0.0.1:8786"),
        ({"network": "host", "port": 9000}, "127.0.0.1:9000"),
        ({"network": "host", "port": 9000, "host": "ssh://gpu1"}, "0.0.0.0:9000"),
        ({"network": "host", "host": "unix:///run/podman/podman.sock"}, "127.0.0.1:8786"),
    ],
)
def test_where_the_head_listens(container: dict[str, Any], scheduler: str) -> None:
    made = compiled(container)
    assert made.head.scheduler == scheduler
    assert made.selection.inputs["scheduler_port"] == int(scheduler.rpartition(":")[2])


def test_gpus_are_shared_out_among_nodes() -> None:
    assert inputs(accelerator="H100:2")["gpus"] == ["all"]
    four = {"gpus": ["GPU-1", "GPU-2", "GPU-3", "GPU-4"]}
    assert inputs(four, accelerator="H100", nodes=2)["gpus"] == four["gpus"]
    assert compiled(four, accelerator="H100", nodes=2).selection.count == 2
    assert compiled(four, accelerator="H100:4").selection.count == 4
    two = compiled({"gpus": ["MIG-1", "MIG-2"]}, accelerator=PARTED, nodes=2)
    assert [slot.kind for slot in two.slots] == ["chip"]


@pytest.mark.parametrize(
    ("container", "fields", "words"),
    [
        ({}, {"spot": True}, ["spot", "Leave spot out for sky.Container()"]),
        ({}, {"memory_gb": 64.0}, ["memory_gb", "what its host has"]),
        ({}, {"accelerator": "H100/3g.40gb"}, ["may not partition", 'gpus=["MIG-..."]', "sky.Local() on the host"]),
        ({}, {"accelerator": "MI300X/CPX"}, ["may not partition"]),
        ({}, {"accelerator": "MI300X"}, ["NVIDIA GPUs alone", "sky.Local()"]),
        ({}, {"accelerator": "H100", "nodes": 2}, ["2 nodes would share", "nvidia-smi -L"]),
        ({"gpus": ["GPU-1"]}, {}, ["go with an accelerator"]),
        ({"gpus": ["GPU-1"]}, {"accelerator": "H100:2"}, ["1 nodes with 2 GPUs each need 2", "'GPU-1'"]),
        ({"gpus": ["GPU-1", "GPU-1"]}, {"accelerator": "H100:2"}, ["none twice"]),
        ({"gpus": ["GPU-1", "GPU-2", "GPU-3"]}, {"accelerator": "H100", "nodes": 2}, ["each need 2"]),
        ({"gpus": ["MIG-1", "MIG-2"]}, {"accelerator": PARTED}, ["one MIG device each need 1"]),
        ({"gpus": ["MIG-1"]}, {"accelerator": "H100"}, ["sky.accelerators.Custom"]),
        ({"gpus": ["GPU-1"]}, {"accelerator": PARTED}, ["sky.accelerators.Custom"]),
    ],
)
def test_refusals(container: dict[str, Any], fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((sky.NotSupported, sky.InvalidField)) as caught:
        compiled(container, **fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "container",
    [
        {"engine": "crun"},
        {"image": "-v"},
        {"image": "a image"},
        {"gpus": "GPU-1"},
        {"gpus": ["$(reboot)"]},
        {"network": "bridge"},
        {"network": "a b"},
        {"host": "gpu1"},
        {"host": "ssh://gpu1 -oProxyCommand=x"},
        {"port": 0},
        {"partition": "host"},
    ],
)
def test_fields_that_make_no_sense(container: dict[str, Any]) -> None:
    with pytest.raises(sky.InvalidField):
        sky.Container(**container)


def test_the_user_data_are_a_script_that_holds_neither_secret_nor_units() -> None:
    data = user_data(compiled(image=sky.Image(env={"A": "it's"}, apt=["git"])))
    for text in (data.head, data.worker):
        assert text.startswith("#!/bin/sh\n") and "systemctl" not in text.partition("steps.json")[0]
        assert "@SKYINFRA_SECRET@" not in text and "@SKYINFRA_BUCKET@/secret" in text
        assert '"operation":"units"' not in text and '"operation":"packages"' in text
    # The jobs of the head are on a volume of the engine.
    assert '"operation":"volume"' in data.head and '"operation":"volume"' not in data.worker


def test_a_changed_image_or_variable_replaces_nodes_and_a_port_does_not() -> None:
    first = user_data(compiled()).revision
    assert user_data(compiled(image=sky.Image(env={"A": "1"}))).revision != first
    assert user_data(compiled({"port": 9000, "wait_seconds": 5})).revision == first
