"""What a change of each input does to fleets that run: the cases, and the table of modules/aws/README.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from moto_aws.fleet_pools import KEY, UBUNTU
from moto_aws.roots import HEAD_DATA, MODULE, WORKER_DATA, Root

README = MODULE / "README.md"
BEGIN, END = "<!-- made by tests/integration/aws/test_aws_effects.py -->\n", "<!-- end -->\n"

ZONE = "us-east-1b"
# Both pools, before the change.
COMMON: dict[str, Any] = {"node_count": 2, "user_data_revision": "1", "layout": "a", "disk_gb": 100, "zones": [ZONE]}
POOLS: dict[str, dict[str, Any]] = {
    "pair": {**COMMON, "machine_types": ["g5.xlarge"]},
    "group": {**COMMON, "machine_types": ["g6.xlarge"], "spot": True},
}


@dataclass(frozen=True)
class Case:
    """One change. network: "own" for pools with a network of their own, "given" for those in subnet_ids.

    both, pair, group: the inputs that change, in both pools or one; None leaves that pool out of the table.
    """

    input: str
    change: str
    both: dict[str, Any] = field(default_factory=dict)
    pair: dict[str, Any] | None = field(default_factory=dict)
    group: dict[str, Any] | None = field(default_factory=dict)
    network: str = "own"

    def inputs(self, pool: str) -> dict[str, Any] | None:
        """The changed inputs of a pool; None where the case is not one of it."""
        given = self.pair if pool == "pair" else self.group
        return None if given is None else {**self.both, **given}


def one_card(machine_type: str) -> dict[str, Any]:
    return {machine_type: [{"network_card": 0, "device_index": 0, "interface_type": "efa"}]}


def cases(mine: dict[str, Any]) -> list[Case]:
    """All changes. mine: ids of what the caller has: security_group, profile, subnet_ids, vpc_id."""
    return [
        Case("name", "another", {"name": "renamed"}),
        Case("stack", "another", {"stack": "renamed"}),
        Case("node_count", "more", {"node_count": 3}),
        Case("node_count", "fewer", {"node_count": 1}, group=None),
        Case("node_count", "of spot: one, which makes it an instance", {"node_count": 1}, pair=None),
        Case("min_nodes", "some, where there was none", {"min_nodes": 1}),
        Case(
            "machine_types",
            "another, for which EC2 stops and starts the node",
            pair={"machine_types": ["g6.xlarge"]},
            group={"machine_types": ["g5.xlarge"]},
        ),
        Case(
            "machine_types",
            "one more",
            pair={"machine_types": ["g5.xlarge", "g6.xlarge"]},
            group={"machine_types": ["g6.xlarge", "g5.xlarge"]},
        ),
        Case("image", "another", {"image": UBUNTU}),
        Case("disk_gb", "larger", {"disk_gb": 200}),
        Case("disk_gb", "smaller: EC2 shrinks no volume, and `skyinfra` refuses the plan", {"disk_gb": 80}),
        Case("head_volume_gb", "larger; the head takes the room at its next boot", {"head_volume_gb": 40}),
        Case(
            "head_volume_gb", "smaller: EC2 shrinks no volume, and `skyinfra` refuses the plan", {"head_volume_gb": 10}
        ),
        Case("volumes", "some, with several nodes", {"volumes": [{"name": "v", "id": "vol-1", "path": "/data"}]}),
        Case("buckets", "one", {"buckets": [{"bucket": "my-bucket", "prefix": "data"}]}),
        Case("spot", "the other", pair={"spot": True}, group={"spot": False}),
        Case("user_data_head", "another, with the same `user_data_revision`", {"user_data_head": HEAD_DATA + "# b\n"}),
        Case(
            "user_data_worker",
            "another, with the same `user_data_revision`",
            {"user_data_worker": WORKER_DATA + "# b\n"},
        ),
        Case("user_data_revision", "another", {"user_data_revision": "2"}),
        Case("ssh_public_key", "one, where there was none", {"ssh_public_key": KEY}),
        Case("allow_cidrs", "another", {"allow_cidrs": ["203.0.113.7/32"]}),
        Case("labels", "another", {"labels": {"team": "ml"}}),
        Case("slots", "others", {"slots": [{"index": 0, "kind": "gpu", "accelerator": "A10G"}]}),
        Case("zones", "that of the nodes, and others before it", {"zones": ["us-east-1a", ZONE]}),
        Case("zones", "without that of the nodes", {"zones": ["us-east-1c"]}),
        Case("vpc_id", "that of `subnet_ids`", {"vpc_id": mine["vpc_id"]}, network="given"),
        Case("vpc_cidr", "another", {"vpc_cidr": "10.90.0.0/16"}),
        Case("subnet_ids", "instead of the module's network", {"subnet_ids": mine["subnet_ids"]}),
        Case("subnet_ids", "one more", {"subnet_ids": mine["subnet_ids"]}, network="given"),
        Case(
            "security_group_ids",
            "instead of the module's",
            {"security_group_ids": [mine["security_group"]]},
            network="given",
        ),
        Case("head_public_ip", "true", {"head_public_ip": True}, network="given"),
        Case("iam_instance_profile", "instead of the module's", {"iam_instance_profile": mine["profile"]}),
        Case("iam_path", "another", {"iam_path": "/fleets/"}),
        Case("permissions_boundary", "one", {"permissions_boundary": "arn:aws:iam::aws:policy/PowerUserAccess"}),
        Case(
            "kms_key_id",
            "one",
            {"kms_key_id": "arn:aws:kms:us-east-1:123456789012:key/6d2b1ad7-0000-4000-8000-123456789012"},
        ),
        Case("group", "true", {"group": True}),
        Case(
            "head_machine_type", "another, for which EC2 stops and starts the node", {"head_machine_type": "m6i.xlarge"}
        ),
        Case("head_image", "another", {"head_image": UBUNTU}),
        Case("spot_max_price", "one", group={"spot_max_price": 0.5}, pair=None),
        Case("capacity_block_id", "one", {"capacity_block_id": "cr-0123456789"}, group=None),
        Case("capacity_reservation_id", "one", {"capacity_reservation_id": "cr-0123456789"}, group=None),
        Case(
            "efa_interfaces",
            "one, where there was none",
            pair={"efa_interfaces": one_card("g5.xlarge")},
            group={"efa_interfaces": one_card("g6.xlarge")},
        ),
        Case("placement_group", "true", {"placement_group": True}),
        Case("layout", "another", {"layout": "b"}),
        Case("shutdown_terminates", "true", {"shutdown_terminates": True}),
        Case("runner_file", "another", {"runner_file": mine["file"]}, network="given"),
        Case("versions", "others", {"versions": {"python": "3.13", "requirements": ["cloudpickle==3.1.1"]}}),
        Case("scheduler_port", "another", {"scheduler_port": 8787}),
    ]


# What the parts of a fleet are called in the table, in the order of the table.
PARTS = {
    "aws_instance.head": "head",
    "aws_instance.worker": "workers",
    "aws_autoscaling_group.workers": "workers",
    "aws_network_interface.head": "address of the head",
    "aws_eip.head": "public address",
    "aws_vpc.this": "network",
    "aws_subnet.public": "subnets",
    "aws_security_group.nodes": "security groups",
    "aws_iam_role.this": "role",
    "aws_key_pair.this": "key pair",
    "aws_placement_group.this": "placement group",
    "aws_s3_bucket.runner": "bucket",
}
_MODULE = re.compile(r"/modules/(?P<pool>pair|group)/")
_ADDRESS = re.compile(r"module\.(?P<pool>[^.]+)\.(?P<resource>[a-z_0-9]+\.[a-z_]+)")


def effects(root: Root) -> dict[str, str]:
    """The cell of each pool of a *root* that was written: what a plan does to its parts."""
    result = root.run("plan", "-json", "-input=false", "-refresh=false", check=False)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    refused = {
        found["pool"]
        for event in events
        if event["type"] == "diagnostic" and event["diagnostic"]["severity"] == "error"
        for found in [_MODULE.search(event["diagnostic"]["range"]["filename"])]
        if found
    }
    assert result.returncode == (1 if refused else 0), [e["@message"] for e in events if e["@level"] == "error"]
    changes: dict[str, dict[str, set[str]]] = {pool: {} for pool in POOLS}
    for event in events:
        if event["type"] != "planned_change":
            continue
        found = _ADDRESS.match(event["change"]["resource"]["addr"])
        assert found, event
        changes[found["pool"]].setdefault(found["resource"], set()).add(event["change"]["action"])
    return {pool: "refused" if pool in refused else cell(made) for pool, made in changes.items()}


def cell(changes: dict[str, set[str]]) -> str:
    """What *changes* of resources, by resource, do to the parts of a fleet."""
    parts: dict[str, set[str]] = {}
    for resource, part in PARTS.items():
        parts.setdefault(part, set()).update(changes.get(resource, set()))
    replaced = [p for p, actions in parts.items() if "replace" in actions or {"create", "delete"} <= actions]
    texts = []
    for verb, named in (
        ("replaces", replaced),
        ("adds", [p for p, actions in parts.items() if p not in replaced and "create" in actions]),
        ("removes", [p for p, actions in parts.items() if p not in replaced and "delete" in actions]),
    ):
        if named:
            texts.append(f"{verb} {', '.join(f'**{p}**' if p in ('head', 'workers') else p for p in named)}")
    if "workers" not in replaced and "update" in changes.get("aws_launch_template.group", set()):
        texts.append("workers when they are launched")
    # Also what comes and goes without a name of its own here, such as rules.
    if not texts and any(name.startswith("aws_") for name in changes):
        texts.append("in place")
    return "; ".join(texts) or "nothing"


def table(rows: Iterable[tuple[Case, dict[str, str]]]) -> str:
    """The table as Markdown."""
    lines = ["| input | changed to | instances | group |", "|---|---|---|---|"]
    for case, found in rows:
        cells = ["" if case.inputs(pool) is None else found[pool] for pool in POOLS]
        lines.append(f"| `{case.input}` | {case.change} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def in_readme() -> str:
    """The table that stands in the README."""
    return README.read_text().split(BEGIN)[1].split(END)[0]


def write_readme(made: str) -> None:
    text = README.read_text()
    README.write_text(text.replace(f"{BEGIN}{in_readme()}{END}", f"{BEGIN}{made}{END}"))


def variables() -> list[str]:
    """The names of the module's inputs."""
    return re.findall(r'^variable "(\w+)"', (MODULE / "variables.tf").read_text(), re.MULTILINE)
