"""A host of a TPU slice finds out which one it is, and where the others are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.metadata_service import GCP, MetadataService, serving

from skyinfra.first_boot.operations import OPERATIONS
from skyinfra.first_boot.programs import Failed
from skyinfra.first_boot.slices import SliceHost

# What a host of a v4-256 has, of which we read a part: torch_xla's tests, and logs of such hosts.
V4 = {
    "ACCELERATOR_TYPE": "v4-32",
    "ALT": "false",
    "CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "HOST_BOUNDS": "1,1,4",
    "INJECT_SLICE_BUILDER_FAULT": "",
    "NODE_ID": "train-0",
    "TOPOLOGY": "2x2x4",
    "WORKER_ID": "3",
    "WRAP": "false,false,false",
}
SHARED = {"version": 1, "node": "train-0", "head": False, "env": {"MINE": "é", "TPU_WORKER_ID": "7"}}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    with serving() as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        yield server


def say(server: MetadataService, number: int, hosts: int, tpu_env: dict[str, str]) -> None:
    """Makes the metadata those of one host."""
    attributes = {
        "agent-worker-number": str(number),
        "worker-network-endpoints": ",".join(f"unknown:unknown:10.84.0.{n + 2}" for n in range(hosts)),
        "tpu-env": "".join(f"{name}: '{value}'\n" for name, value in tpu_env.items()),
    }
    server.values.update({f"{GCP}attributes/{name}": text for name, text in attributes.items()})


@pytest.fixture
def host(tmp_path: Path) -> SliceHost:
    shared, node = tmp_path / "slice.json", tmp_path / "node.json"
    shared.write_text(json.dumps(SHARED))
    return SliceHost(str(shared), str(node), 4)


def test_a_host_makes_its_own_configuration(service: MetadataService, host: SliceHost) -> None:
    say(service, 3, 4, V4)
    assert not host.done()
    host.do()
    assert host.done()
    made = json.loads(Path(host.node).read_text())
    assert made == {
        **SHARED,
        "node": "train-0-3",
        "env": {
            "MINE": "é",
            "TPU_WORKER_ID": "3",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "10.84.0.2,10.84.0.3,10.84.0.4,10.84.0.5",
            "TPU_ACCELERATOR_TYPE": "v4-32",
            "TPU_TOPOLOGY": "2x2x4",
            "TPU_TOPOLOGY_ALT": "false",
            "TPU_TOPOLOGY_WRAP": "false,false,false",
            "TPU_HOST_BOUNDS": "1,1,4",
            "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
            "ALT": "false",
            "WRAP": "false,false,false",
            "HOST_BOUNDS": "1,1,4",
            "CHIPS_PER_HOST_BOUNDS": "2,2,1",
        },
    }
    assert list(made) == list(SHARED)
    # The startup script, which runs at every boot, writes the shared one again: that changes nothing.
    Path(host.shared).write_text(json.dumps(SHARED))
    assert host.done()
    # Another host has come to the place of one.
    say(service, 3, 4, V4)
    moved = service.values[f"{GCP}attributes/worker-network-endpoints"].replace("10.84.0.2,", "10.84.0.9,")
    service.values[f"{GCP}attributes/worker-network-endpoints"] = moved
    assert not host.done()
    host.do()
    assert json.loads(Path(host.node).read_text())["env"]["TPU_WORKER_HOSTNAMES"].startswith("10.84.0.9,")


@pytest.mark.parametrize(
    ("hosts", "bounds"), [(4, "2,2,1"), (8, "2,4,1"), (16, "4,4,1"), (32, "4,8,1"), (64, "8,8,1"), (128, "8,16,1")]
)
def test_v2_and_v3_do_not_say_how_their_hosts_stand(
    service: MetadataService, tmp_path: Path, hosts: int, bounds: str
) -> None:
    (tmp_path / "slice.json").write_text(json.dumps(SHARED))
    say(service, 2, hosts, {"ACCELERATOR_TYPE": f"v3-{hosts * 8}"})
    SliceHost(str(tmp_path / "slice.json"), str(tmp_path / "node.json"), hosts).do()
    made = json.loads((tmp_path / "node.json").read_text())
    assert (made["env"]["TPU_HOST_BOUNDS"], made["env"]["TPU_CHIPS_PER_HOST_BOUNDS"]) == (bounds, "2,2,1")
    # In the order of the names, which is that of the numbers.
    assert made["node"] == f"train-0-{2:0{len(str(hosts - 1))}}"


def test_what_is_missing_is_named_and_the_head_can_be_told(service: MetadataService, host: SliceHost) -> None:
    with pytest.raises(Failed, match=r"the metadata of this host have no agent-worker-number: .*404"):
        host.do()
    # For the report of the failure.
    assert json.loads(Path(host.node).read_text()) == SHARED
    say(service, 1, 2, V4)
    with pytest.raises(Failed, match="host 1 of 2, and the slice is declared with 4"):
        host.done()


def test_nodes_of_other_clouds_have_no_such_step() -> None:
    assert OPERATIONS["slice_host"] is SliceHost
