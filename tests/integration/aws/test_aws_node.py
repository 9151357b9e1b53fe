"""One node on AWS, the real provider against a moto server: planned, applied, changed in place, destroyed."""

from __future__ import annotations

import hashlib
import json

import pytest
import yaml
from moto_aws.cloud import Cloud, tags
from moto_aws.roots import HEAD_DATA, VERSIONS, Root, plan_counts

from skyinfra.protocol.manifest import MIN_SECRET_LENGTH, Manifest

SLOTS = [{"index": 0, "kind": "partition", "accelerator": "H100", "profile": "3g.40gb", "gpu": 0}]
POOL = {
    "machine_types": ["p5.4xlarge"],
    "stack": "inference",
    "layout": "3g.40gb+2g.20gb",
    "user_data_revision": "1",
    "runner_file": "./runner-1.whl",
    "labels": {"team": "ml", "cost:center": "42 / a"},
    "slots": SLOTS,
}


RUNNER = bytes(range(256)) * 100


# A server and the provider are had once for what `make test` asks of AWS.
@pytest.mark.xdist_group("aws")
def test_one_on_demand_node_and_its_layout_in_place(root: Root, cloud: Cloud) -> None:
    before = cloud.existing()
    root.write({"one": POOL})
    (root.folder / "runner-1.whl").write_bytes(RUNNER)
    root.init()
    created, changed, destroyed = plan_counts(root.apply())
    assert created > 20 and (changed, destroyed) == (0, 0)
    [instance] = cloud.instances("one")
    _check_instance(cloud, root, instance)

    # Another layout, and the user data that carry it: one tag changes, and nothing restarts. Whoever applies this has
    # another runner and other packages: the fleet keeps its own. AWS is asked again, and nothing else is to change.
    (root.folder / "runner-2.whl").write_bytes(b"another")
    other = {"runner_file": "./runner-2.whl", "versions": {"python": "3.13", "requirements": ["cloudpickle==3.1.1"]}}
    root.write({"one": {**POOL, **other, "layout": "1g.10gb", "user_data_head": HEAD_DATA + "# another layout\n"}})
    assert plan_counts(root.apply()) == (0, 1, 0)
    [same] = cloud.instances("one")
    assert same["InstanceId"] == instance["InstanceId"] and same["LaunchTime"] == instance["LaunchTime"]
    assert tags(same) == {**tags(instance), "skyinfra:layout": "1g.10gb"}
    assert "# another layout" not in cloud.user_data(same["InstanceId"])
    _check_bucket(cloud, root, same)

    root.destroy("-refresh=false")
    assert cloud.existing() == before
    _check_no_secret(root)


def _check_instance(cloud: Cloud, root: Root, instance: dict) -> None:
    name = instance["InstanceId"]
    assert instance["InstanceType"] == "p5.4xlarge"
    assert (
        tags(instance).items()
        >= {
            "Name": "inference/one-0",
            "skyinfra:stack": "inference",
            "skyinfra:pool": "one",
            "skyinfra:node": "one-0",
            "skyinfra:role": "head",
            "skyinfra:layout": "3g.40gb+2g.20gb",
            "team": "ml",
            "cost:center": "42 / a",
        }.items()
    )
    options = instance["MetadataOptions"]
    assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 1)
    assert options["InstanceMetadataTags"] == "enabled"
    # Its own, and the one with its jobs.
    volumes = cloud.volumes(name)
    assert [(each["Encrypted"], each["VolumeType"]) for each in volumes] == [(True, "gp3")] * 2
    [interface] = cloud.interfaces(name)
    for carrier in (*volumes, interface):
        assert tags(carrier).items() >= {"team": "ml", "skyinfra:pool": "one"}.items()
    assert cloud.rules("one") == {
        ("in", "-1", "all", "self"),
        ("out", "-1", "all", "self"),
        ("out", "-1", "all", "0.0.0.0/0"),
    }
    role = _role(cloud, instance)
    iam = cloud.client("iam")
    assert iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"] == []
    assert iam.list_role_policies(RoleName=role)["PolicyNames"] == ["session-manager"]
    document = iam.get_role_policy(RoleName=role, PolicyName="session-manager")["PolicyDocument"]
    (statement,) = document["Statement"]
    # No parameter of the account, no command that somebody sends.
    assert {action.partition(":")[0] for action in statement["Action"]} == {"ec2messages", "ssm", "ssmmessages"}
    assert [action for action in statement["Action"] if action.startswith("ssm:")] == ["ssm:UpdateInstanceInformation"]

    manifest = root.manifest("one")
    secret = manifest["secret"]
    read = Manifest.read(manifest)
    assert len(secret) >= MIN_SECRET_LENGTH
    assert (read.stack, read.pool, read.provider) == ("inference", "one", "aws")
    [node] = read.nodes
    assert (node.name, node.id, node.head, node.machine_type) == ("one-0", name, True, "p5.4xlarge")
    assert node.address == instance["PrivateIpAddress"] and node.public_address == instance["PublicIpAddress"]
    assert node.zone == instance["Placement"]["AvailabilityZone"]
    assert (read.head.address, read.head.port) == (node.address, 8786)

    data = yaml.safe_load(cloud.user_data(name))
    configuration, file = (each["content"] for each in data["write_files"])
    assert json.loads(configuration) == {
        "node": "one-0",
        "head": True,
        "scheduler": "0.0.0.0:8786",
        "reached_at": f"{instance['PrivateIpAddress']}:8786",
    }
    assert cloud.carried(file) == secret.encode()
    _check_bucket(cloud, root, instance)


def _check_bucket(cloud: Cloud, root: Root, instance: dict) -> None:
    """What the nodes fetch stands where their role alone reads it; nothing of it is what AWS shows of an instance."""
    secret = root.manifest("one")["secret"]
    file = yaml.safe_load(cloud.user_data(instance["InstanceId"]))["write_files"][1]["content"]
    bucket = file.removeprefix("s3://").partition("/")[0]
    assert file == f"s3://{bucket}/secret" and cloud.carried(file) == secret.encode()
    versions = json.loads(cloud.carried(f"s3://{bucket}/versions.json"))
    wheel = {"name": "runner-1.whl", "sha256": hashlib.sha256(RUNNER).hexdigest()}
    assert versions == {"version": 1, **VERSIONS, "wheel": wheel}
    assert cloud.carried(f"s3://{bucket}/{wheel['name']}") == RUNNER
    s3 = cloud.client("s3")
    assert {each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]} == {
        "secret",
        "versions.json",
        wheel["name"],
    }
    [rule] = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    [readers] = cloud.readers(bucket)
    assert readers["Principal"]["AWS"].endswith(f":role/{_role(cloud, instance)}")
    assert (readers["Action"], readers["Resource"]) == ("s3:GetObject", f"arn:aws:s3:::{bucket}/*")
    shown = cloud.shown()
    assert file in shown and secret not in shown and secret[:36] not in shown


def _role(cloud: Cloud, instance: dict) -> str:
    profile = instance["IamInstanceProfile"]["Arn"].rpartition("/")[2]
    found = cloud.client("iam").get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]
    return found["Roles"][0]["RoleName"]


def _check_no_secret(root: Root) -> None:
    """The secret stood in the state, in the bucket and in the sensitive output; nowhere else."""
    backup = json.loads((root.folder / "terraform.tfstate.backup").read_text())
    [resource] = [r for r in backup["resources"] if r["type"] == "terraform_data" and r["name"] == "secret"]
    value = resource["instances"][0]["attributes"]["triggers_replace"]
    secret = value["value"] if isinstance(value, dict) else value
    assert len(secret) >= MIN_SECRET_LENGTH
    shown = [text for text in root.printed if not text.startswith("{")]
    assert len(shown) >= 4
    for text in shown:
        assert secret not in text and secret[:36] not in text
