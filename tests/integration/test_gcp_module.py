"""modules/gcp besides the contract of all modules: what reaches the nodes, purchases, groups, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import GCP, gcp_answers, of_project
from mock_provider.bed import Bed, served
from mock_provider.world import Failure
from support import ROOT, first_fast

from skyinfra.terraform.program import Terraform

# The machines, the disk of the head and what reaches the nodes stand in the module that gcp calls.
GOOGLE = "module.google."
INSTANCE, TEMPLATE = "google_compute_instance", "google_compute_instance_template"
GROUP = "google_compute_region_instance_group_manager"


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with served(tmp_path, "google") as made:
        gcp_answers(made.world)
        yield made


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    """Longer than one value of the metadata takes."""
    file = tmp_path / "skyinfra-0.1.0+1-py3-none-any.whl.bz2"
    file.write_bytes(bytes(hashlib.sha512(b"x").digest()) * 4000)
    return file


def declare(bed: Bed, **inputs: Any) -> dict[str, str]:
    """What a plan would do, in the module."""
    first = not (bed.folder / ".terraform").exists()
    root = {
        "terraform": {"required_providers": {"google": {"source": "registry.terraform.io/hashicorp/google"}}},
        "provider": GCP.providers,
        "module": {"train": {"source": GCP.source, "name": "train", **GCP.inputs, **inputs}},
        "output": {"fleet": {"value": "${module.train.fleet}", "sensitive": True}},
    }
    bed.write(json.dumps(root), "main.tf.json")
    if first:
        bed.run("init", "-no-color")
    return {address.removeprefix("module.train."): action for address, action in bed.changes().items()}


def refused(bed: Bed, message: str, **inputs: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        declare(bed, **inputs)
    assert message in str(caught.value)


def instances(bed: Bed) -> dict[str, dict[str, Any]]:
    """By the names of the nodes."""
    return {each["labels"]["skyinfra-node"]: each for each in bed.world.asked(INSTANCE)}


@pytest.mark.slow
def test_the_runner_is_in_the_metadata_and_stays_until_it_is_upgraded(bed: Bed, runner: Path) -> None:
    given = {"node_count": 2, "runner_file": str(runner), "allow_cidrs": ["203.0.113.0/24"]}
    declare(bed, **given)
    bed.apply()
    secret = bed.output("fleet")["secret"]
    key = "skyinfra-skyinfra-0-1-0-1-py3-none-any-whl-bz2"

    def delivered() -> dict[str, Any]:
        """The same on all nodes; versions.json."""
        first, second = (each["metadata"] for each in instances(bed).values())
        parts = [first[f"{key}-{number}"] for number in range(2)]
        assert max(map(len, parts)) < 256 * 1024 and f"{key}-2" not in first
        assert base64.b64decode("".join(parts)) == runner.read_bytes()
        assert first["skyinfra-secret"] == secret
        shared = {name for name in first if name.startswith("skyinfra-") and name != "skyinfra-layout"}
        assert {name: first[name] for name in shared} == {name: second[name] for name in shared}
        found: dict[str, Any] = json.loads(first["skyinfra-versions-json"])
        return found

    sha256 = hashlib.sha256(runner.read_bytes()).hexdigest()
    wheel = {"name": runner.name, "sha256": sha256}
    before = delivered()
    assert before == {"version": 1, "python": "3.12", "requirements": ["cloudpickle==3.1.2"], "wheel": wheel}
    head = instances(bed)["train-0"]["metadata"]["user-data"]
    assert "train-0 10.84.0." in head and "gce://skyinfra/secret" in head and "-jobs" in head

    # Another version of skyinfra changes nothing, until somebody asks for it.
    old = runner.read_bytes()
    runner.write_bytes(old[:-1] + b"y")
    newer = {**given, "versions": {"python": "3.13", "requirements": []}}
    assert declare(bed, **newer) == {}
    again = [f"-replace=module.train.module.google.terraform_data.{name}[0]" for name in ("runner", "versions")]
    changes = {address.removeprefix("module.train."): action for address, action in bed.changes(*again).items()}
    assert (
        changes.pop(f"{GOOGLE}terraform_data.runner[0]")
        == changes.pop(f"{GOOGLE}terraform_data.versions[0]")
        == "replace"
    )
    assert changes == {f'{GOOGLE}{INSTANCE}.node["train-{number}"]': "update" for number in range(2)}
    bed.apply(*again)
    after = delivered()
    assert (after["python"], after["wheel"]["sha256"]) == ("3.13", hashlib.sha256(runner.read_bytes()).hexdigest())
    bed.destroy()
    assert not any(secret in each or base64.b64encode(old).decode()[:200] in each for each in bed.printed)


def test_machines_that_have_stopped_are_started_again_where_that_is_declared(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(bed, node_count=2)
    bed.apply()
    assert declare(bed, node_count=2, starts_stopped=True) == {
        f'{GOOGLE}{INSTANCE}.node["train-{n}"]': "update" for n in range(2)
    }
    bed.apply()
    assert bed.changes() == {}
    file, machine = next(iter(bed.world.existing(INSTANCE).items()))
    (bed.world.folder / file).write_text(json.dumps({**machine, "desired_status": "TERMINATED"}))
    for name in ("TF_CLI_CONFIG_FILE", "TF_REATTACH_PROVIDERS"):
        monkeypatch.setenv(name, bed.environment[name])
    terraform = Terraform(bed.folder)
    with terraform.planned(lambda event: None) as plan:
        ((action, address),) = plan.changes
        assert (action, plan.drifted) == ("update", {address})
        assert terraform.found(plan) == {address: {"desired_status"}}
    bed.apply()
    assert bed.world.existing(INSTANCE)[file]["desired_status"] == "RUNNING"
    assert bed.changes() == {}


def test_machines_that_stand_ready_and_a_head_that_may_start_them(bed: Bed) -> None:
    given = {"node_count": 3, "min_nodes": 1, "starts_stopped": True}
    of_project(bed.world, "p")
    declare(bed, **given)
    bed.apply()
    assert bed.changes() == {}
    fleet, made = bed.output("fleet"), instances(bed)
    assert [node["name"] for node in fleet["nodes"]] == ["train-head"]
    assert (fleet["group_nodes"], fleet["max_nodes"], fleet["nodes"][0]["machine_type"]) == (1, 3, "e2-standard-2")
    nodes = [f"train-{number}" for number in range(3)]
    assert sorted(made) == [*nodes, "train-head"]
    assert {made[node]["machine_type"] for node in nodes} == {"a2-highgpu-1g"}
    # The head starts them: no plan does. Another least or most reaches it while it runs.
    assert {made[node]["desired_status"] for node in nodes} == {None}
    head = made["train-head"]
    assert head["desired_status"] == "RUNNING" and head["service_account"][0]["email"]
    group = json.loads(head["metadata"]["skyinfra-group"])
    assert (group["least"], group["most"]) == (1, 3)
    zone = "projects/p/zones/us-central1-a/instances/"
    assert group["machines"] == {node: f"{zone}{made[node]['name']}" for node in nodes}
    assert all("skyinfra-group" not in made[node]["metadata"] and not made[node]["service_account"] for node in nodes)
    [role] = bed.world.asked("google_project_iam_custom_role")
    assert role["permissions"] == ["compute.instances.start"]
    allowed = bed.world.asked("google_compute_instance_iam_member")
    assert {each["instance_name"] for each in allowed} == {made[node]["name"] for node in nodes}
    assert {each["member"] for each in allowed} == {f"serviceAccount:{head['service_account'][0]['email']}"}
    # One that has stopped changes no plan.
    file, machine = next(
        found for found in bed.world.existing(INSTANCE).items() if found[1]["name"] == made[nodes[1]]["name"]
    )
    (bed.world.folder / file).write_text(json.dumps({**machine, "current_status": "TERMINATED"}))
    assert bed.changes() == {}
    node = f"{GOOGLE}{INSTANCE}.node"
    assert declare(bed, **{**given, "min_nodes": 0}) == {f'{node}["train-head"]': "update"}
    start = f"{GOOGLE}google_compute_instance_iam_member.start"
    gone = (node, start, f"{GOOGLE}terraform_data.declared")
    fewer = {f'{node}["train-head"]': "update", **{f'{each}["train-2"]': "delete" for each in gone}}
    assert declare(bed, **{**given, "node_count": 2}) == fewer
    # A machine that is made anew has no policy yet.
    changes = bed.changes(f'-replace=module.train.{node}["train-1"]')
    assert changes[f'module.train.{start}["train-1"]'] == "replace"
    own = declare(bed, **given, service_account="mine@p.iam.gserviceaccount.com")
    assert own[f"{GOOGLE}google_service_account.head[0]"] == "delete"


def test_the_account_of_nodes_that_mount_buckets(bed: Bed) -> None:
    """It may read or write below the declared prefixes and do nothing else, for as long as they are declared."""
    of_project(bed.world, "p")
    bed.world.answer("google_service_account", {"email": "account-{n}@p.iam.gserviceaccount.com"})
    data = {"bucket": "my-bucket", "prefix": "data"}
    # One folder at two paths is one grant.
    given = {"node_count": 2, "buckets": [data, data, {"bucket": "other", "write": True}]}

    def grants() -> dict[tuple[str, str], str | None]:
        """The conditions, by bucket and role."""
        made = bed.world.asked("google_storage_bucket_iam_member")
        [account] = {each["member"] for each in made}
        assert {f"serviceAccount:{node['service_account'][0]['email']}" for node in instances(bed).values()} == {
            account
        }
        found = {(each["bucket"], each["role"]): each["condition"] for each in made}
        assert len(found) == len(made)
        return {key: condition[0]["expression"] if condition else None for key, condition in found.items()}

    declare(bed, node_count=2)
    bed.apply()
    assert not any(node["service_account"] for node in instances(bed).values())
    nodes = {f'{GOOGLE}{INSTANCE}.node["train-{number}"]': "replace" for number in range(2)}
    assert nodes.items() <= declare(bed, **given).items()
    bed.apply()
    assert bed.changes() == {}
    assert grants() == {
        (
            "my-bucket",
            "roles/storage.objectViewer",
        ): "resource.name == 'projects/_/buckets/my-bucket'"
        " || resource.name.startsWith('projects/_/buckets/my-bucket/objects/data/')",
        ("other", "roles/storage.objectUser"): None,
    }
    # What is taken away is gone; the bucket is nobody's of ours.
    changes = declare(bed, **{**given, "buckets": [data]})
    gone = f'{GOOGLE}google_storage_bucket_iam_member.mounted["nodes writes other/"]'
    assert changes == {gone: "delete"}
    changes = declare(bed, node_count=2)
    assert nodes.items() <= changes.items() and changes[f"{GOOGLE}google_service_account.nodes[0]"] == "delete"
    # An account of the caller's has its rights from the caller.
    changes = declare(bed, **given, service_account="mine@p.iam.gserviceaccount.com")
    assert nodes.items() <= changes.items() and changes[f"{GOOGLE}google_service_account.nodes[0]"] == "delete"
    assert {what for at, what in changes.items() if "bucket_iam_member" in at} == {"delete"}
    refused(bed, "buckets: the name of a bucket has lower-case letters", buckets=[{"bucket": "My"}])
    refused(bed, "a prefix letters, digits and", buckets=[{**data, "prefix": "a') || true"}])


@pytest.mark.parametrize("kind", ["group", "elastic"])
def test_the_longest_names_fit(bed: Bed, kind: str) -> None:
    own = {"group": True} if kind == "group" else {"min_nodes": 0}
    bed.world.answer("google_service_account", {"email": "account-{n}@p.iam.gserviceaccount.com"})
    declare(bed, name="p" * 40, stack="A" * 64, node_count=2, buckets=[{"bucket": "my-bucket"}], **own)
    bed.apply()
    accounts = bed.world.asked("google_service_account")
    roles = bed.world.asked("google_project_iam_custom_role")
    assert (len(accounts), len(roles)) == ((1, 0) if kind == "group" else (2, 1))
    for said in [each["display_name"] for each in accounts] + [each["title"] for each in roles]:
        assert len(said) <= 100 and "A" * 64 in said, said
    assert all(re.fullmatch("[a-z][a-z0-9-]{4,28}[a-z0-9]", each["account_id"]) for each in accounts)
    assert all(re.fullmatch(r"[a-zA-Z0-9_.]{3,64}", each["role_id"]) for each in roles)
    # What Compute Engine takes.
    named = [each for file, each in bed.world.existing().items() if file.startswith("google_compute_")]
    names = [each["name"] for each in named if each.get("name")]
    assert len(names) > 4
    for name in names:
        assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name
    assert all(len(each["name_prefix"]) <= 54 for each in bed.world.asked(TEMPLATE) if each.get("name_prefix"))


@pytest.mark.parametrize("kind", ["group", "elastic"])
def test_a_head_besides_its_nodes_mounts_what_they_do(bed: Bed, kind: str) -> None:
    of_project(bed.world, "p")
    bed.world.answer("google_service_account", {"email": "account-{n}@p.iam.gserviceaccount.com"})
    own = {"group": True} if kind == "group" else {"min_nodes": 0}
    declare(bed, node_count=2, buckets=[{"bucket": "my-bucket", "prefix": "data"}], **own)
    bed.apply()
    assert bed.changes() == {}
    members = {each["member"] for each in bed.world.asked("google_storage_bucket_iam_member")}
    made = [*instances(bed).values(), *bed.world.asked(TEMPLATE)]
    accounts = {each["labels"].get("skyinfra-node"): each["service_account"][0]["email"] for each in made}
    assert members == {f"serviceAccount:{account}" for account in accounts.values()}
    # The account that starts machines is the head's alone.
    allowed = {each["member"] for each in bed.world.asked("google_compute_instance_iam_member")}
    assert allowed == (set() if kind == "group" else {f"serviceAccount:{accounts['train-head']}"})
    assert len(members) == (1 if kind == "group" else 2)
    # A node that ends writes what it has not written yet.
    for each in (INSTANCE, GROUP) if kind == "group" else (INSTANCE,):
        assert f"module.train.{GOOGLE}google_storage_bucket_iam_member.mounted" in bed.outliving(each)


@pytest.mark.parametrize("group", [True, False])
def test_another_subnetwork_gives_nothing_a_name_that_is_taken(bed: Bed, group: bool) -> None:
    """Terraform makes the new one first of whatever a template refers to, and Google has each name once."""
    bed.world.answer("data.google_compute_subnetwork", {"network": "mine"})
    own = "projects/p/regions/us-central1/subnetworks/mine"
    kinds = ("google_compute_address", "google_compute_firewall")
    declare(bed, node_count=2, group=group)
    bed.apply()
    for place in ({"subnetwork": own}, {"subnetwork": f"{own}-2"}, {}):
        taken = [(kind, each) for kind in kinds for each in bed.world.existing(kind).values()]
        bed.world.fail(*(Failure("create", kind, "alreadyExists", {"name": each["name"]}) for kind, each in taken))
        declare(bed, node_count=2, group=group, **place)
        bed.apply()
        assert bed.changes() == {}
    # Those of the version before, in a subnetwork of the caller's, keep the names that they have.
    bed.world.fail()
    declare(bed, node_count=2, group=group, subnetwork=own)
    bed.apply()
    for kind in kinds:
        for file, each in bed.world.existing(kind).items():
            (bed.world.folder / file).write_text(json.dumps({**each, "name": "before"}))
    assert bed.changes() == {}


def test_a_group_for_spot_and_for_several_types(bed: Bed, runner: Path) -> None:
    types = ["g2-standard-8", "g2-standard-12"]
    spot = {"node_count": 3, "spot": True, "machine_types": types, "runner_file": str(runner)}
    declare(bed, **spot)
    bed.apply()
    fleet = bed.output("fleet")
    assert [node["name"] for node in fleet["nodes"]] == ["train-head"] and fleet["group_nodes"] == 3
    [head] = instances(bed).values()
    assert (head["machine_type"], head["scheduling"][0]["provisioning_model"]) == ("e2-standard-2", "STANDARD")
    assert head["metadata"]["skyinfra-layout"] == "a"
    [template], [group] = bed.world.asked(TEMPLATE), bed.world.asked(GROUP)
    assert template["scheduling"][0]["provisioning_model"] == "SPOT"
    assert "train-asg" in template["metadata"]["user-data"] and "skyinfra-layout" not in template["metadata"]
    assert group["target_size"] == 3
    selected = group["instance_flexibility_policy"][0]["instance_selections"]
    assert {each["rank"]: each["machine_types"] for each in selected} == {0: types[:1], 1: types[1:]}
    # In place: the size, the layout; a new runner is for the nodes that come later.
    assert declare(bed, **{**spot, **GCP.layout, "node_count": 5}) == {
        f'{GOOGLE}{INSTANCE}.node["train-head"]': "update",
        f"{GROUP}.workers[0]": "update",
    }
    changes = bed.changes("-replace=module.train.module.google.terraform_data.versions[0]")
    assert changes[f"module.train.{TEMPLATE}.group[0]"] == "replace"
    assert changes[f"module.train.{GROUP}.workers[0]"] == "update"


def test_purchases_of_machines(bed: Bed) -> None:
    def made(**inputs: Any) -> dict[str, Any]:
        declare(bed, **inputs)
        bed.apply()
        return instances(bed)["train-0"]

    plain = made(machine_types=["e2-standard-2"])
    assert plain["scheduling"][0]["on_host_maintenance"] == "MIGRATE" and plain["service_account"] == []
    n1 = made(machine_types=["n1-standard-16+nvidia-tesla-t4:2"])
    assert (n1["machine_type"], n1["guest_accelerator"]) == (
        "n1-standard-16",
        [{"type": "nvidia-tesla-t4", "count": 2}],
    )
    assert n1["scheduling"][0]["on_host_maintenance"] == "TERMINATE"
    spot = made(spot=True)["scheduling"][0]
    assert (spot["provisioning_model"], spot["preemptible"], spot["automatic_restart"]) == ("SPOT", True, False)
    flex = made(flex_start_seconds=7200)
    assert flex["scheduling"][0]["provisioning_model"] == "FLEX_START"
    assert flex["scheduling"][0]["max_run_duration"][0]["seconds"] == 7200
    assert flex["reservation_affinity"][0]["type"] == "NO_RESERVATION"
    reserved = made(reservation="mine", compact_placement=True, machine_types=["a4-highgpu-8g"])
    [affinity] = reserved["reservation_affinity"]
    assert affinity["specific_reservation"][0]["values"] == ["mine"]
    assert len(reserved["resource_policies"]) == 1
    assert reserved["boot_disk"][0]["initialize_params"][0]["type"] == "hyperdisk-balanced"


@pytest.mark.slow
def test_nodes_that_are_bound_to_a_reservation_end_with_it(bed: Bed) -> None:
    given = {"machine_types": ["a4-highgpu-8g"], "reservation": "mine", "reservation_bound": True}
    declare(bed, **given)
    bed.apply()
    [scheduling] = instances(bed)["train-0"]["scheduling"]
    assert (scheduling["provisioning_model"], scheduling["instance_termination_action"]) == (
        "RESERVATION_BOUND",
        "DELETE",
    )
    assert scheduling["automatic_restart"] and scheduling["on_host_maintenance"] == "TERMINATE"
    assert declare(bed, **{**given, "reservation_bound": False})[f'{GOOGLE}{INSTANCE}.node["train-0"]'] == "replace"
    declare(bed, **given, group=True)
    bed.apply()
    [template] = bed.world.asked(TEMPLATE)
    [scheduling], [affinity] = template["scheduling"], template["reservation_affinity"]
    assert (scheduling["provisioning_model"], scheduling["instance_termination_action"]) == (
        "RESERVATION_BOUND",
        "DELETE",
    )
    assert affinity["specific_reservation"][0]["values"] == ["mine"]
    # The head is no part of it.
    [head] = instances(bed).values()
    assert head["scheduling"][0]["provisioning_model"] == "STANDARD" and head["reservation_affinity"] == []


@pytest.mark.slow
def test_the_interfaces_of_gpudirect(bed: Bed) -> None:
    bed.world.answer("google_compute_address", {"address": "10.84.0.{n}", "project": "p"})
    given = {"machine_types": ["a3-ultragpu-8g"], "node_count": 2}
    declare(bed, **given)
    bed.apply()
    assert [each["nic_type"] for each in instances(bed)["train-0"]["network_interface"]] == ["GVNIC"]
    changes = declare(bed, **given, gpudirect=True)
    assert {changes[f'{GOOGLE}{INSTANCE}.node["train-{number}"]'] for number in range(2)} == {"replace"}
    bed.apply()
    assert bed.changes() == {}
    networks = {each["name"].rpartition("-")[2]: each for each in bed.world.asked("google_compute_network")}
    assert networks["rdma"]["network_profile"] == "projects/p/global/networkProfiles/us-central1-a-vpc-roce"
    assert networks["host"]["network_profile"] is None
    assert {networks[name]["mtu"] for name in ("host", "rdma")} == {8896}
    ranges = [each["ip_cidr_range"] for each in bed.world.asked("google_compute_subnetwork")]
    assert len(ranges) == len(set(ranges)) == 10
    for node in instances(bed).values():
        assert [each["nic_type"] for each in node["network_interface"]] == ["GVNIC"] * 2 + ["MRDMA"] * 8
        assert len({each["subnetwork"] for each in node["network_interface"]}) == 10
    # What nodes send each other over the second interface comes in, and nothing else.
    [host] = [each for each in bed.world.asked("google_compute_firewall") if each["name"].endswith("-host")]
    assert host["source_tags"] == host["target_tags"] == instances(bed)["train-1"]["tags"] and not host["source_ranges"]
    assert bed.output("fleet")["nodes"][0]["address"].startswith("10.84.0.")
    bed.destroy()
    assert bed.world.existing() == {}


def test_the_network_is_closed_but_for_who_is_let_in(bed: Bed) -> None:
    def rules(**inputs: Any) -> dict[str, Any]:
        declare(bed, **inputs)
        bed.apply()
        return {each["name"].rpartition("-")[2]: each for each in bed.world.asked("google_compute_firewall")}

    closed = rules()
    assert closed["head"]["source_ranges"] == ["35.235.240.0/20"]
    # A shell on every node, and nothing else.
    shell = closed["shell"]
    assert (shell["source_ranges"], shell["allow"][0]["ports"]) == (["35.235.240.0/20"], ["22"])
    assert shell["target_tags"] == instances(bed)["train-0"]["tags"][:1] == closed["nodes"]["target_tags"]
    fleet = bed.output("fleet")
    assert fleet["via"]["kind"] == "iap" and fleet["via"]["target"].startswith("train-0-")
    assert fleet["head"]["address"] == fleet["nodes"][0]["address"] == fleet["nodes"][0]["address"]
    assert instances(bed)["train-0"]["network_interface"][0]["access_config"] == []
    opened = rules(allow_cidrs=["203.0.113.0/24"])
    assert set(opened) == {"head", "nodes"}
    assert opened["head"]["source_ranges"] == ["203.0.113.0/24"] and opened["head"]["allow"][0]["ports"] == ["8786"]
    fleet = bed.output("fleet")
    assert "via" not in fleet and fleet["head"]["address"] == fleet["nodes"][0]["public_address"]
    bed.world.answer("data.google_compute_subnetwork", {"network": "mine"})
    own = "projects/p/regions/us-central1/subnetworks/mine"
    assert rules(subnetwork=own, network_tags=["inside"]) == {}
    assert instances(bed)["train-0"]["tags"] == ["inside"]
    assert not bed.world.existing("google_compute_network") and not bed.world.existing("google_compute_router_nat")


def test_disks_that_outlive_the_fleet(bed: Bed) -> None:
    """Attached to the only node under names that its user data know; taken away, they stay."""

    def disk(name: str, zone: str = "us-central1-a") -> dict[str, str]:
        return {"name": name, "id": f"projects/p/zones/{zone}/disks/{name}", "path": f"/{name}"}

    given = {"volumes": [disk("one"), disk("two")], "zones": ["us-central1-a"]}
    declare(bed, **given)
    bed.apply()
    [machine] = instances(bed).values()
    jobs, *attached = machine["attached_disk"]
    assert jobs["device_name"] == "skyinfra-head"
    names = [f"projects/p/zones/us-central1-a/disks/{name}" for name in ("one", "two")]
    found = [(each["device_name"], each["source"]) for each in attached]
    assert found == [(f"skyinfra-{index}", name) for index, name in enumerate(names)]
    assert declare(bed, **given) == {}
    node = f'{GOOGLE}{INSTANCE}.node["train-0"]'
    # Another one under the same name is not what the node has mounted.
    other = {**given, "volumes": [disk("one"), disk("three")]}
    assert declare(bed, **other)[node] == "replace"
    changes = declare(bed, **{**given, "volumes": []})
    assert changes[node] == "replace" and not any("google_compute_disk" in address for address in changes)
    refused(
        bed,
        "two (projects/p/zones/us-central1-b/disks/two) is not in us-central1-a, where the node is",
        **{**given, "volumes": [disk("one"), disk("two", "us-central1-b")]},
    )
    refused(bed, "volumes: a disk is attached to one node", **given, node_count=2)
    refused(bed, "volumes: at most 8, of different names", **{**given, "volumes": [disk("one")] * 2})


def test_what_replaces_a_node(bed: Bed) -> None:
    given = {"node_count": 2, "labels": {"team": "a"}}
    declare(bed, **given)
    bed.apply()
    everything = {f'{GOOGLE}{INSTANCE}.node["train-{number}"]': "replace" for number in range(2)}

    def machines(**inputs: Any) -> dict[str, str]:
        return {
            at: what for at, what in declare(bed, **{**given, **inputs}).items() if at.startswith(f"{GOOGLE}{INSTANCE}")
        }

    for changed in (
        {"user_data_revision": "2"},
        {"image": "projects/p/global/images/other"},
        {"machine_types": ["a2-highgpu-2g"]},
        {"spot": True, "node_count": 1},
        {"service_account": "a@b"},
        {"scheduler_port": 9000},
    ):
        found = machines(**changed)
        assert {at: what for at, what in found.items() if what != "delete"}.items() <= everything.items() and found
    in_place = dict.fromkeys(everything, "update")
    assert machines(labels={"team": "b"}) == in_place
    assert machines(user_data_head="#cloud-config\n# new\n", zones=["us-central1-a", "us-central1-f"]) == {}
    assert declare(bed, **given, head_volume_gb=40) == {f"{GOOGLE}google_compute_disk.head": "update"}
    refused(bed, "the nodes stand in us-central1-a, which is not among us-central1-f", **given, zones=["us-central1-f"])


@pytest.mark.parametrize(
    ("message", "inputs"),
    first_fast(
        [
            ("user_data_worker: needed", {"node_count": 2, "user_data_worker": ""}),
            (
                "a machine type with GPUs that are added to it stands alone",
                {"machine_types": ["g2-standard-4", "n1-standard-8+nvidia-l4:1"]},
            ),
            (
                "spot: a node is a spot machine, or comes by flex_start_seconds",
                {"spot": True, "flex_start_seconds": 3600},
            ),
            ("flex_start_seconds: for machines of one type", {"flex_start_seconds": 3600, "group": True}),
            ("reservation_bound: nodes are bound to a reservation", {"reservation_bound": True}),
            ("gpudirect: for machines of a3-ultragpu-8g", {"gpudirect": True}),
            ("gpudirect: for machines of", {"gpudirect": True, "machine_types": ["a4-highgpu-8g"], "group": True}),
            ("flex_start_seconds: 600", {"flex_start_seconds": 60}),
            ("min_nodes: for machines of one type that stop and start", {"min_nodes": 0, "spot": True}),
            ("min_nodes: for machines of one type that stop and start", {"min_nodes": 0, "group": True}),
            ("min_nodes: a whole number", {"min_nodes": -1}),
            ("machine_types: at least one machine type such as", {"machine_types": ["p5.48xlarge"]}),
            ("image: projects/PROJECT/global/images", {"image": "ami-1"}),
            ("allow_cidrs: the first address of an IPv4 network", {"allow_cidrs": ["fd00::/8"]}),
            ("labels: at most 60 names", {"labels": {"Team": "a"}}),
        ],
        3,
    ),
)
def test_what_is_refused_says_what_would_work(bed: Bed, message: str, inputs: dict[str, Any]) -> None:
    refused(bed, message, **inputs)


def test_a_runner_that_does_not_fit_is_refused(bed: Bed, runner: Path) -> None:
    runner.write_bytes(bytes(400_000))
    refused(bed, "and the metadata of a machine take 512 KB", runner_file=str(runner))


T4 = {"machine_types": ["n1-standard-8+nvidia-tesla-t4:1"]}


def test_machines_stand_in_a_zone_that_has_their_gpus(bed: Bed) -> None:
    # The last one is down.
    declare(bed, **T4, gpu_zones=["us-central1-f", "us-central1-c", "us-central1-x"])
    bed.apply()
    assert instances(bed)["train-0"]["zone"] == "us-central1-c"


@pytest.mark.parametrize("spot", [False, True], ids=["machines", "group"])
def test_a_fleet_stays_whatever_is_known_of_its_zones_later(bed: Bed, spot: bool) -> None:
    given = {**T4, "node_count": 2, "spot": spot}
    declare(bed, **given)
    bed.apply()
    for known in (["us-central1-c"], ["us-east1-c"]):
        assert declare(bed, **given, gpu_zones=known) == {}


def test_no_zone_has_the_machine(bed: Bed) -> None:
    bed.world.answer("data.google_compute_machine_types", {"machine_types": []})
    refused(bed, "machine_types: a2-highgpu-1g is offered in none of us-central1-a")


def test_the_module_is_formatted(bed: Bed) -> None:
    bed.run("fmt", "-check", "-recursive", str(ROOT / "modules" / "gcp"))
