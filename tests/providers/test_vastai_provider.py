"""Vast.ai: from a declaration to module inputs; what is refused says what would work."""

from __future__ import annotations

from typing import Any

import pytest

import skyinfra as sky
from skyinfra.bootstrap import user_data
from skyinfra.compiler import Deployment, compile_pool
from skyinfra.terraform.cloud_errors import refusals

RUNNER = f"https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={'a' * 64}"


def compiled(vastai: dict[str, Any] | None = None, **fields: Any) -> Deployment:
    fields = {"image": sky.Image(runner=RUNNER), "accelerator": "RTX 4090", **fields}
    return compile_pool(sky.ComputePool(name="p", provider=sky.VastAI(**(vastai or {})), **fields), "s")


@pytest.mark.parametrize(
    ("accelerator", "machine"),
    [
        ("RTX 4090", "1x-RTX_4090-32-65536"),
        (sky.accelerators.RTX_4090(count=8), "8x-RTX_4090-32-65536"),
        (sky.accelerators.RTX_5080(), "1x-RTX_5080"),
        (sky.accelerators.RTX_4070_Ti(), "1x-RTX_4070_Ti"),
        (sky.accelerators.RTX_3080(), "1x-RTX_3080"),
        (sky.accelerators.RTX_6000_Ada(), "1x-RTX_6000Ada"),
        (sky.accelerators.MI300X(), "1x-InstinctMI300X"),
        ("H100:8", "8x-H100_SXM-32-65536"),
    ],
)
def test_the_machine(accelerator: Any, machine: str) -> None:
    assert compiled(accelerator=accelerator).selection.machine_types == (machine,)


def test_every_consumer_gpu_of_the_catalog_that_is_rented_anywhere_compiles() -> None:
    names = ["RTX_5090", "RTX_5080", "RTX_4090", "RTX_4080", "RTX_4070_Ti", "RTX_3090", "RTX_3080", "RTX_A6000"]
    names += ["RTX_2080_Ti", "GTX_1080_Ti", "GTX_1660", "RTX_6000_Ada", "RTX_PRO_6000", "MI250X", "MI210", "MI100"]
    for name in names:
        assert compiled(accelerator=getattr(sky.accelerators, name)()).selection.count == 1


def test_what_is_declared_reaches_the_module_and_nothing_else() -> None:
    least = {"allow_cidrs": [], "scheduler_port": 8786, "min_reliability": 0.95, "wait_seconds": 1200}
    assert compiled().selection.inputs == least
    own = {"datacenter": True, "countries": ["SE"], "min_cuda": "12.8", "wait_seconds": 60, "min_reliability": 0.9}
    assert compiled(own).selection.inputs == {**least, **own}


def test_what_the_pool_asks_for_is_asked_for_at_the_deploy() -> None:
    # Of machines that are long gone, nothing is known.
    made = compiled(vcpus=128, memory_gb=512.0, max_hourly_cost=0.01).selection
    asked = {name: made.inputs[name] for name in ("min_vcpus", "min_memory_gb", "max_price")}
    assert asked == {"min_vcpus": 128, "min_memory_gb": 512.0, "max_price": 0.01}
    assert made.price_note.endswith("the cheapest offer at the deploy is taken")


def test_a_bid_is_for_the_machine_and_says_so() -> None:
    made = compiled({"bid": 1.5}, accelerator="RTX 4090:4", spot=True, max_hourly_cost=2).selection
    assert made.inputs["bid"] == 1.5 and "max_price" not in made.inputs
    assert "a bid of $1.5/h for the machine" in made.price_note and "per GPU" in made.price_note


def test_the_user_data_are_the_entry_of_a_container_and_fit() -> None:
    data = user_data(compiled())
    assert data.head.startswith("#!/bin/sh\n") and "@SKYINFRA_HEAD@" not in data.head
    with pytest.raises(sky.NotSupported, match=r"a node of Vast\.ai fetches the runner itself"):
        user_data(compiled(image=sky.Image()))


@pytest.mark.parametrize(
    ("vastai", "fields", "words"),
    [
        ({}, {"spot": True}, ["provider.bid", "sky.VastAI(bid=0.4)"]),
        ({"bid": 1}, {}, ["provider.bid", "spot=True"]),
        ({"bid": 2}, {"spot": True, "max_hourly_cost": 1}, ["above max_hourly_cost"]),
        ({}, {"accelerator": "H100/3g.40gb"}, ["nobody may partition a GPU on Vast.ai"]),
        ({}, {"accelerator": "MI300X/CPX"}, ["nobody may partition a GPU on Vast.ai"]),
        ({}, {"labels": {"team": "ml"}}, ["instances have no labels"]),
        ({}, {"accelerator": None}, ["no machines without accelerators"]),
        ({}, {"accelerator": "Trainium2:16"}, ["accelerator"]),
        ({"instance_types": ["1x-RTX_4091"]}, {}, ["Did you mean"]),
    ],
)
def test_refusals(vastai: dict[str, Any], fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(sky.SkyinfraError) as caught:
        compiled(vastai, **fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "vastai",
    [
        {"region": "SE"},
        {"bid": 0},
        {"min_reliability": 95},
        {"countries": "SE"},
        {"image": "-v"},
        {"allow_cidrs": ["203.0.113.7/32"]},
        {"ssh_public_key": "ssh-ed25519 AAAA"},
        {"wait_seconds": 0},
    ],
)
def test_fields_that_make_no_sense(vastai: dict[str, Any]) -> None:
    with pytest.raises((sky.InvalidField, sky.NotSupported)):
        sky.VastAI(**vastai)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("Offer No Longer Available: Offer 5 is no longer available.", "CapacityUnavailable"),
        ("Missing offer_id: offer_id is required when creating an instance.", "CapacityUnavailable"),
        ("Vast.ai API error: PUT /asks/5/ returned 410: gone", "CapacityUnavailable"),
        ("Vast.ai API error: POST /bundles/ returned 401: bad key", "CloudCredentialsRefused"),
        ("Vast.ai API error: PUT /asks/5/ returned 402: insufficient_credit", "QuotaExceeded"),
        ("Vast.ai API error: PUT /asks/5/ returned 403: no", "CloudPermissionDenied"),
        ("Vast.ai API error: PUT /asks/5/ returned 429: slow down", "CloudThrottled"),
    ],
)
def test_what_the_api_says_is_known(said: str, cause: str) -> None:
    found = refusals([("module.p.vastai_instance.head", said)])
    assert [each.cause for each in found] == [cause]
