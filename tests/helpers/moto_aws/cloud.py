"""The AWS of the tests: a moto server in a process of its own, and what stands in it, asked of its API."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
from support import ROOT

REGIONS = ("us-east-1", "us-west-2")
TAKEN_DOWN = ("terminated", "shutting-down", "deleted", "deleting", "cancelled", "closed")


@dataclass(frozen=True)
class Cloud:
    """A moto server, and the file by which a test tells it about the world; see `moto_ext.world`."""

    url: str
    world: Path

    def environment(self) -> dict[str, str]:
        """What the aws provider and boto3 find this cloud by."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {
            **kept,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self, service: str, region: str = "us-east-1") -> Any:
        return _client(self.url, service, region)

    def reset(self) -> None:
        """Everything in it goes."""
        self.tell()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")).close()

    def tell(self, **world: Any) -> None:
        """What differs from moto, such as ``no_capacity=[machine type]``; `moto_ext.world` lists what there is."""
        self.world.write_text(json.dumps(world))

    def existing(self) -> set[str]:
        """Everything that exists and would cost money or be in the way: ids and names, in all regions used here."""
        found = {role["Arn"] for role in self.client("iam").list_roles()["Roles"]}
        found |= {profile["Arn"] for profile in self.client("iam").list_instance_profiles()["InstanceProfiles"]}
        found |= {bucket["Name"] for bucket in self.client("s3").list_buckets()["Buckets"]}
        for region in REGIONS:
            found |= self._in_region(region)
        return found

    def _in_region(self, region: str) -> set[str]:
        ec2 = self.client("ec2", region)
        found = {instance["InstanceId"] for instance in self.instances(region=region)}
        for ask, key, name in _LISTED:
            for each in getattr(ec2, ask)()[key]:
                if each.get("State") not in TAKEN_DOWN:
                    found.add(each[name])
        for spot in ec2.describe_spot_instance_requests()["SpotInstanceRequests"]:
            if spot["State"] == "active" and spot["InstanceId"] in found:
                found.add(spot["SpotInstanceRequestId"])
        groups = self.client("autoscaling", region).describe_auto_scaling_groups()["AutoScalingGroups"]
        return found | {group["AutoScalingGroupARN"] for group in groups}

    def instances(self, pool: str | None = None, region: str = "us-east-1") -> list[dict[str, Any]]:
        """The instances that run, of one pool or of all, by name."""
        reservations = self.client("ec2", region).describe_instances()["Reservations"]
        found = [i for r in reservations for i in r["Instances"] if i["State"]["Name"] not in TAKEN_DOWN]
        selected = [i for i in found if pool is None or tags(i).get("skyinfra:pool") == pool]
        return sorted(selected, key=lambda instance: (tags(instance).get("Name", ""), instance["InstanceId"]))

    def instance(self, name: str, region: str = "us-east-1") -> dict[str, Any]:
        """The one running instance whose node has that name."""
        [found] = [i for i in self.instances(region=region) if tags(i).get("skyinfra:node") == name]
        return found

    def user_data(self, instance: str, region: str = "us-east-1") -> str:
        """The user data of an instance as the node sees them: decompressed."""
        ec2 = self.client("ec2", region)
        value = ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")["UserData"]["Value"]
        return decompressed(value)

    def carried(self, address: str, region: str = "us-east-1") -> bytes:
        """The file at the address ``s3://BUCKET/KEY``."""
        bucket, _, key = address.removeprefix("s3://").partition("/")
        content: bytes = self.client("s3", region).get_object(Bucket=bucket, Key=key)["Body"].read()
        return content

    def shown(self, region: str = "us-east-1") -> str:
        """All that whoever may describe instances, launch templates and groups is shown, with user data in plain."""
        ec2 = self.client("ec2", region)
        instances = self.instances(region=region)
        found: list[Any] = [instances]
        for instance in (each["InstanceId"] for each in instances):
            found.append(ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData"))
            if found[-1]["UserData"]:
                found.append(self.user_data(instance, region))
        for template in ec2.describe_launch_templates()["LaunchTemplates"]:
            name = template["LaunchTemplateId"]
            versions = ec2.describe_launch_template_versions(LaunchTemplateId=name)["LaunchTemplateVersions"]
            data = [version["LaunchTemplateData"].get("UserData") for version in versions]
            found += [versions, *(decompressed(each) for each in data if each)]
        found.append(self.client("autoscaling", region).describe_auto_scaling_groups()["AutoScalingGroups"])
        return "\n".join(each if isinstance(each, str) else json.dumps(each, default=str) for each in found)

    def readers(self, bucket: str) -> list[dict[str, Any]]:
        """What the policy of a bucket allows, and that nothing of it can be public."""
        s3 = self.client("s3")
        blocked = s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
        assert set(blocked.values()) == {True}
        statements: list[dict[str, Any]] = json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"])["Statement"]
        return statements

    def volumes(self, instance: str, region: str = "us-east-1") -> list[dict[str, Any]]:
        selected = [{"Name": "attachment.instance-id", "Values": [instance]}]
        return self.client("ec2", region).describe_volumes(Filters=selected)["Volumes"]

    def interfaces(self, instance: str, region: str = "us-east-1") -> list[dict[str, Any]]:
        """The network interfaces of an instance, in the order of their cards."""
        selected = [{"Name": "attachment.instance-id", "Values": [instance]}]
        found = self.client("ec2", region).describe_network_interfaces(Filters=selected)["NetworkInterfaces"]
        return sorted(found, key=lambda eni: eni["Attachment"]["NetworkCardIndex"])

    def rules(self, pool: str, region: str = "us-east-1") -> set[tuple[str, str, str, str]]:
        """The security group rules of a pool: direction, protocol, ports, and the network or ``self``."""
        found = self.client("ec2", region).describe_security_group_rules()["SecurityGroupRules"]
        return {_rule(rule) for rule in found if tags(rule).get("skyinfra:pool") == pool}

    def template(self, pool: str, region: str = "us-east-1") -> list[dict[str, Any]]:
        """The newest versions of the launch templates of a pool."""
        ec2 = self.client("ec2", region)
        mine = [t for t in ec2.describe_launch_templates()["LaunchTemplates"] if tags(t)["skyinfra:pool"] == pool]
        return [
            ec2.describe_launch_template_versions(LaunchTemplateId=t["LaunchTemplateId"], Versions=["$Latest"])[
                "LaunchTemplateVersions"
            ][0]
            for t in mine
        ]

    def group(self, pool: str, region: str = "us-east-1") -> dict[str, Any]:
        """The Auto Scaling group of a pool."""
        found = self.client("autoscaling", region).describe_auto_scaling_groups()["AutoScalingGroups"]
        [group] = [each for each in found if tags(each).get("skyinfra:pool") == pool]
        return group


_LISTED = (
    ("describe_vpcs", "Vpcs", "VpcId"),
    ("describe_subnets", "Subnets", "SubnetId"),
    ("describe_internet_gateways", "InternetGateways", "InternetGatewayId"),
    ("describe_nat_gateways", "NatGateways", "NatGatewayId"),
    ("describe_route_tables", "RouteTables", "RouteTableId"),
    ("describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId"),
    ("describe_security_groups", "SecurityGroups", "GroupId"),
    ("describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId"),
    ("describe_addresses", "Addresses", "AllocationId"),
    ("describe_volumes", "Volumes", "VolumeId"),
    ("describe_key_pairs", "KeyPairs", "KeyName"),
    ("describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    ("describe_placement_groups", "PlacementGroups", "GroupName"),
)


@cache
def _client(url: str, service: str, region: str) -> Any:
    return boto3.client(
        service, region_name=region, endpoint_url=url, aws_access_key_id="test", aws_secret_access_key="test"
    )


def tags(resource: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", resource.get("TagSet", []))}


def decompressed(user_data: str) -> str:
    return gzip.decompress(base64.b64decode(user_data)).decode()


def _rule(rule: dict[str, Any]) -> tuple[str, str, str, str]:
    ports = "all" if rule["IpProtocol"] == "-1" else f"{rule['FromPort']}-{rule['ToPort']}"
    other = rule.get("CidrIpv4") or rule.get("CidrIpv6")
    if other is None:
        other = "self" if rule["ReferencedGroupInfo"]["GroupId"] == rule["GroupId"] else "another group"
    return ("out" if rule["IsEgress"] else "in", rule["IpProtocol"], ports, other)


def start(folder: Path) -> tuple[subprocess.Popen[str], Cloud]:
    """A server of its own, which ends with its standard input."""
    world = folder / "world.json"
    with (folder / "moto.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto_ext"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "tests"),
                "MOTO_EXT_WORLD": str(world),
                "MOTO_RECORDER_FILEPATH": str(folder / "recording"),
            },
        )
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert port, (folder / "moto.log").read_text()
    return process, Cloud(f"http://127.0.0.1:{port}", world)
