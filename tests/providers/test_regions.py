"""Where machines are: what no source says is unknown, and not nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cloud_modules.cases import access as needed

import skyinfra as sky
from skyinfra import offers, providers
from skyinfra.compiler import compile_pool


def selected(provider: Any, **fields: Any) -> providers.Selection:
    return compile_pool(sky.ComputePool(name="p", provider=provider, **fields), "s").selection


def test_where_no_source_says_the_regions_it_is_unknown() -> None:
    [row] = [o for o in offers.load() if o.machine_type == "g7.2xlarge"]
    assert not row.regions
    assert (row.offered_in("us-east-1"), row.offered_in("eu-west-1"), row.offered_in("eu-nowhere-1")) == (
        True,
        None,
        False,
    )
    assert replace(row, regions=("us-east-1",)).offered_in("eu-west-1") is False


def test_unknown_is_allowed_and_said() -> None:
    found = selected(sky.AWS(region="eu-west-1"), accelerator="RTX PRO 4500")
    assert found.machine_types == ("g7.2xlarge",)
    assert "no source here says that eu-west-1 has g7.2xlarge" in found.price_note
    assert "no source" not in selected(sky.AWS(), accelerator="RTX PRO 4500").price_note
    # What is known to be there comes first.
    both = selected(sky.AWS(region="eu-west-2"), accelerator=["L4", "RTX PRO 4500"])
    assert both.machine_types == ("g6.xlarge",)


def test_the_accelerators_of_n1_have_regions() -> None:
    assert selected(sky.GCP(region="europe-west4"), accelerator="T4").machine_types == (
        "n1-standard-8+nvidia-tesla-t4:1",
    )
    with pytest.raises(sky.NotOffered, match="is offered in asia-east1"):
        selected(sky.GCP(region="me-west1"), accelerator="P100")


@pytest.mark.parametrize(
    ("region", "machine", "said"),
    [
        ("eu-north1", "cpu-e2/2vcpu-8gb", ""),
        ("eu-west1", "cpu-d3/4vcpu-16gb", ""),
        ("us-central1", "cpu-d3/4vcpu-16gb", ""),
        ("uk-south1", "cpu-e2/2vcpu-8gb", "no source here says that uk-south1 has cpu-e2/2vcpu-8gb"),
    ],
)
def test_machines_without_accelerators_have_regions(region: str, machine: str, said: str) -> None:
    found = selected(sky.Nebius(**{**needed("nebius"), "region": region}), accelerator=None)
    assert found.machine_types == (machine,) and found.price_note.endswith(said)
    assert bool(said) == ("no source" in found.price_note)


def test_verda_says_where_its_cpu_machines_are_known() -> None:
    known, other = (selected(sky.Verda(**{**needed("verda"), "region": name})) for name in ("FIN-03", "FIN-02"))
    assert "no source" not in known.price_note and "FIN-02 has CPU.4V.16G" in other.price_note


def test_a_smaller_machine_with_a_near_relative_is_named() -> None:
    azure = sky.Azure(**needed("azure"))
    found = selected(azure, accelerator="H100")
    assert found.machine_types == ("Standard_ND96isr_H100_v5",)
    assert "a smaller one is Standard_NC40ads_H100_v5 (H100-94GB:1) at $6.98/h" in found.price_note
    assert "smaller" not in selected(azure, accelerator="H100:8").price_note
    assert "smaller" not in selected(sky.AWS(), accelerator="H100").price_note
