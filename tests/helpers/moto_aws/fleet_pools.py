"""Pools of every kind, for one root: the inputs of each module, and what of the caller's they stand in."""

from __future__ import annotations

from typing import Any

from moto_aws.roots import HEAD_DATA

NEURON = "/aws/service/neuron/dlami/base/ubuntu-24.04/latest/image_id"
UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl someone@example.com"


def efa(cards: int) -> list[dict[str, Any]]:
    return [
        {"network_card": card, "device_index": min(card, 1), "interface_type": "efa" if card % 4 == 0 else "efa-only"}
        for card in range(cards)
    ]


POOLS: dict[str, dict[str, Any]] = {
    "efa": {
        "machine_types": ["p4d.24xlarge"],
        "node_count": 2,
        "placement_group": True,
        "efa_interfaces": {"p4d.24xlarge": efa(4)},
        "allow_cidrs": ["203.0.113.7/32", "2001:db8::/32"],
        "ssh_public_key": KEY,
        "layout": "0-3:3g.20gb 3g.20gb/4-7:7g.40gb",
        "labels": {"team": "ml"},
    },
    "fallback": {
        "machine_types": ["g6.xlarge", "g5.xlarge", "g4dn.xlarge"],
        "node_count": 3,
        "spot": True,
        "spot_max_price": 0.5,
        "head_image": UBUNTU,
        "labels": {"team": "ml"},
        "disk_gb": 120,
    },
    "trainium": {
        "machine_types": ["trn1.32xlarge"],
        "image": NEURON,
        "zones": ["us-east-1f", "us-east-1b"],
        "kms_key_id": "${aws_kms_key.mine.arn}",
    },
    "fraction": {"machine_types": ["g6f.large"], "spot": True, "spot_max_price": 0.15, "disk_gb": 100},
    "own": {
        "machine_types": ["g6.xlarge"],
        "node_count": 2,
        "vpc_id": "${aws_vpc.mine.id}",
        "subnet_ids": ["${aws_subnet.mine.id}"],
        "security_group_ids": ["${aws_security_group.mine.id}"],
        "iam_instance_profile": "${aws_iam_instance_profile.mine.name}",
    },
    "beside": {
        "machine_types": ["g5.xlarge"],
        "vpc_id": "${module.fraction.network.vpc_id}",
        "subnet_ids": "${module.fraction.network.subnet_ids}",
        "head_public_ip": True,
        "allow_cidrs": ["10.0.0.0/8"],
        # Written by hand: the secret stands in it, and there is no bucket.
        "user_data_head": HEAD_DATA.replace("@SKYINFRA_BUCKET@/secret", "@SKYINFRA_SECRET@"),
        "user_data_worker": "",
        "versions": None,
    },
    "block": {"machine_types": ["p5.48xlarge"], "capacity_block_id": "cr-0b10c4", "zones": ["us-east-1c"]},
    "reserved": {
        "machine_types": ["p4d.24xlarge"],
        "node_count": 2,
        "capacity_reservation_id": "cr-0123456789",
        "zones": ["us-east-1d"],
    },
    "west": {
        "region": "us-west-2",
        "machine_types": ["p5.48xlarge", "p5en.48xlarge"],
        "node_count": 2,
        "placement_group": True,
        "efa_interfaces": {"p5.48xlarge": efa(32), "p5en.48xlarge": efa(16)},
    },
}

MINE = """
resource "aws_vpc" "mine" {
  cidr_block = "10.9.0.0/16"
}

resource "aws_subnet" "mine" {
  vpc_id                  = aws_vpc.mine.id
  cidr_block              = "10.9.1.0/24"
  availability_zone       = "us-east-1b"
  map_public_ip_on_launch = true
}

resource "aws_security_group" "mine" {
  vpc_id = aws_vpc.mine.id
}

resource "aws_kms_key" "mine" {
  description = "of the bucket and the volumes"
}

resource "aws_iam_role" "mine" {
  name               = "mine"
  assume_role_policy = jsonencode({ Version = "2012-10-17", Statement = [] })
}

resource "aws_iam_instance_profile" "mine" {
  name = "mine"
  role = aws_iam_role.mine.name
}
"""
