"""Fleets of every kind in one root and one apply: what the API of AWS then says stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml
from moto_aws.cloud import REGIONS, Cloud, decompressed, tags
from moto_aws.fleet_pools import MINE, NEURON, POOLS, UBUNTU
from moto_aws.roots import Root, plan_changes, plan_counts
from moto_ext.images import image_id

from skyinfra.protocol.manifest import Manifest

# The fixture that all share is made once: the tests run in one process.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.xdist_group("aws-fleets")]


@dataclass(frozen=True)
class Fleets:
    cloud: Cloud
    root: Root
    applied: str
    before: set[str]


@pytest.fixture(scope="module")
def fleets(_server: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    """All pools, applied once; destroyed at the end, with nothing left. EC2 has no g6.xlarge for the spot pool."""
    _server.reset()
    _server.tell(no_capacity=["g6.xlarge/spot", "p5.48xlarge/us-west-2"])
    before = _server.existing()
    root = Root(tmp_path_factory.mktemp("fleets"), _server)
    root.write(POOLS, MINE)
    root.init()
    applied = root.apply("-parallelism=30")
    yield Fleets(_server, root, applied, before)
    root.destroy()
    assert _server.existing() == before


@pytest.fixture
def cloud(fleets: Fleets) -> Cloud:
    return fleets.cloud


def test_everything_is_created_and_a_second_plan_is_empty(fleets: Fleets) -> None:
    created, changed, destroyed = plan_counts(fleets.applied)
    assert created > 150 and (changed, destroyed) == (0, 0)
    planned = fleets.root.plan()
    assert plan_counts(planned) == (0, 0, 0), planned


def test_every_pool_has_its_nodes(cloud: Cloud) -> None:
    found = {
        name: [instance["InstanceType"] for instance in cloud.instances(name, pool.get("region", "us-east-1"))]
        for name, pool in POOLS.items()
    }
    assert found == {
        "efa": ["p4d.24xlarge"] * 2,
        "fallback": ["g5.xlarge"] * 3 + ["m6i.large"],
        "trainium": ["trn1.32xlarge"],
        "fraction": ["g6f.large"],
        "own": ["g6.xlarge"] * 2,
        "beside": ["g5.xlarge"],
        "block": ["p5.48xlarge"],
        "reserved": ["p4d.24xlarge"] * 2,
        "west": ["p5en.48xlarge"] * 2 + ["m6i.large"],
    }


def test_nothing_is_in_another_region(cloud: Cloud) -> None:
    assert {tags(i)["skyinfra:pool"] for i in cloud.instances(region="us-west-2")} == {"west"}


@pytest.mark.parametrize(
    ("pool", "image"),
    [
        ("efa", "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"),
        ("trainium", NEURON),
    ],
)
def test_the_image_is_that_of_the_parameter(cloud: Cloud, pool: str, image: str) -> None:
    assert {instance["ImageId"] for instance in cloud.instances(pool)} == {image_id(image)}


def test_nodes_know_their_head_and_the_secret(fleets: Fleets) -> None:
    for pool in ("efa", "own", "reserved"):
        manifest = Manifest.read(fleets.root.manifest(pool))
        assert [node.name for node in manifest.nodes] == [f"{pool}-0", f"{pool}-1"]
        for node in manifest.nodes:
            data = yaml.safe_load(fleets.cloud.user_data(node.id))
            configuration, file = (each["content"] for each in data["write_files"])
            assert json.loads(configuration) == {
                "node": node.name,
                "head": node.head,
                "scheduler": "0.0.0.0:8786" if node.head else f"{manifest.nodes[0].address}:8786",
                "reached_at": f"{manifest.nodes[0].address}:8786",
            }
            assert fleets.cloud.carried(file) == manifest.secret.encode()
    assert len(set(fleets.root.secrets())) == len(POOLS)


def test_user_data_written_by_hand_may_hold_the_secret(fleets: Fleets) -> None:
    [instance] = fleets.cloud.instances("beside")
    assert fleets.root.manifest("beside")["secret"] in fleets.cloud.user_data(instance["InstanceId"])
    buckets = [each["Name"] for each in fleets.cloud.client("s3").list_buckets()["Buckets"]]
    assert len(buckets) == len(POOLS) - 1 and not [name for name in buckets if "beside" in name]


def test_a_key_of_the_caller_encrypts_the_secret_and_the_nodes_may_use_it(fleets: Fleets) -> None:
    cloud, s3, iam = fleets.cloud, fleets.cloud.client("s3"), fleets.cloud.client("iam")
    [instance] = cloud.instances("trainium")
    profile = instance["IamInstanceProfile"]["Arn"].rpartition("/")[2]
    [role] = iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]
    document = iam.get_role_policy(RoleName=role["RoleName"], PolicyName="session-manager")["PolicyDocument"]
    [_, statement] = document["Statement"]
    key = cloud.client("kms").describe_key(KeyId=statement["Resource"])["KeyMetadata"]
    assert (statement["Action"], key["Description"]) == (["kms:Decrypt"], "of the bucket and the volumes")
    file = yaml.safe_load(cloud.user_data(instance["InstanceId"]))["write_files"][1]["content"]
    bucket = file.removeprefix("s3://").partition("/")[0]
    [rule] = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key["Arn"]}
    [jobs] = [each for each in cloud.volumes(instance["InstanceId"]) if tags(each).get("Name", "").endswith("/jobs")]
    assert (jobs["Encrypted"], jobs["KmsKeyId"]) == (True, key["Arn"])


def test_only_heads_carry_the_layout(cloud: Cloud) -> None:
    carried = {
        tags(i)["skyinfra:node"]: tags(i)["skyinfra:layout"] for i in cloud.instances() if "skyinfra:layout" in tags(i)
    }
    assert carried == {"efa-0": POOLS["efa"]["layout"]}


def test_efa_has_every_card_and_the_nodes_stand_together(fleets: Fleets) -> None:
    cloud = fleets.cloud
    heads_and_workers = cloud.instances("efa")
    (group,) = {i["Placement"]["GroupName"] for i in heads_and_workers}
    assert re.fullmatch("skyinfra-default-efa-[0-9a-f]{8}", group)
    assert len({i["Placement"]["AvailabilityZone"] for i in heads_and_workers}) == 1
    for instance in heads_and_workers:
        cards = [
            (eni["Attachment"]["NetworkCardIndex"], eni["Attachment"]["DeviceIndex"], eni["InterfaceType"])
            for eni in cloud.interfaces(instance["InstanceId"])
        ]
        assert cards == [(0, 0, "efa"), (1, 1, "efa-only"), (2, 1, "efa-only"), (3, 1, "efa-only")]
    # A node with several interfaces has no public address of its own: the head has an Elastic IP, the worker a NAT.
    head, worker = (cloud.instance(f"efa-{n}") for n in range(2))
    assert head["PublicIpAddress"] and not worker.get("PublicIpAddress")
    ec2 = cloud.client("ec2")
    tables = ec2.describe_route_tables(Filters=[{"Name": "association.subnet-id", "Values": [worker["SubnetId"]]}])
    [table] = tables["RouteTables"]
    [way_out] = [route for route in table["Routes"] if route.get("DestinationCidrBlock") == "0.0.0.0/0"]
    assert way_out["NatGatewayId"]
    assert Manifest.read(fleets.root.manifest("efa")).head.address == head["PublicIpAddress"]


def test_what_comes_in_is_what_was_allowed(cloud: Cloud) -> None:
    between = {("in", "-1", "all", "self"), ("out", "-1", "all", "self"), ("out", "-1", "all", "0.0.0.0/0")}
    allowed = {
        ("in", "tcp", f"{port}-{port}", network)
        for port in (22, 8786)
        for network in ("203.0.113.7/32", "2001:db8::/32")
    }
    assert cloud.rules("efa") == between | allowed
    assert cloud.rules("beside") == between | {("in", "tcp", "8786-8786", "10.0.0.0/8")}
    assert cloud.rules("fallback") == between
    # Who reaches the head reaches the head alone.
    [first, *_] = cloud.interfaces(cloud.instance("efa-0")["InstanceId"])
    [worker, *_] = cloud.interfaces(cloud.instance("efa-1")["InstanceId"])
    assert len(first["Groups"]) == 2 and len(worker["Groups"]) == 1


def test_a_spot_pool_falls_back_in_order_and_keeps_its_head(fleets: Fleets) -> None:
    cloud, group = fleets.cloud, fleets.cloud.group("fallback")
    assert group["CapacityRebalance"] and (group["MinSize"], group["MaxSize"], group["DesiredCapacity"]) == (3, 3, 3)
    policy = group["MixedInstancesPolicy"]
    assert [o["InstanceType"] for o in policy["LaunchTemplate"]["Overrides"]] == POOLS["fallback"]["machine_types"]
    distribution = policy["InstancesDistribution"]
    assert (distribution["OnDemandBaseCapacity"], distribution["OnDemandPercentageAboveBaseCapacity"]) == (0, 0)
    assert distribution["SpotAllocationStrategy"] == "capacity-optimized-prioritized"
    assert float(distribution["SpotMaxPrice"]) == 0.5
    *workers, head = cloud.instances("fallback")
    assert {i.get("InstanceLifecycle") for i in workers} == {"spot"} and "InstanceLifecycle" not in head
    assert len({i["Placement"]["AvailabilityZone"] for i in workers}) == 3
    assert head["ImageId"] == image_id(UBUNTU) != workers[0]["ImageId"]

    [template] = [t for t in cloud.template("fallback") if t["LaunchTemplateData"].get("ImageId")]
    assert template["VersionNumber"] == 1
    data = template["LaunchTemplateData"]
    metadata = data["MetadataOptions"]
    assert (metadata["HttpTokens"], metadata["HttpPutResponseHopLimit"]) == ("required", 1)
    [device] = data["BlockDeviceMappings"]
    assert (device["Ebs"]["Encrypted"], device["Ebs"]["VolumeType"], device["Ebs"]["VolumeSize"]) == (True, "gp3", 120)
    manifest = fleets.root.manifest("fallback")
    configuration, file = (each["content"] for each in yaml.safe_load(decompressed(data["UserData"]))["write_files"])
    assert json.loads(configuration)["node"] == "fallback-asg"
    assert json.loads(configuration)["scheduler"] == f"{head['PrivateIpAddress']}:8786"
    assert cloud.carried(file) == manifest["secret"].encode()
    for worker in workers:
        assert tags(worker).items() >= {"team": "ml", "skyinfra:pool": "fallback", "skyinfra:role": "worker"}.items()
        for carrier in (*cloud.volumes(worker["InstanceId"]), *cloud.interfaces(worker["InstanceId"])):
            assert tags(carrier).items() >= {"team": "ml", "skyinfra:pool": "fallback"}.items()
        assert worker["PublicIpAddress"]
    # Its nodes come and go without Terraform: the manifest has the head.
    assert [node["id"] for node in manifest["nodes"]] == [head["InstanceId"]]
    assert Manifest.read(manifest).group_nodes == 3


def test_a_group_with_efa_has_a_template_for_each_type_and_one_zone(cloud: Cloud) -> None:
    *workers, head = cloud.instances("west", "us-west-2")
    assert len({i["Placement"]["AvailabilityZone"] for i in workers}) == 1
    (group,) = {i["Placement"]["GroupName"] for i in workers}
    assert re.fullmatch("skyinfra-default-west-[0-9a-f]{8}", group)
    assert not head["Placement"].get("GroupName")
    assert "InstanceLifecycle" not in workers[0]  # a fallback list without spot is on-demand
    assert [len(cloud.interfaces(i["InstanceId"], "us-west-2")) for i in (*workers, head)] == [16, 16, 1]


def test_the_zones_are_those_that_offer_the_type_in_the_order_given(cloud: Cloud) -> None:
    assert cloud.instance("trainium-0")["Placement"]["AvailabilityZone"] == "us-east-1f"
    subnets = cloud.client("ec2").describe_subnets()["Subnets"]
    zones = {s["AvailabilityZone"] for s in subnets if tags(s).get("skyinfra:pool") == "trainium"}
    assert zones == {"us-east-1f", "us-east-1b"}


def test_prices_blocks_and_reservations_are_asked_for(cloud: Cloud) -> None:
    spot = cloud.instance("fraction-0")
    requests = cloud.client("ec2").describe_spot_instance_requests(
        SpotInstanceRequestIds=[spot["SpotInstanceRequestId"]]
    )
    [request] = requests["SpotInstanceRequests"]
    assert (float(request["SpotPrice"]), request["Type"]) == (0.15, "one-time")
    # Its own disk, and the volume with its jobs.
    assert sorted(volume["Size"] for volume in cloud.volumes(spot["InstanceId"])) == [20, 100]
    block = cloud.instance("block-0")
    assert block["InstanceLifecycle"] == "capacity-block" and block["CapacityReservationId"] == "cr-0b10c4"
    assert block["Placement"]["AvailabilityZone"] == "us-east-1c"
    for name in ("reserved-0", "reserved-1"):
        reserved = cloud.instance(name)
        assert reserved["CapacityReservationId"] == "cr-0123456789" and "InstanceLifecycle" not in reserved


def test_own_network_is_used_and_nothing_is_added_to_it(fleets: Fleets) -> None:
    ec2, iam = fleets.cloud.client("ec2"), fleets.cloud.client("iam")
    head, worker = fleets.cloud.instances("own")
    [mine] = [vpc for vpc in ec2.describe_vpcs()["Vpcs"] if vpc["CidrBlock"] == "10.9.0.0/16"]
    for instance in (head, worker):
        assert instance["VpcId"] == mine["VpcId"]
        assert instance["IamInstanceProfile"]["Arn"].endswith("/mine")
        [group] = instance["SecurityGroups"]
        assert not fleets.cloud.rules("own"), group
    # The head has the address of its subnet alone; the worker what the subnet gives.
    assert not head.get("PublicIpAddress") and worker["PublicIpAddress"]
    assert len(ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [mine["VpcId"]]}])["Subnets"]) == 1
    assert not [r for r in iam.list_roles()["Roles"] if "own" in r["RoleName"]]
    address = Manifest.read(fleets.root.manifest("own")).head.address
    assert address == head["PrivateIpAddress"]


def test_a_pool_beside_another_shares_its_network(cloud: Cloud) -> None:
    first, beside = cloud.instance("fraction-0"), cloud.instance("beside-0")
    assert first["VpcId"] == beside["VpcId"] and beside["PublicIpAddress"]


def test_labels_are_tags_on_everything_that_takes_some(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    found = ec2.describe_tags(Filters=[{"Name": "tag:skyinfra:pool", "Values": ["efa"]}])["Tags"]
    mine = {tag["ResourceId"] for tag in found}
    labelled = {
        tag["ResourceId"] for tag in ec2.describe_tags(Filters=[{"Name": "tag:team", "Values": ["ml"]}])["Tags"]
    }
    assert mine <= labelled
    kinds = {name.partition("-")[0] for name in mine}
    assert kinds >= {
        "i",
        "vol",
        "eni",
        "vpc",
        "subnet",
        "igw",
        "rtb",
        "sg",
        "sgr",
        "eipalloc",
        "nat",
        "lt",
        "vpce",
        "key",
    }


def test_another_network_replaces_what_stands_in_it(fleets: Fleets) -> None:
    fleets.root.write({**POOLS, "trainium": {**POOLS["trainium"], "vpc_cidr": "10.84.0.0/16"}}, MINE)
    try:
        found = plan_changes(fleets.root.plan("-refresh=false", "-target=module.trainium"))
    finally:
        fleets.root.write(POOLS, MINE)
    replaced = {address.removeprefix("module.trainium.") for address, action in found.items() if action == "replace"}
    assert replaced >= {"aws_vpc.this[0]", "aws_network_interface.head", "aws_instance.head"}
    assert "terraform_data.secret" not in replaced


def test_another_machine_type_replaces_a_spot_node(fleets: Fleets) -> None:
    """EC2 stops no one-time spot instance, and changes the type of stopped ones alone."""
    fleets.root.write({**POOLS, "fraction": {**POOLS["fraction"], "machine_types": ["g6f.xlarge"]}}, MINE)
    try:
        found = plan_changes(fleets.root.plan("-refresh=false", "-target=module.fraction"))
    finally:
        fleets.root.write(POOLS, MINE)
    assert found["module.fraction.aws_instance.head"] == "replace"
    assert not any("aws_ebs_volume" in address or "aws_network_interface" in address for address in found)


def test_no_secret_is_printed_or_shown_by_aws(fleets: Fleets) -> None:
    shown = [text for text in fleets.root.printed if not text.startswith("{")]
    assert len(shown) >= 2
    by_hand = fleets.root.manifest("beside")["secret"]
    shown += [fleets.cloud.shown(region).replace(by_hand, "") for region in REGIONS]
    assert all("@SKYINFRA" not in text and "/secret" in text for text in shown[-2:])
    for secret in fleets.root.secrets():
        assert not [text for text in shown if secret in text or secret[:36] in text]
