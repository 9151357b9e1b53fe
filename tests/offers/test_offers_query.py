"""Queries over the offers, and what is said where nothing matches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyinfra import InvalidField, NotOffered, SkyinfraError, UnknownAccelerator, accelerators, offers
from skyinfra.offers import Offer


def types(found: tuple[Offer, ...]) -> list[str]:
    return [offer.machine_type for offer in found]


def test_the_memory_in_the_name_decides() -> None:
    assert types(offers.find("A100-80GB:8", provider="aws")) == ["p4de.24xlarge"]
    assert types(offers.find("A100:8", provider="aws")) == ["p4de.24xlarge"]
    assert types(offers.find("A100-40GB:8", provider="aws")) == ["p4d.24xlarge"]


def test_a_count_is_exact_and_without_one_the_smallest_machine_is_taken() -> None:
    assert types(offers.find("H100:8", provider="aws")) == ["p5.48xlarge"]
    assert types(offers.find("H100", provider="aws")) == ["p5.4xlarge"]
    assert types(offers.find("H100", provider="azure")) == ["Standard_ND96isr_H100_v5"]
    assert {offer.count for offer in offers.find("A10G", provider="aws", vcpus=96)} == {4}
    both = offers.find("H100", provider=["aws", "azure"])
    assert types(both) == ["p5.4xlarge", "Standard_ND96isr_H100_v5"]


def test_cheapest_first_then_by_name_and_unknown_prices_last() -> None:
    found = offers.find("H100:8")
    prices = [price.usd_per_hour for offer in found if (price := offer.price())]
    assert prices == sorted(prices)
    # Its price cannot be right.
    assert types(found)[-1] == "a3-edgegpu-8g" and found[-1].price() is None
    same = offers.find("B300", provider="runpod")
    assert types(same) == ["NVIDIA HGX B300 (community)", "NVIDIA HGX B300 (secure)"]


def test_the_price_is_that_of_the_purchase() -> None:
    assert types(offers.find("H100:8", provider=["aws", "azure"])) == ["p5.48xlarge", "Standard_ND96isr_H100_v5"]
    assert types(offers.find("H100:8", provider=["aws", "azure"], spot=True)) == [
        "Standard_ND96isr_H100_v5",
        "p5.48xlarge",
    ]
    assert types(offers.find("H100:8", provider=["aws", "azure"], spot=True, max_price=20)) == [
        "Standard_ND96isr_H100_v5"
    ]
    with pytest.raises(NotOffered):
        offers.find("H100:8", provider=["aws", "azure"], max_price=20)


def test_a_layout_needs_a_gpu_that_may_be_partitioned() -> None:
    assert "1x-H100_SXM-32-65536" in types(offers.find("H100:1"))
    assert "1x-H100_SXM-32-65536" not in types(offers.find("H100:1/3g.40gb"))
    with pytest.raises(NotOffered, match=r"runpod offers no H100:1/3g\.40gb\nElsewhere: hyperstack"):
        offers.find("H100:1/3g.40gb", provider="runpod")


def test_a_list_is_an_order_of_preference() -> None:
    found = offers.find(["H200:8", "H100:8"], provider="aws")
    assert types(found) == ["p5en.48xlarge", "p5e.48xlarge", "p5.48xlarge"]
    assert types(offers.find(["H100:3", "L4:8"], provider="aws")) == ["g6.48xlarge"]


def test_minima() -> None:
    assert types(offers.find("L4:1", provider="aws", vcpus=30, ram_gib=200)) == ["gr6.8xlarge", "g6.16xlarge"]
    assert all(offer.share_gb >= 24 for offer in offers.find(memory_gb=24))
    assert "g5.xlarge" in types(offers.find(memory_gb=24, count=1, provider="aws"))
    assert "g5.xlarge" not in types(offers.find(memory_gb=25, count=1, provider="aws"))


def test_regions() -> None:
    found = offers.find("L4", provider="aws", region="eu-west-2")
    assert found and all("eu-west-2" in offer.regions for offer in found)
    assert {offer.on_demand.region for offer in found if offer.on_demand} == {"us-east-1"}
    # Of the newest types only the price says where they are.
    assert "g7.2xlarge" in types(offers.find("RTX PRO 4500:1", region="us-east-1"))
    assert not any(offer.provider == "runpod" for offer in offers.find("H100", region="us-east-1"))


def test_a_share_is_found_when_it_is_enough() -> None:
    assert all(offer.fraction == 1 for offer in offers.find("L4"))
    assert types(offers.find("L4", provider="aws", fraction=0.25))[:2] == ["g6f.2xlarge", "g6.xlarge"]
    assert types(offers.find("L4", provider="aws", fraction=0.125))[:2] == ["g6f.large", "g6f.xlarge"]
    assert "Standard_NV12ads_A10_v5" in types(offers.find("A10", fraction=0.334))
    assert not any(o.machine_type == "g6f.large" for o in offers.find(memory_gb=6, fraction=0.1, provider="aws"))


def test_a_tpu_chip_is_carried_by_the_slice_with_as_many() -> None:
    assert types(offers.find("TPUv5e:4")) == ["v5litepod-4"]
    assert types(offers.find("TPUv5p:4")) == ["v5p-8"]
    assert types(offers.find("TPUv5e")) == ["v5litepod-1"]
    assert types(offers.find("v5p-8")) == ["v5p-8"]


def test_legacy_machines_are_found_when_asked_for() -> None:
    with pytest.raises(NotOffered, match=r"No longer sold to everybody: aws p3\.2xlarge \(V100:1\) at \$3\.06"):
        offers.find("V100", provider="aws")
    assert types(offers.find("V100", provider="aws", legacy=True)) == ["p3.2xlarge"]


def test_nothing_found_names_the_nearest_with_price_and_provider() -> None:
    with pytest.raises(NotOffered) as caught:
        offers.find("H100:3", provider="aws")
    text = str(caught.value)
    assert text.startswith("aws offers no H100:3\n")
    assert "In other numbers: aws p5.4xlarge (H100:1) at $6.88/h in us-east-1, 2026-07-20; aws p5.48xlarge" in text
    with pytest.raises(NotOffered, match=r"Elsewhere: digitalocean gpu-mi300x8-1536gb \(MI300X:8\) at \$15\.92"):
        offers.find("MI300X:8", provider="aws")
    with pytest.raises(NotOffered, match=r"Without max_price: aws p5\.48xlarge"):
        offers.find("H100:8", provider="aws", max_price=40)
    with pytest.raises(NotOffered, match=r"Other kinds: azure Standard_NC40ads_H100_v5 \(H100-94GB:1\)"):
        offers.find("H100:1", provider="azure")
    with pytest.raises(NotOffered, match=r"With as much memory: .*B300"):
        offers.find("GB300")
    with pytest.raises(NotOffered, match="is not in the catalog"):
        offers.find(accelerators.Custom("MyGPU", memory=48))


def test_wrong_names_get_the_nearest() -> None:
    with pytest.raises(UnknownAccelerator, match="Did you mean H100"):
        offers.find("H1000")
    with pytest.raises(InvalidField, match="Did you mean aws"):
        offers.find("H100", provider="awss")
    with pytest.raises(InvalidField, match="eu-west-1"):
        offers.find("H100", provider="aws", region="eu-wst-1")
    with pytest.raises(InvalidField, match="us-east-1 is a region of aws and lambda"):
        offers.find("H100", provider="gcp", region="us-east-1")
    with pytest.raises(InvalidField, match="Leave region out"):
        offers.find("H100", provider="runpod", region="us-east-1")


@pytest.mark.parametrize(
    "numbers", [{"count": 0}, {"vcpus": -1}, {"max_price": 0.0}, {"fraction": 1.5}, {"fraction": 0}]
)
def test_numbers_that_cannot_be(numbers: dict[str, float]) -> None:
    with pytest.raises(InvalidField) as caught:
        offers.find("H100", **numbers)  # type: ignore[arg-type]
    assert caught.value.field == next(iter(numbers))


def test_two_counts_that_disagree() -> None:
    with pytest.raises(InvalidField, match="H100:8 says 8"):
        offers.find("H100:8", count=4)
    assert offers.find("H100:8", count=8) == offers.find("H100:8")


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted({offer.carries for offer in offers.load() if offer.fraction == 1})),
    st.sampled_from([None, *offers.providers()]),
    st.booleans(),
    st.sampled_from([None, 0.5, 5.0, 50.0]),
    st.sampled_from([None, 8, 64, 500]),
)
def test_what_is_found_is_as_asked(
    wanted: str, provider: str | None, spot: bool, max_price: float | None, vcpus: int | None
) -> None:
    accelerator = accelerators.parse(wanted)
    try:
        found = offers.find(accelerator, provider=provider, spot=spot, max_price=max_price, vcpus=vcpus)
    except NotOffered as error:
        assert error.hint
        return
    expected = {
        offer
        for offer in offers.load()
        if (offer.accelerator, offer.memory_gb, offer.count)
        == (accelerator.name, accelerator.memory_gb, accelerator.count)
        and accelerator.form_factor in (None, offer.form_factor)
        and provider in (None, offer.provider)
        and not offer.legacy
        and offer.fraction == 1
        and (vcpus is None or (offer.vcpus or 0) >= vcpus)
        and (max_price is None or ((p := offer.price(spot=spot)) is not None and p.usd_per_hour <= max_price))
    }
    assert set(found) == expected and len(found) == len(expected)


def test_every_error_is_one_of_ours() -> None:
    for wrong in ("", "H100:0", "H100:8:8", "8", "H100/9g.90gb"):
        with pytest.raises(SkyinfraError):
            offers.find(wrong)
