"""Inputs of modules/aws that make no sense are refused at plan, each with its own words, and nothing is created."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest
from moto_aws.cloud import Cloud
from moto_aws.roots import HEAD_DATA, Root

pytestmark = pytest.mark.slow

G6 = {"machine_types": ["g6.xlarge"]}
NETWORKS = ["0.0.0.0/0", "203.0.113.0/24", "203.0.113.7/32", "::/0", "2001:DB8::/32", "2001:0db8:0::7/128"]

# Refused by the rules of modules/core, which a plan looks at once those of the module itself hold.
OF_ALL: list[tuple[dict[str, Any], str]] = [
    ({**G6, "name": "Upper"}, "name: lower-case letters"),
    ({**G6, "stack": "no spaces"}, "stack: letters, digits"),
    ({**G6, "node_count": 0}, "node_count: a whole number of at least 1"),
    ({**G6, "node_count": 1.5}, "node_count: a whole number of at least 1"),
    ({**G6, "scheduler_port": 70000}, "scheduler_port: a port, 1 to 65535"),
    ({**G6, "scheduler_port": 0, "allow_cidrs": NETWORKS}, "scheduler_port: a port, 1 to 65535"),
]
# Refused by an input's own rule, whatever the rest: the inputs, and what the message says.
ALONE: list[tuple[dict[str, Any], str]] = [
    ({"machine_types": []}, "machine_types: at least one instance type"),
    ({"machine_types": ["g6.xlarge", "g6.xlarge"]}, "none of them twice"),
    ({"machine_types": ["H100"]}, "machine_types: EC2 instance types"),
    ({**G6, "image": "ubuntu"}, "image: an AMI id"),
    ({**G6, "disk_gb": -1}, "disk_gb: a whole number"),
    ({**G6, "allow_cidrs": ["203.0.113.300/32"]}, "allow_cidrs: networks in CIDR notation"),
    ({**G6, "allow_cidrs": ["everyone"]}, "allow_cidrs: networks in CIDR notation"),
    ({**G6, "allow_cidrs": ["203.0.113.7/24"]}, "allow_cidrs: the first address of a network"),
    ({**G6, "allow_cidrs": ["2001:db8::/32", "2001:DB8::7/64"]}, "allow_cidrs: the first address of a network"),
    ({**G6, "ssh_public_key": "my key"}, "ssh_public_key: one line"),
    ({**G6, "labels": {"two words": "x"}}, "labels: names of letters"),
    ({**G6, "labels": {"a/b": "x"}}, "labels: names of letters"),
    ({**G6, "labels": {"a,b": "x"}}, "labels: names of letters"),
    ({**G6, "labels": {"aws:x": "x"}}, "which are taken"),
    ({**G6, "labels": {"skyinfra:layout": "x"}}, "which are taken"),
    ({**G6, "labels": {"a": "x!"}}, "labels: values of letters"),
    ({**G6, "labels": {f"label{n}": "x" for n in range(41)}}, "labels: at most 40"),
    ({**G6, "layout": "1g.10gb*7"}, "layout: letters, digits, spaces"),
    ({**G6, "layout": "x" * 257}, "layout: letters, digits, spaces"),
    ({**G6, "zones": ["east"]}, "zones: names of Availability Zones"),
    ({**G6, "zones": ["us-east-1-bos-1a"]}, "For Local Zones give subnet_ids"),
    ({**G6, "vpc_cidr": "10.0.0.0/8"}, "vpc_cidr: an IPv4 network of /16 to /24"),
    ({**G6, "spot": True, "spot_max_price": 0}, "spot_max_price: more than 0 USD"),
    ({**G6, "capacity_block_id": "block"}, "capacity_block_id: the id of the reservation"),
    ({**G6, "head_image": "ubuntu"}, "head_image: an AMI id"),
    # Networks that are right, however they are written.
    (
        {**G6, "efa_interfaces": {"g6.xlarge": [{"network_card": 0, "device_index": 0, "interface_type": "ena"}]}},
        "the interface type is efa, efa-only or interface",
    ),
    (
        {**G6, "efa_interfaces": {"g6.xlarge": [{"network_card": 1, "device_index": 1, "interface_type": "efa"}]}},
        "the first interface is device 0 of card 0",
    ),
]

NOISE = base64.b64encode(random.Random(7).randbytes(30_000)).decode()

# Refused for what they say together, or for what AWS says: the inputs, and what the message says.
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({**G6, "labels": {"Team": "a", "team": "b"}}, "labels: no two names that differ in case alone"),
    ({**G6, "vpc_id": "vpc-1"}, "vpc_id: a VPC alone does not say where"),
    ({**G6, "security_group_ids": ["sg-1"]}, "so subnet_ids must be given too"),
    ({**G6, "zones": ["us-east-1z"]}, "zones: us-east-1z is not among us-east-1a"),
    (
        {"machine_types": ["trn1.32xlarge"], "zones": ["us-east-1a"]},
        "is offered in us-east-1b, us-east-1c, us-east-1f, but not in us-east-1a",
    ),
    ({"machine_types": ["p9.48xlarge"]}, "p9.48xlarge is offered in no zone of this region"),
    (
        {**G6, "spot": True, "node_count": 2, "head_machine_type": "m9.large"},
        "head_machine_type: m9.large is offered in no zone of this region",
    ),
    ({"machine_types": ["g6.xlarge", "g5g.xlarge"]}, "g6.xlarge, g5g.xlarge and the head's m6i.large have different"),
    (
        {**G6, "spot": True, "capacity_block_id": "cr-1", "zones": ["us-east-1a"]},
        "spot: spot instances run in no capacity block",
    ),
    ({**G6, "capacity_block_id": "cr-1", "capacity_reservation_id": "cr-2", "zones": ["us-east-1a"]}, "not in both"),
    ({**G6, "capacity_block_id": "cr-1"}, "a capacity block or reservation is in one zone"),
    (
        {"machine_types": ["g6.xlarge", "g5.xlarge"], "capacity_reservation_id": "cr-1", "zones": ["us-east-1a"]},
        "is for one machine type",
    ),
    (
        {**G6, "group": True, "capacity_block_id": "cr-1", "zones": ["us-east-1a"]},
        "capacity_block_id: nodes in reserved capacity are instances, and no group",
    ),
    ({**G6, "spot_max_price": 1}, "only spot instances have a maximum price"),
    ({**G6, "node_count": 2, "user_data_worker": ""}, "user_data_worker: needed"),
    ({**G6, "versions": None}, "versions: the user data name a bucket (@SKYINFRA_BUCKET@), and this pool has none"),
    (
        {**G6, "efa_interfaces": {"p4d.24xlarge": [{"network_card": 0, "device_index": 0, "interface_type": "efa"}]}},
        "p4d.24xlarge is not among machine_types",
    ),
    ({**G6, "user_data_head": HEAD_DATA + NOISE}, "bytes after gzip, and EC2 takes 16384"),
    ({**G6, "node_count": 2, "user_data_worker": HEAD_DATA + NOISE}, "user_data_worker: "),
]


def _refused(root: Root, cases: list[tuple[dict[str, Any], str]]) -> str:
    """One plan of a root in which every module is wrong in its own way."""
    root.write({f"case{number}": inputs for number, (inputs, _) in enumerate(cases)})
    root.init()
    return root.refused()


def _missing(text: str, cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    """What was not said, or not as often as there are cases for it."""
    expected = [said for _, said in cases]
    return [said for said in expected if text.count(said) < expected.count(said)]


def test_an_input_that_makes_no_sense_is_refused(root: Root, cloud: Cloud) -> None:
    before = cloud.existing()
    text = _refused(root, OF_ALL)
    assert not _missing(text, OF_ALL)
    text = _refused(root, ALONE)
    assert not _missing(text, ALONE)
    assert text.count("allow_cidrs: ") == sum(said.startswith("allow_cidrs: ") for _, said in ALONE)
    assert cloud.existing() == before


def test_inputs_that_make_no_sense_together_are_refused(root: Root, cloud: Cloud) -> None:
    before = cloud.existing()
    text = _refused(root, TOGETHER)
    assert not _missing(text, TOGETHER)
    # What is too long is not shown.
    assert NOISE[:40] not in text
    assert cloud.existing() == before


def test_subnets_that_do_not_fit_are_refused(root: Root, cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    default = [s["SubnetId"] for s in ec2.describe_subnets()["Subnets"] if s["AvailabilityZone"] == "us-east-1a"]
    vpc = ec2.create_vpc(CidrBlock="10.8.0.0/16")["Vpc"]["VpcId"]
    other = ec2.create_subnet(VpcId=vpc, CidrBlock="10.8.0.0/24", AvailabilityZone="us-east-1b")["Subnet"]["SubnetId"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({**G6, "subnet_ids": [*default, other]}, "subnet_ids: the subnets belong to several VPCs"),
        ({**G6, "subnet_ids": [other], "vpc_id": "vpc-1"}, f"vpc_id: the subnets of subnet_ids belong to {vpc}"),
        (
            {**G6, "subnet_ids": [other], "zones": ["us-east-1c"]},
            "us-east-1c is not among us-east-1b, the zones of subnet_ids",
        ),
        (
            {"machine_types": ["trn1.2xlarge"], "subnet_ids": default},
            "offered in us-east-1c, us-east-1f, but not in us-east-1a",
        ),
        (
            {**G6, "subnet_ids": [other], "security_group_ids": ["sg-1"], "allow_cidrs": ["203.0.113.7/32"]},
            "allow_cidrs: with security_group_ids their own rules say who comes in",
        ),
    ]
    assert not _missing(_refused(root, cases), cases)
