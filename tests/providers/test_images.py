"""Images and drivers: a machine starts with an image whose driver serves its accelerator, or is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cloud_modules.cases import access as needed

import skyinfra as sky
from skyinfra import offers, providers
from skyinfra.accelerators import drivers, parse
from skyinfra.compiler import compile_pool
from skyinfra.providers.images import Image

ROW: dict[str, Any] = {"vendor": "nvidia", "image": "i", "source": "s", "date": "2026-11-25"}


def selected(cloud: type[Any], accelerator: str, **fields: Any) -> providers.Selection:
    provider = cloud(**{**(needed(cloud.kind) if "image" in cloud.model_fields else {}), **fields})
    return compile_pool(sky.ComputePool(name="p", provider=provider, accelerator=accelerator), "s").selection


@pytest.mark.parametrize(
    ("accelerator", "kind", "driver", "why"),
    [
        ("V100", "open", "580", "the proprietary kernel modules"),
        ("V100", "proprietary", "580.126.16", None),
        ("V100", "proprietary", "595", "driver 580 is the last for V100"),
        ("P100", "unnamed modules", "580", "the proprietary kernel modules"),
        ("T4", "open", "595.91.07", None),
        ("H100", "unnamed modules", "580", None),
        ("H100", "open", "510", "needs driver 520 or later; i has 510"),
        ("GH200", "proprietary", "580", "the open kernel modules"),
        ("B200", "proprietary", "580", "the open kernel modules"),
        ("B200", "open", "570.133.20", None),
        ("B300", "open", "570", "needs driver 580 or later"),
        # A layout needs 580.82.07: an older point of the branch is refused, the branch alone may have it.
        ("B300:1/1g.34gb*7", "open", "580", None),
        ("B300:1/1g.34gb*7", "open", "580.65.06", "needs driver 580.82.07 or later"),
        ("L40S", "grid", "580", None),
        ("L40S", "grid", None, "the driver of i is not known here"),
        # A layout may need more than its part does.
        ("A100-40GB/1g.10gb", "open", "515", "needs driver 525 or later"),
        ("A100-40GB/1g.5gb", "open", "515", None),
        ("A100-40GB", "open", "515", None),
    ],
)
def test_a_driver_serves_an_accelerator_or_the_reason_is_said(
    accelerator: str, kind: str, driver: str | None, why: str | None
) -> None:
    said = Image(**ROW, kind=kind, driver=driver).unfit(parse(accelerator))
    assert (said is None) == (why is None) and (why is None or why in str(said)), said


def test_a_share_of_a_gpu_takes_the_driver_of_virtual_gpus_alone() -> None:
    assert "(GRID)" in str(Image(**ROW, kind="open", driver="595", listed=True).unfit(parse("L4"), share=0.5))
    assert Image(**ROW, kind="grid", driver="580").unfit(parse("L4"), share=0.5) is None


def test_amd_is_served_by_the_rocm_that_knows_it() -> None:
    row = {**ROW, "vendor": "amd", "kind": "rocm"}
    assert Image(**row, driver="6.2.4").unfit(parse("MI300X")) is None
    assert "needs driver 7.0" in str(Image(**row, driver="6.2.4").unfit(parse("MI355X")))
    assert "no source says" in str(Image(**row, driver="6.2.4").unfit(parse("MI25")))
    assert Image(**row, listed=True).unfit(parse("MI355X")) is None


@pytest.mark.parametrize("kind", providers.kinds())
def test_each_row_says_its_driver_or_why_there_is_none(kind: str) -> None:
    for row in providers.read(kind).images:
        assert row.source and row.date, row
        assert bool(row.image) != bool(row.why), row
        if row.vendor in ("nvidia", "amd") and row.image:
            assert row.kind and (row.driver or row.listed or row.kind == drivers.HOST), row


def test_every_accelerator_of_nvidia_says_the_driver_that_it_needs() -> None:
    for offer in offers.load():
        if offer.vendor == "nvidia":
            assert drivers.needs(parse(offer.accelerated)).least, offer.machine_type


@pytest.mark.parametrize("accelerator", ["A10", "V100", "M60"])
def test_azure_sells_no_machine_without_a_driver(accelerator: str) -> None:
    with pytest.raises((sky.NotSupported, sky.NotOffered)):
        selected(sky.Azure, accelerator)


@pytest.mark.parametrize(
    ("cloud", "fields", "accelerator", "image"),
    [
        (sky.Azure, {}, "V100-32GB:8", "microsoft-dsvm:ubuntu-hpc:2204-v100:latest"),
        (sky.Azure, {}, "T4", "microsoft-dsvm:ubuntu-hpc:2204:latest"),
        (sky.Azure, {"region": "australiasoutheast"}, "MI300X:8", "microsoft-dsvm:ubuntu-hpc:2204-rocm:latest"),
        (sky.Crusoe, {"region": "us-east1-a"}, "L40S", "ubuntu22.04-nvidia-pcie-docker:latest"),
        (sky.Scaleway, {}, "B300:8", "ubuntu_jammy_gpu_os_12"),
        (sky.Vultr, {}, "A40", "1743"),
    ],
)  # fmt: skip
def test_families_of_machines_have_images_of_their_own(
    cloud: type[Any], fields: dict[str, Any], accelerator: str, image: str
) -> None:
    assert selected(cloud, accelerator, **fields).image == image


def test_a_list_of_accelerators_falls_back_to_one_that_an_image_serves() -> None:
    found = compile_pool(
        sky.ComputePool(name="p", provider=sky.Azure(**needed("azure")), accelerator=["A10", "T4"]), "s"
    ).selection
    assert found.machine_types == ("Standard_NC4as_T4_v3",)


def test_a_share_is_refused_unless_the_image_is_ones_own() -> None:
    with pytest.raises(sky.NotSupported, match="GRID driver"):
        selected(sky.AWS, "L4", instance_types=["g6f.large"])
    assert selected(sky.AWS, "L4", instance_types=["g6f.large"], ami="ami-0123456789abcdef0").share == 1 / 8


def test_two_families_cannot_start_with_one_image() -> None:
    with pytest.raises(sky.InvalidField, match="two images"):
        providers.read("crusoe").image(("a100-80gb.8x", "a100-80gb-sxm-ib.8x"), parse("A100:8"), field="provider.image")


# Every row


def declared(offer: offers.Offer, region: str) -> sky.ComputePool:
    """Returns a pool of exactly that machine in that region."""
    kind = offer.provider
    fields: dict[str, Any] = {"instance_types": [offer.machine_type]}
    cls: Any = providers.deployable()[kind]
    if "image" in cls.model_fields and kind not in ("gcp", "runpod", "vastai"):
        fields |= needed(kind)
    if cls.model_fields["region"].default != offers.EVERYWHERE:
        fields["region"] = region
    if kind == "runpod":
        fields["cloud"] = "community" if offer.machine_type.endswith("(community)") else "secure"
    scarce = kind == "gcp" and re.match("a3-highgpu-[124]g|a4x-|a4-highgpu|a3-ultragpu", offer.machine_type) is not None
    return sky.ComputePool(name="p", provider=cls(**fields), accelerator=offer.accelerated, spot=scarce)


@pytest.mark.parametrize("kind", sorted({o.provider for o in offers.load()} & set(providers.deployable())))
def test_each_row_that_is_deployable_compiles_in_each_of_its_regions(kind: str) -> None:
    tried = 0
    for offer in offers.load():
        if offer.provider != kind or offer.legacy or providers.refuses(offer):
            continue
        default = providers.deployable()[kind].model_fields["region"].default
        for region in offer.regions or (default,):
            selected = compile_pool(declared(offer, region), "s").selection
            assert selected.machine_types == (offer.machine_type,), (offer, region)
            data = providers.read("gcptpu" if offer.vendor == "google" else kind)
            rows = [row for row in data.images if row.image == selected.image]
            # The image of a slice is the runtime of its generation.
            assert rows or offer.vendor == "google", (offer, selected.image)
            assert any(row.unfit(parse(offer.accelerated), share=offer.fraction) is None for row in rows) or not rows
            tried += 1
    assert tried or kind == "oci", "all of them are refused"


def test_each_row_that_is_refused_is_refused_at_declaration() -> None:
    refused = [o for o in offers.load() if providers.refuses(o) and not o.legacy and o.provider != "oci"]
    assert len(refused) > 30
    for offer in refused:
        region = (*offer.regions, providers.deployable()[offer.provider].model_fields["region"].default)[0]
        with pytest.raises(sky.NotSupported):
            compile_pool(declared(offer, region), "s")
