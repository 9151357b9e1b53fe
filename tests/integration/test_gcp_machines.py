"""modules/gcp besides the contract of all modules: groups, purchases, network, disks, zones, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import GCP
from cloud_modules.gcp import GOOGLE, GROUP, INSTANCE, TEMPLATE, declare, google, instances, long_runner, refused
from mock_provider.bed import Bed
from support import ROOT, first_fast


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with google(tmp_path) as made:
        yield made


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    return long_runner(tmp_path)


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
