"""AWS: from a declaration to machine types, image, module inputs and price; what is refused says what would work."""

from __future__ import annotations

from typing import Any

import pytest

import skyinfra as sky
from skyinfra.compiler import compile_pool
from skyinfra.providers import Selection

BLOCK = sky.CapacityBlock(id="cr-0b10c4")


def select(accelerator: Any = None, *, aws: dict[str, Any] | None = None, **fields: Any) -> Selection:
    pool = sky.ComputePool(name="p", provider=sky.AWS(**(aws or {})), accelerator=accelerator, **fields)
    return compile_pool(pool, "s").selection


def refused(error: type[sky.SkyinfraError], accelerator: Any = None, **fields: Any) -> sky.SkyinfraError:
    with pytest.raises(error) as caught:
        select(accelerator, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("accelerator", "machine_type", "count"),
    [
        ("H100", "p5.4xlarge", 1),
        ("H100:8/3g.40gb", "p5.48xlarge", 8),
        ("A100-40GB:8", "p4d.24xlarge", 8),
        ("A100:8", "p4de.24xlarge", 8),
        ("H200:8", "p5en.48xlarge", 8),
        ("B200", "p6-b200.48xlarge", 8),
        ("A10G", "g5.xlarge", 1),
        ("A10G:4", "g5.12xlarge", 4),
        ("Trainium1", "trn1.2xlarge", 1),
        ("Trainium1:16", "trn1.32xlarge", 16),
        ("Inferentia2:12", "inf2.48xlarge", 12),
    ],
)
def test_the_cheapest_machine_that_carries_it(accelerator: str, machine_type: str, count: int) -> None:
    selected = select(accelerator)
    assert selected.machine_types[0] == machine_type
    assert selected.count == count
    assert not selected.separate_head


def test_a_fallback_list_takes_the_first_that_there_is() -> None:
    assert select(["MI300X:8", "H100:4", "H100:8", "A100:8"]).machine_types == ("p5.48xlarge",)
    assert select(["H100:8", "A100:8"], max_hourly_cost=30.0).machine_types == ("p4de.24xlarge",)


def test_minima_of_the_machine() -> None:
    assert select("L4", vcpus=16).machine_types == ("g6.4xlarge",)
    assert select("L4", memory_gb=100.0).machine_types == ("gr6.4xlarge",)


def test_a_spot_pool_falls_back_to_what_costs_not_much_more() -> None:
    selected = select("L4", spot=True, nodes=3)
    assert selected.machine_types == ("g6.xlarge", "g6.2xlarge", "g6.4xlarge", "gr6.4xlarge")
    assert selected.separate_head
    assert selected.hourly_cost == 0.4104
    assert selected.price_note == "about, spot in us-east-1, 2025-07-28"
    assert (selected.head_machine, selected.head_price.usd_per_hour) == ("m6i.large", 0.096)
    assert selected.inputs["head_image"].startswith("/aws/service/canonical/ubuntu/")  # type: ignore[attr-defined]


def test_a_spot_pool_of_one_node_and_one_type_is_its_own_head() -> None:
    selected = select("A100:8", spot=True)
    assert (selected.machine_types, selected.separate_head) == (("p4de.24xlarge",), False)


def test_declared_instance_types_keep_their_order() -> None:
    aws = {"instance_types": ["g6.4xlarge", "g6.xlarge"]}
    assert select("L4", aws=aws).machine_types == ("g6.4xlarge", "g6.xlarge")


def test_a_machine_that_is_no_longer_sold_to_everybody_is_named() -> None:
    named = {"instance_types": ["p3.8xlarge"], "ami": "ami-0123456789abcdef0"}
    selected = select("V100:4", aws=named)
    assert (selected.machine_types, selected.hourly_cost) == (("p3.8xlarge",), 12.24)
    assert refused(sky.NotOffered, "V100:4").field == "accelerator"


def test_a_share_of_a_gpu() -> None:
    place = sky.AWS(instance_types=["g6f.2xlarge"], ami="ami-0123456789abcdef0")
    pool = sky.ComputePool(provider=place, accelerator="L4")
    made = compile_pool(pool, "s")
    assert made.selection.share == 0.25
    assert made.head.accelerator is not None
    assert (made.head.accelerator.count, made.head.accelerator.memory_gb) == (1, 6.0)


def test_prices_are_those_of_the_purchase() -> None:
    assert select("H100:8").hourly_cost == 55.04
    assert select("H100:8").price_note == "on-demand in us-east-1, 2026-07-20"
    assert select("H100:8", spot=True).hourly_cost == 26.4192
    assert select("H100:8", spot=True, max_hourly_cost=30.0).machine_types == ("p5.48xlarge",)
    block = select("H100:8", aws={"capacity": sky.CapacityBlock(id="cr-0123")})
    assert (block.hourly_cost, block.inputs["capacity_block_id"]) == (None, "cr-0123")


def test_images_by_what_the_machine_carries() -> None:
    assert "base-oss-nvidia-driver-gpu-ubuntu-24.04" in select("H100:8").image
    assert select("T4G").image.startswith("/aws/service/deeplearning/ami/arm64/")
    assert select("Trainium1:16").image == "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"
    assert select("Gaudi:8", aws={"ami": "ami-0123"}).image == "ami-0123"
    assert "amd64" in select(vcpus=2).image
    assert "arm64" in select(aws={"instance_types": ["m7g.large"]}).image


def test_machines_without_accelerators() -> None:
    assert select().machine_types == ("m7i.large",)
    assert select(vcpus=6, memory_gb=100.0).machine_types == ("m7i.8xlarge",)
    assert refused(sky.NotOffered, vcpus=500).field == "vcpus"


@pytest.mark.parametrize(
    ("machine", "cards", "first", "rest"),
    [("A100:8", 4, "efa", "efa"), ("H100:8", 32, "efa", "efa"), ("B300:8", 17, "interface", "efa")],
)
def test_efa_takes_every_network_card(machine: str, cards: int, first: str, rest: str) -> None:
    selected = (
        select(machine, aws={"efa": True})
        if machine != "B300:8"
        else select(machine, aws={"efa": True, "region": "us-west-2"})
    )
    (interfaces,) = selected.inputs["efa_interfaces"].values()  # type: ignore[attr-defined]
    assert [i["network_card"] for i in interfaces] == list(range(cards))
    assert [i["device_index"] for i in interfaces] == [0] + [1] * (cards - 1)
    assert interfaces[0]["interface_type"] == first
    assert {i["interface_type"] for i in interfaces[1:]} == {rest}
    assert selected.inputs["placement_group"] is True


@pytest.mark.parametrize("capacity", [BLOCK, sky.CapacityReservation(id="cr-1")])
@pytest.mark.parametrize("way", [{"rdma": True}, {"aws": {"efa": True}}])
def test_reserved_capacity_has_no_placement_group_unless_it_is_declared(capacity: Any, way: dict[str, Any]) -> None:
    aws = {**way.get("aws", {}), "capacity": capacity}
    fields = {"nodes": 2, "rdma": way.get("rdma", False)}
    plain = select("H100:8", aws=aws, **fields).inputs
    assert plain["placement_group"] is False and plain["efa_interfaces"]
    assert select("H100:8", aws={**aws, "placement_group": True}, **fields).inputs["placement_group"] is True


@pytest.mark.parametrize(
    ("accelerator", "tag"),
    [
        ("H100:8/3g.40gb", "3g.40gb"),
        ("H100:8/3g.40gb+2g.20gb+1g.10gb*2", "3g.40gb+2g.20gb+1g.10gb:2"),
        ("H100:8/7g.80gb|7g.80gb|7g.80gb|7g.80gb|7g.80gb|7g.80gb|7g.80gb|1g.10gb*7", "7g.80gb*1/" * 7 + "1g.10gb*7"),
        ("H100:8", "off"),
        ("L4", None),
    ],
)
def test_the_layout_travels_in_a_tag(accelerator: str, tag: str | None) -> None:
    assert select(accelerator).inputs.get("layout") == (tag and tag.replace("*", ":").replace("7g.80gb:1", "7g.80gb"))


def test_a_layout_too_long_for_a_tag() -> None:
    each = "3g.40gb+2g.20gb+1g.10gb*1+1g.10gb+me*1"
    error = refused(sky.NotSupported, "H100:8/" + "|".join([each] * 8))
    assert "256" in str(error)


def test_refusals_say_what_would_work() -> None:
    none = refused(sky.NotOffered, "H100:4")
    assert none.field == "accelerator"
    assert "p5.4xlarge (H100:1) at $6.88/h in us-east-1, 2026-07-20" in str(none)
    assert "Elsewhere: digitalocean gpu-mi300x1-192gb" in str(refused(sky.NotOffered, "MI300X"))
    capped = refused(sky.NotOffered, "H100:8", max_hourly_cost=10.0)
    assert "Without max_hourly_cost: aws p5.48xlarge (H100:8) at $55.04/h" in str(capped)
    assert refused(sky.NotSupported, "Gaudi:8").field == "provider.ami"
    efa = refused(sky.InvalidField, "L4", aws={"efa": True})
    assert "With L4: g6.12xlarge" in str(efa)


@pytest.mark.parametrize(
    ("error", "accelerator", "aws", "fields", "field"),
    [
        (sky.InvalidField, "L4", {"instance_types": ["g6.xlage"]}, {}, "provider.instance_types"),
        (sky.NotOffered, "L4", {"instance_types": ["p5.48xlarge"]}, {}, "provider.instance_types"),
        (sky.InvalidField, "L4", {"instance_types": ["g6.xlarge", "g6f.xlarge"]}, {}, "provider.instance_types"),
        (sky.InvalidField, "H100:8", {"capacity": BLOCK}, {"spot": True}, "provider.capacity"),
        (sky.InvalidField, "H100:8", {"capacity": BLOCK, "group": True}, {}, "provider.group"),
        (sky.InvalidField, "H100:8", {"capacity": BLOCK}, {"nodes": sky.Range(0, 4), "idle_seconds": 600}, "nodes"),
        (
            sky.InvalidField,
            "H100:8",
            {"capacity": BLOCK, "instance_types": ["p5.48xlarge", "p5.4xlarge"]},
            {},
            "provider.instance_types",
        ),
        (sky.InvalidField, "H100:8", {"spot_max_price": 9.0}, {}, "provider.spot_max_price"),
        (sky.NotSupported, None, {}, {"max_hourly_cost": 1.0, "spot": True}, "max_hourly_cost"),
        (sky.NotSupported, None, {"instance_types": ["c7i.large"]}, {"max_hourly_cost": 1.0}, "max_hourly_cost"),
        (sky.NotOffered, None, {}, {"max_hourly_cost": 0.2, "vcpus": 8}, "max_hourly_cost"),
        (sky.InvalidField, None, {"instance_types": ["g6.xlarge"]}, {}, "provider.instance_types"),
        (sky.InvalidField, None, {"instance_types": ["m7i.large"]}, {"vcpus": 4}, "provider.instance_types"),
        (sky.InvalidField, None, {"instance_types": ["m7i.large"]}, {"memory_gb": 16}, "provider.instance_types"),
    ],
)
def test_what_cannot_be(
    error: type[sky.SkyinfraError], accelerator: Any, aws: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    assert refused(error, accelerator, aws=aws, **fields).field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"vpc_id": "vpc-1"}, "AWS.subnet_ids"),
        ({"security_group_ids": ["sg-1"]}, "AWS.security_group_ids"),
        ({"zones": ["eu-west-1a"]}, "AWS.zones"),
        ({"region": "us-east"}, "AWS.region"),
        ({"ami": "ubuntu"}, "AWS.ami"),
        ({"zones": ["us-east-1-bos-1a"]}, "AWS.zones"),
        ({"allow_cidrs": ["203.0.113.7"]}, "AWS.allow_cidrs"),
        ({"allow_cidrs": ["203.0.113.7/24"]}, "AWS.allow_cidrs"),
        ({"allow_cidrs": ["office"]}, "AWS.allow_cidrs"),
        ({"ssh_public_key": "ecdsa-sha2-nistp256 AAAA me"}, "AWS.ssh_public_key"),
        ({"instance_types": ["p5"]}, "AWS.instance_types"),
        ({"iam_path": "skyinfra"}, "AWS.iam_path"),
        ({"kms_key_id": "alias/mine"}, "AWS.kms_key_id"),
        ({"head_volume_gb": 0}, "AWS.head_volume_gb"),
    ],
)
def test_a_provider_that_cannot_be(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(sky.InvalidField) as caught:
        sky.AWS(**fields)
    assert caught.value.field == field


def test_a_network_with_host_bits_is_told_what_was_meant() -> None:
    with pytest.raises(sky.InvalidField, match=r"203\.0\.113\.7/32; for its network: 203\.0\.113\.0/24"):
        sky.AWS(allow_cidrs=["203.0.113.7/24"])
    assert sky.AWS(allow_cidrs=["203.0.113.0/24", "2001:DB8::/32"]).allow_cidrs == ("203.0.113.0/24", "2001:DB8::/32")


@pytest.mark.parametrize(
    ("labels", "field"),
    [
        ({"a b": "x"}, "labels"),
        ({"Name": "x"}, "labels"),
        ({"aws:x": "x"}, "labels"),
        ({"Skyinfra:pool": "x"}, "labels"),
        ({"a,b": "x"}, "labels"),
        ({"Team": "a", "team": "b"}, "labels"),
        ({"team": "a;b"}, "labels[team]"),
        ({f"l{i}": "" for i in range(41)}, "labels"),
    ],
)
def test_labels_that_cannot_be_tags(labels: dict[str, str], field: str) -> None:
    assert refused(sky.InvalidField, labels=labels).field == field


def test_labels_that_differ_in_case_alone_go_where_no_role_gets_them() -> None:
    labels = {"Team": "a", "team": "b"}
    assert select("L4", aws={"iam_instance_profile": "mine"}, labels=labels).machine_types


@pytest.mark.parametrize("region", ["us-gov-west-1", "cn-north-1", "mx-central-1", "eusc-de-east-1"])
def test_named_types_work_in_regions_whose_prices_are_not_known(region: str) -> None:
    gpu = select("A100-40GB:8", aws={"region": region, "instance_types": ["p4d.24xlarge"]})
    assert gpu.machine_types == ("p4d.24xlarge",) and gpu.hourly_cost is None
    assert "price not known" in gpu.price_note and f"no source here says that {region} has" in gpu.price_note
    assert "instance_types=" in str(refused(sky.InvalidField, "A100-40GB:8", aws={"region": region}))
    capped = refused(
        sky.NotSupported,
        "A100-40GB:8",
        aws={"region": region, "instance_types": ["p4d.24xlarge"]},
        max_hourly_cost=99.0,
    )
    assert "is not known here" in str(capped)


def test_a_named_machine_without_accelerators_is_as_large_as_declared_or_not_known() -> None:
    assert select(aws={"instance_types": ["m7i.large"]}, vcpus=2, memory_gb=8.0).machine_types == ("m7i.large",)
    assert select(aws={"instance_types": ["c7i.large"]}, vcpus=64).machine_types == ("c7i.large",)
    with_gpu = refused(sky.InvalidField, aws={"instance_types": ["g6f.xlarge"], "ami": "ami-0123456789abcdef0"})
    assert "carries 1/8 L4" in str(with_gpu) and 'accelerator="L4:1"' in str(with_gpu)


def test_machines_without_accelerators_cost_what_is_known_of_their_partition() -> None:
    assert select(aws={"region": "eu-west-1"}).hourly_cost is not None
    for region in ("us-gov-west-1", "cn-north-1", "eusc-de-east-1", "us-iso-east-1", "us-isob-east-1"):
        assert select(aws={"region": region}).hourly_cost is None


def test_one_architecture_for_one_image() -> None:
    error = refused(sky.InvalidField, aws={"instance_types": ["m7i.large", "m7g.large"]})
    assert error.field == "provider.instance_types"


def test_a_group_from_the_first_node_on() -> None:
    selected = select("A10G", aws={"group": True}, spot=True)
    assert selected.inputs["group"] is True and selected.head_machine == "m6i.large"
    assert "group" not in select("A10G", spot=True).inputs
