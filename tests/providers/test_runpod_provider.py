"""RunPod: from a declaration to module inputs; what is refused says what would work."""

from __future__ import annotations

import re
from typing import Any

import pytest

import skyinfra as sky
from skyinfra import offers
from skyinfra.bootstrap import runner_wheel, user_data
from skyinfra.compiler import Deployment, compile_pool
from skyinfra.terraform.cloud_errors import refusals

RUNNER = f"https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={'a' * 64}"


def compiled(runpod: dict[str, Any] | None = None, **fields: Any) -> Deployment:
    fields = {"image": sky.Image(runner=RUNNER), **fields}
    return compile_pool(sky.ComputePool(name="p", provider=sky.RunPod(**(runpod or {})), **fields), "s")


@pytest.mark.parametrize(
    ("accelerator", "machine"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090 (secure)"),
        (sky.accelerators.RTX_4090(count=2), "2x NVIDIA GeForce RTX 4090 (secure)"),
        (sky.accelerators.RTX_3080(), "NVIDIA GeForce RTX 3080 (secure)"),
        (sky.accelerators.RTX_A6000(), "NVIDIA RTX A6000 (secure)"),
        (sky.accelerators.MI300X(), "AMD Instinct MI300X OAM (secure)"),
        (sky.accelerators.H100(count=8, form_factor="SXM"), "8x NVIDIA H100 80GB HBM3 (secure)"),
    ],
)
def test_the_machine(accelerator: Any, machine: str) -> None:
    assert compiled(accelerator=accelerator).selection.machine_types == (machine,)


def test_the_cloud_and_the_price() -> None:
    secure, community = (
        compiled({"cloud": cloud}, accelerator="RTX 4090").selection for cloud in ("secure", "community")
    )
    assert (secure.hourly_cost, community.hourly_cost) == (0.69, 0.34)
    assert community.machine_types == ("NVIDIA GeForce RTX 4090 (community)",)
    assert compiled(accelerator="RTX 4090", max_hourly_cost=0.7).selection.hourly_cost == 0.69


def test_cpu_pods_are_the_smallest_that_will_do() -> None:
    assert compiled().selection.machine_types == ("cpu3c-2-4",)
    assert compiled(vcpus=6, memory_gb=20).selection.machine_types == ("cpu3g-8-32",)


def test_what_is_declared_reaches_the_module_and_nothing_else() -> None:
    least = {"allow_cidrs": [], "scheduler_port": 8786, "data_centers": [], "wait_seconds": 1200}
    assert compiled(accelerator="L4").selection.inputs == least
    own = {"data_centers": ["EU-RO-1"], "registry": "cred", "min_cuda": "12.8", "wait_seconds": 60}
    assert compiled(own, accelerator="L4").selection.inputs == {**least, **own}


def test_the_user_data_are_the_entry_of_a_container_and_fit() -> None:
    data = user_data(compiled(accelerator="RTX 4090"))
    assert data.head.startswith("#!/bin/sh\n") and "@SKYINFRA_HEAD@" not in data.head
    assert "@SKYINFRA_HEAD@" in data.worker and RUNNER.partition("#")[0] in data.worker


@pytest.mark.parametrize(
    "runner", [None, "skyinfra==0.1.0", RUNNER.partition("#")[0], f"{RUNNER}0", "https://h/a.tar.gz"]
)
def test_a_runner_without_its_hash_is_refused_with_the_way_to_one(runner: str | None) -> None:
    with pytest.raises(sky.NotSupported, match="address and its hash") as caught:
        user_data(compiled(image=sky.Image(runner=runner)))
    assert caught.value.field == "image.runner" and runner_wheel.wheel().sha256 in str(caught.value)
    declared = re.search(r'runner="([^"]+)"', str(caught.value))
    assert declared and user_data(compiled(image=sky.Image(runner=declared[1]))).head


@pytest.mark.parametrize(
    ("runpod", "fields", "words"),
    [
        ({}, {"spot": True}, ["RunPod has no spot machines", "aws"]),
        ({}, {"accelerator": "H100/3g.40gb"}, ["nobody may partition a GPU on RunPod"]),
        ({}, {"accelerator": "MI300X/CPX"}, ["nobody may partition a GPU on RunPod"]),
        ({}, {"labels": {"team": "ml"}}, ["pods have no labels"]),
        ({}, {"accelerator": "Trainium2:16"}, ["accelerator"]),
        ({}, {"vcpus": 64}, ["vCPUs", "cpu3g-32-128"]),
        ({"cloud": "community"}, {"accelerator": "MI300X"}, ['cloud "community"', "sky.RunPod(cloud='secure')"]),
        ({"min_cuda": "12.8"}, {"accelerator": "MI300X"}, ["NVIDIA GPUs"]),
        ({"instance_types": ["NVIDIA GeForce RTX 4090"]}, {"accelerator": "RTX 4090"}, ["Did you mean", "(secure)"]),
    ],
)
def test_refusals(runpod: dict[str, Any], fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(sky.SkyinfraError) as caught:
        compiled(runpod, **fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "runpod",
    [
        {"region": "EU-RO-1"},
        {"cloud": "spot"},
        {"data_centers": "EU-RO-1"},
        {"image": "-v"},
        {"min_cuda": "12"},
        {"allow_cidrs": ["203.0.113.7/32"]},
        {"ssh_public_key": "ssh-ed25519 AAAA"},
        {"head_instance_type": "cpu3c-2-4"},
        {"wait_seconds": 0},
    ],
)
def test_fields_that_make_no_sense(runpod: dict[str, Any]) -> None:
    with pytest.raises((sky.InvalidField, sky.NotSupported)):
        sky.RunPod(**runpod)


def test_nothing_interruptible_is_listed() -> None:
    mine = [offer for offer in offers.load() if offer.provider == "runpod"]
    assert mine and not any("(spot)" in offer.machine_type or offer.spot or offer.mig_model for offer in mine)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("401 Unauthorized | Make sure Runpod API key is set and valid.", "CloudCredentialsRefused"),
        ("Failed to get pod ID from response. Status: 401, Body: {}", "CloudCredentialsRefused"),
        ("There are no longer any instances available with the requested specifications.", "CapacityUnavailable"),
        ("Failed to get pod ID from response. Status: 402, Body: {}", "QuotaExceeded"),
        ("Failed to get pod ID from response. Status: 403, Body: {}", "CloudPermissionDenied"),
        ("Failed to delete pod (status: 429): {}", "CloudThrottled"),
        # As a version of the provider prints the body.
        ("Failed to get pod ID from response: map[status:402 title:Payment Required]", "QuotaExceeded"),
    ],
)
def test_what_the_api_says_is_known(said: str, cause: str) -> None:
    found = refusals([("module.p.runpod_pod.head", f"Error creating pod: {said}")])
    assert [each.cause for each in found] == [cause]
