"""Nodes that a network for RDMA connects, by the modules that make one: planned, applied, changed and destroyed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import CASES, ModuleCase
from far_end.stand_in import far_end
from mock_provider.bed import Bed, served

NEBIUS, CRUSOE, OCI = (next(case for case in CASES if case.name == name) for name in ("nebius", "crusoe", "oci"))
EIGHT = {
    "nebius": {"machine_types": ["gpu-h100-sxm/8gpu-128vcpu-1600gb"], "infiniband_fabric": "fabric-6"},
    "crusoe": {"machine_types": ["h100-80gb-sxm-ib.8x"], "rdma": True},
    "oci": {"machine_types": ["BM.GPU.H100.8"], "rdma": True},
}
CLUSTERS = {
    "nebius": "nebius_compute_v1_gpu_cluster",
    "crusoe": "crusoe_ib_partition",
    "oci": "oci_core_compute_cluster",
}
MACHINES = {"nebius": "nebius_compute_v1_instance", "crusoe": "crusoe_compute_instance", "oci": "oci_core_instance"}
OTHER_TYPE = {
    "nebius": ["gpu-h100-sxm/1gpu-16vcpu-200gb"],
    "crusoe": ["l40s-48gb.8x"],
    "oci": ["VM.GPU.A10.2"],
}
cases = pytest.mark.parametrize(
    ("bed", "case"), [pytest.param(each, each, id=each.name) for each in (NEBIUS, CRUSOE, OCI)], indirect=["bed"]
)


def network(name: str, location: str, **free: int) -> dict[str, Any]:
    """An InfiniBand network of Crusoe, with its free GPUs by type."""
    capacities = [{"slice_type": kind.replace("_", "-") + ".8x", "quantity": count} for kind, count in free.items()]
    return {"id": name, "name": name, "location": location, "capacities": capacities}


NETWORKS = [
    network("elsewhere", "us-southcentral1-a", h100_80gb_sxm_ib=800),
    network("others", "us-east1-a", a100_80gb_sxm_ib=800),
    network("full", "us-east1-a", h100_80gb_sxm_ib=8),
    network("mine", "us-east1-a", h100_80gb_sxm_ib=16),
]


@pytest.fixture
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    case: ModuleCase = request.param
    with served(tmp_path, *case.mock) as made:
        made.environment |= far_end(tmp_path / "far-end", made.environment["PATH"])
        case.answers(made.world)
        made.world.answer("data.crusoe_ib_networks", {"ib_networks": NETWORKS})
        declare(made, case)
        made.run("init", "-no-color")
        yield made


def declare(bed: Bed, case: ModuleCase, **inputs: Any) -> None:
    module = {"source": case.source, "name": "train", "node_count": 2, **case.inputs, **inputs}
    fleet = {"fleet": {"value": "${module.train.fleet}", "sensitive": True}}
    root = {"provider": case.providers, "module": {"train": module}, "output": fleet}
    bed.write(json.dumps({key: value for key, value in root.items() if value}), "main.tf.json")


def joined(case: ModuleCase, machine: dict[str, Any]) -> str | None:
    """The cluster that a machine was made in."""
    if case is NEBIUS:
        return machine["gpu_cluster"] and str(machine["gpu_cluster"]["id"])
    if case is CRUSOE:
        return machine["host_channel_adapters"] and str(machine["host_channel_adapters"][0]["ib_partition_id"])
    return machine["compute_cluster_id"]


@pytest.mark.slow
@cases
def test_the_nodes_join_one_network_and_leave_it_anew(bed: Bed, case: ModuleCase) -> None:
    declare(bed, case, **EIGHT[case.name])
    bed.apply()
    [cluster] = bed.world.existing(CLUSTERS[case.name]).values()
    machines = bed.world.existing(MACHINES[case.name]).values()
    assert [joined(case, each) for each in machines] == [cluster["id"]] * 2 and bed.changes() == {}
    # A third one joins; nobody else has to be made anew.
    declare(bed, case, **EIGHT[case.name], node_count=3)
    assert not {address for address, action in bed.changes().items() if action == "replace"}
    bed.apply()
    assert {joined(case, each) for each in bed.world.existing(MACHINES[case.name]).values()} == {cluster["id"]}
    # Without it all of them are made anew, since none can leave.
    without = {key: value for key, value in EIGHT[case.name].items() if key == "machine_types"}
    declare(bed, case, **without, node_count=3)
    nodes = {address: action for address, action in bed.changes().items() if ".node[" in address}
    assert {action for address, action in nodes.items() if MACHINES[case.name] in address} == {"replace"}
    bed.apply()
    assert not bed.world.existing(CLUSTERS[case.name]) and bed.changes() == {}
    bed.run("destroy", "-auto-approve", "-no-color")
    assert not bed.world.existing(MACHINES[case.name])


@pytest.mark.slow
@cases
def test_machines_that_no_network_connects_are_refused_before_the_apply(bed: Bed, case: ModuleCase) -> None:
    declare(bed, case, **{**EIGHT[case.name], "machine_types": OTHER_TYPE[case.name]})
    said = " ".join(bed.run("plan", "-no-color", code=1).split())
    name = "infiniband_fabric" if case is NEBIUS else "rdma"
    assert f"{name}: " in said and "(machine_types)" in said


@pytest.mark.slow
@pytest.mark.parametrize("bed", [CRUSOE], ids=["crusoe"], indirect=True)
def test_the_partition_is_in_a_network_of_the_location_with_room_and_stays_there(bed: Bed) -> None:
    """The network of another location has no such machines; what is free is another one after the first apply."""
    declare(bed, CRUSOE, **EIGHT["crusoe"])
    bed.apply()
    [partition] = bed.world.existing("crusoe_ib_partition").values()
    assert partition["ib_network_id"] == "mine"
    later = [
        network("mine", "us-east1-a"),
        network("full", "us-east1-a", h100_80gb_sxm_ib=800),
    ]
    bed.world.answer("data.crusoe_ib_networks", {"ib_networks": later})
    assert bed.changes() == {}
    bed.world.answer("data.crusoe_ib_networks", {"ib_networks": []})
    assert bed.changes() == {}


@pytest.mark.slow
@pytest.mark.parametrize("bed", [CRUSOE], ids=["crusoe"], indirect=True)
def test_a_location_without_such_a_network_is_said(bed: Bed) -> None:
    declare(bed, CRUSOE, **{**EIGHT["crusoe"], "machine_types": ["b200-180gb-sxm-ib.8x"]})
    said = " ".join(bed.apply(code=1).replace("│", " ").split())
    assert "no InfiniBand network of us-east1-a has machines of b200-180gb-sxm-ib.8x" in said
    assert not bed.world.existing("crusoe_compute_instance")
    given = "0d3f8e1a-1111-2222-3333-444455556666"
    declare(bed, CRUSOE, **EIGHT["crusoe"], ib_network_id=given)
    bed.apply()
    [partition] = bed.world.existing("crusoe_ib_partition").values()
    assert partition["ib_network_id"] == given


@pytest.mark.slow
@pytest.mark.parametrize("bed", [OCI], ids=["oci"], indirect=True)
def test_machines_of_oracle_cloud_are_let_into_their_network(bed: Bed) -> None:
    declare(bed, OCI, **EIGHT["oci"])
    bed.apply()
    for each in bed.world.existing("oci_core_instance").values():
        plugins = {plugin["name"]: plugin["desired_state"] for plugin in each["agent_config"][0]["plugins_config"]}
        assert plugins == {
            "Compute HPC RDMA Authentication": "ENABLED",
            "Compute HPC RDMA Auto-Configuration": "ENABLED",
        }
