"""Changes of fleets that run: what touches a node, and what must not. In the network that the account has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from moto_aws.cloud import Cloud, tags
from moto_aws.roots import HEAD_DATA, WORKER_DATA, Root, plan_changes, plan_counts
from moto_ext.images import IMAGES, image_id

# The fixture that all share is made once: the tests run in one process.
# What a change replaces is shown on the bed too, by test_aws_on_the_bed.py.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.xdist_group("aws-changes")]

PARAMETER = "/images/mine"
OLD, NEW = (image_id(path) for path, _, _ in IMAGES[:2])


def pools(cloud: Cloud) -> dict[str, dict[str, Any]]:
    """Two instances, and a group of two nodes, in the first two zones of the account's own VPC."""
    subnets = cloud.client("ec2").describe_subnets()["Subnets"]
    first = sorted(subnets, key=lambda subnet: subnet["AvailabilityZone"])[:2]
    common = {"subnet_ids": [s["SubnetId"] for s in first], "user_data_revision": "1", "layout": "a", "node_count": 2}
    return {
        "pair": {**common, "machine_types": ["g5.xlarge"], "image": PARAMETER},
        "group": {**common, "machine_types": ["g6.xlarge", "g5.xlarge"]},
    }


def publish(cloud: Cloud, image: str) -> None:
    cloud.client("ssm").put_parameter(Name=PARAMETER, Value=image, Type="String", Overwrite=True)


@pytest.fixture(scope="module")
def running(_server: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    """Both pools, applied."""
    _server.reset()
    # The first zone does not offer the type yet.
    _server.tell(not_offered=[("g5.xlarge", "us-east-1a")])
    publish(_server, OLD)
    root = Root(tmp_path_factory.mktemp("changes"), _server)
    root.write(pools(_server))
    root.init()
    root.apply()
    yield root
    root.destroy()


def planned(
    root: Root, *arguments: str, pair: dict[str, Any] | None = None, group: dict[str, Any] | None = None
) -> dict[str, str]:
    """What a plan with changed inputs would do; nothing is applied."""
    declared = pools(root.cloud)
    root.write({"pair": {**declared["pair"], **(pair or {})}, "group": {**declared["group"], **(group or {})}})
    return plan_changes(root.plan("-refresh=false", *arguments))


NODES = ("module.pair.aws_instance.head", 'module.pair.aws_instance.worker["pair-1"]')
GROUP = "module.group.aws_autoscaling_group.workers[0]"
TEMPLATE = 'module.group.aws_launch_template.group["plain"]'
ATTACHMENTS = ("module.pair.aws_volume_attachment.head", "module.group.aws_volume_attachment.head")
# What keeps the address of the head, and its jobs.
KEPT = tuple(
    f"module.{pool}.{kind}.head" for pool in ("pair", "group") for kind in ("aws_network_interface", "aws_ebs_volume")
)


def test_nothing_changed(running: Root) -> None:
    assert planned(running) == {}
    assert {i["ImageId"] for i in running.cloud.instances("pair")} == {OLD}
    assert {i["Placement"]["AvailabilityZone"] for i in running.cloud.instances("pair")} == {"us-east-1b"}


def test_a_layout_changes_one_tag_of_each_head(running: Root) -> None:
    both = {"layout": "b", "user_data_head": HEAD_DATA + "# b\n", "user_data_worker": WORKER_DATA + "# b\n"}
    assert planned(running, pair=both, group=both) == {
        "module.pair.aws_instance.head": "update",
        "module.group.aws_instance.head": "update",
    }


def test_labels_a_bigger_disk_and_a_longer_fallback_list_replace_nothing(running: Root) -> None:
    both = {"labels": {"team": "ml"}, "disk_gb": 200}
    found = planned(running, pair=both, group={**both, "machine_types": ["g6.xlarge", "g5.xlarge", "g4dn.xlarge"]})
    assert {action for address, action in found.items() if "aws_" in address} == {"update"}
    assert {*NODES, GROUP, TEMPLATE} <= set(found)


def test_a_newer_image_behind_the_same_path_replaces_nothing(running: Root) -> None:
    publish(running.cloud, NEW)
    try:
        assert planned(running) == {}
        # Taken up where it is asked for.
        found = planned(running, '-replace=module.pair.terraform_data.image["nodes"]')
        assert {address for address, action in found.items() if action == "replace"} >= set(NODES)
        assert not set(found) & {*KEPT, GROUP}
    finally:
        publish(running.cloud, OLD)


def test_a_zone_that_begins_to_offer_the_type_moves_nothing(running: Root) -> None:
    running.cloud.tell()
    try:
        assert planned(running) == {}
    finally:
        running.cloud.tell(not_offered=[("g5.xlarge", "us-east-1a")])


def test_what_aws_does_not_list_any_more_changes_nothing_and_can_be_destroyed(running: Root) -> None:
    types = ("g5.xlarge", "g6.xlarge", "m6i.large")
    running.cloud.tell(not_offered=[(kind, f"us-east-1{letter}") for kind in types for letter in "abcdef"])
    try:
        assert planned(running) == {}
        # Refreshed, as a destroy by Terraform itself is.
        found = plan_changes(running.plan("-destroy"))
        assert set(found.values()) == {"destroy"} and {*NODES, *KEPT, GROUP} <= set(found)
    finally:
        running.cloud.tell(not_offered=[("g5.xlarge", "us-east-1a")])


def test_another_machine_for_the_head_leaves_the_workers(running: Root) -> None:
    found = planned(running, group={"head_machine_type": "m6i.xlarge"})
    assert found["module.group.aws_instance.head"] == "update"
    assert not {GROUP, TEMPLATE, *KEPT} & set(found)


def test_a_machine_that_the_zone_of_the_nodes_does_not_offer_is_refused(running: Root) -> None:
    running.cloud.tell(not_offered=[("g5.xlarge", "us-east-1a"), ("g6.xlarge", "us-east-1b")])
    try:
        root, declared = running, pools(running.cloud)
        root.write({**declared, "pair": {**declared["pair"], "machine_types": ["g6.xlarge"]}})
        assert "but not in us-east-1b, where the nodes stand" in root.refused("-refresh=false")
    finally:
        running.cloud.tell(not_offered=[("g5.xlarge", "us-east-1a")])


def test_security_groups_of_the_caller(running: Root) -> None:
    made = running.cloud.client("ec2").create_security_group(GroupName="mine", Description="mine")["GroupId"]
    found = planned(running, pair={"security_group_ids": [made]})
    # EC2 gives a worker its groups with its interface; the head's interface is a resource of its own.
    assert found[NODES[1]] == "replace" and found.get(NODES[0], "update") == "update"
    assert found[KEPT[0]] == "update"


def test_another_name_of_the_stack_replaces_nothing(running: Root) -> None:
    both = {"stack": "renamed"}
    assert set(planned(running, pair=both, group=both).values()) == {"update"}


def test_another_image_replaces_the_nodes_and_keeps_the_head_s_address(running: Root) -> None:
    found = planned(running, pair={"image": NEW}, group={"image": NEW})
    assert {each for each, action in found.items() if action == "replace" and "aws_" in each} == {
        *NODES,
        "module.group.aws_instance.head",
        GROUP,
        TEMPLATE,
        *ATTACHMENTS,
    }
    assert not set(found) & set(KEPT)


def test_another_revision_and_another_secret_replace_the_nodes(running: Root) -> None:
    found = planned(running, "-replace=module.pair.terraform_data.secret", group={"user_data_revision": "2"})
    assert {found[each] for each in (*NODES, GROUP, "module.group.aws_instance.head")} == {"replace"}
    assert not set(found) & set(KEPT)


def test_zones_move_nodes_only_where_that_is_asked_for(running: Root) -> None:
    # The zone where they stand, and more of them.
    assert planned(running, pair={"zones": ["us-east-1b"]}) == {}
    assert planned(running, pair={"zones": ["us-east-1a", "us-east-1b"]}) == {}
    root, declared = running, pools(running.cloud)
    elsewhere = {"pair": {**declared["pair"], "zones": ["us-east-1a"]}, "group": declared["group"]}
    root.write(elsewhere)
    said = root.refused("-refresh=false")
    assert "zones: the nodes stand in us-east-1b, which is not among us-east-1a" in said
    running.cloud.tell()
    try:
        found = plan_changes(root.plan("-refresh=false", '-replace=module.pair.terraform_data.zone["head"]'))
        # A volume cannot be moved to another zone.
        assert {found[each] for each in (*NODES, *KEPT[:2])} == {"replace"}
        assert not any(address.startswith("module.group") for address in found)
    finally:
        running.cloud.tell(not_offered=[("g5.xlarge", "us-east-1a")])


def test_fewer_and_more_nodes(running: Root) -> None:
    more = planned(running, pair={"node_count": 3}, group={"node_count": 3})
    assert more == {'module.pair.aws_instance.worker["pair-2"]': "create", GROUP: "update"}
    fewer = planned(running, pair={"node_count": 1})
    assert {each: action for each, action in fewer.items() if "aws_instance" in each} == {NODES[1]: "destroy"}
    assert set(fewer.values()) == {"destroy"}


def test_the_volume_of_the_head_grows_in_place_and_keeps_its_key(running: Root) -> None:
    assert planned(running, pair={"head_volume_gb": 30}) == {"module.pair.aws_ebs_volume.head": "update"}
    key = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    found = planned(running, pair={"kms_key_id": key})
    assert {found[each] for each in NODES} == {"replace"} and not set(found) & set(KEPT)


def test_a_head_that_is_replaced_gets_the_volume_of_the_one_before(running: Root) -> None:
    """Applied; by name, as a person does it, and of the one whose nodes are a group."""
    cloud = running.cloud
    before = {pool: jobs_of(cloud, f"{pool}-{node}") for pool, node in (("pair", 0), ("group", "head"))}
    for instance, volume in before.values():
        assert (volume["Size"], volume["Encrypted"], volume["VolumeType"]) == (20, True, "gp3")
        assert volume["Attachments"][0]["InstanceId"] == instance
        assert f"volume: {volume['VolumeId']}" in cloud.user_data(instance)
    running.write(pools(cloud))
    heads = [f"-replace=module.{pool}.aws_instance.head" for pool in before]
    assert set(plan_changes(running.plan(*heads)).values()) == {"replace"}
    assert plan_counts(running.apply(*heads)) == (4, 0, 4)
    for pool, (instance, volume) in before.items():
        new, now = jobs_of(cloud, tags(volume)["Name"].split("/")[1])
        assert new != instance and now["VolumeId"] == volume["VolumeId"], pool
        assert [each["InstanceId"] for each in now["Attachments"]] == [new]
        assert f"volume: {now['VolumeId']}" in cloud.user_data(new)
    assert planned(running) == {}


def test_another_volume_is_made_with_another_head(running: Root) -> None:
    """A running one does not have it from under it."""
    found = planned(running, "-replace=module.pair.aws_ebs_volume.head")
    assert {address for address, action in found.items() if action == "replace"} == {
        "module.pair.aws_ebs_volume.head",
        NODES[0],
        ATTACHMENTS[0],
    }


def jobs_of(cloud: Cloud, node: str) -> tuple[str, dict[str, Any]]:
    """The head of that name, and the volume with its jobs."""
    instance = cloud.instance(node)["InstanceId"]
    [volume] = [each for each in cloud.volumes(instance) if tags(each)["Name"].endswith("/jobs")]
    return instance, volume


def test_the_new_node_has_the_new_user_data(running: Root) -> None:
    """Applied, not only planned: the rest of the fleet is as it was."""
    cloud = running.cloud
    before = {tags(i)["skyinfra:node"]: i["InstanceId"] for i in cloud.instances("pair")}
    changed = {"node_count": 3, "layout": "b", "user_data_worker": WORKER_DATA + "# b\n"}
    assert set(planned(running, pair=changed)) == {NODES[0], 'module.pair.aws_instance.worker["pair-2"]'}
    assert plan_counts(running.apply()) == (1, 1, 0)
    after = {tags(i)["skyinfra:node"]: i["InstanceId"] for i in cloud.instances("pair")}
    assert after.items() >= before.items() and set(after) == {"pair-0", "pair-1", "pair-2"}
    assert cloud.user_data(after["pair-2"]).endswith("# b\n")
    assert not cloud.user_data(after["pair-1"]).endswith("# b\n")
    # Replaced, a node has what is declared, not what was ignored.
    root = running
    root.write({**pools(cloud), "pair": {**pools(cloud)["pair"], **changed, "user_data_revision": "2"}})
    address = cloud.instance("pair-0")["PrivateIpAddress"]
    root.apply()
    assert plan_counts(root.plan()) == (0, 0, 0)
    now = {tags(i)["skyinfra:node"]: i for i in cloud.instances("pair")}
    assert not {i["InstanceId"] for i in now.values()} & set(after.values())
    assert now["pair-0"]["PrivateIpAddress"] == address
    assert cloud.user_data(now["pair-1"]["InstanceId"]).endswith("# b\n")
