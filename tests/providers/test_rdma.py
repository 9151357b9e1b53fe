"""`rdma=True` on all providers: what is chosen, what the modules are given, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cloud_modules.cases import access

import skyinfra as sky
from skyinfra import offers, providers
from skyinfra.compiler import Deployment, compile_pool
from skyinfra.providers import CloudProvider
from skyinfra.providers.over_ssh import MachineCloud

CLASSES = {each.kind: each for each in vars(providers).values() if isinstance(each, type) and hasattr(each, "kind")}
CONNECTED = [kind for kind in providers.kinds() if any(row.network for row in providers.read(kind).fabrics)]
# The accelerator, the fields of its provider, the machine, and the inputs of the module that connect the nodes.
CHOSEN: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "aws": ("H100:8", {}, "p5.48xlarge", {"placement_group": True}),
    "azure": ("H100:8", {}, "Standard_ND96isr_H100_v5", {"infiniband": True}),
    "crusoe": ("H100:8", {}, "h100-80gb-sxm-ib.8x", {"rdma": True}),
    "gcp": ("H200:8", {"reservation": "mine"}, "a3-ultragpu-8g", {"gpudirect": True}),
    "nebius": ("H100:8", {}, "gpu-h100-sxm/8gpu-128vcpu-1600gb", {"infiniband_fabric": "fabric-2"}),
    "oci": ("H100:8", {}, "BM.GPU.H100.8", {"rdma": True}),
}
INPUTS = {"placement_group", "infiniband", "rdma", "gpudirect", "infiniband_fabric", "efa_interfaces", "ib_network_id"}


def place(kind: str, **fields: Any) -> Any:
    needed = access(kind) if issubclass(CLASSES[kind], MachineCloud) else {}
    return CLASSES[kind](**{**needed, **fields})


def compiled(kind: str, accelerator: Any, provider: dict[str, Any] | None = None, **fields: Any) -> Deployment:
    given = {"nodes": 2, "rdma": True, **fields}
    pool = sky.ComputePool(name="train", accelerator=accelerator, provider=place(kind, **(provider or {})), **given)
    return compile_pool(pool, "s")


def refused(error: type[sky.SkyinfraError], kind: str, accelerator: Any, **fields: Any) -> sky.SkyinfraError:
    with pytest.raises(error) as caught:
        compiled(kind, accelerator, **fields)
    return caught.value


def test_every_provider_that_connects_its_machines_is_here() -> None:
    assert sorted(CHOSEN) == CONNECTED


@pytest.mark.parametrize("kind", sorted(CHOSEN))
def test_one_word_connects_the_nodes_everywhere(kind: str) -> None:
    accelerator, fields, machine, inputs = CHOSEN[kind]
    found = compiled(kind, accelerator, fields).selection
    assert found.machine_types[0] == machine
    assert inputs.items() <= found.inputs.items()
    plain = compiled(kind, accelerator, fields, rdma=False).selection
    assert not {name for name in INPUTS if plain.inputs.get(name)}, "nothing is connected that does not ask for it"
    assert dict(plain.env) == {}


@pytest.mark.parametrize("kind", providers.kinds())
def test_each_provider_has_a_row_for_each_machine_or_a_reason(kind: str) -> None:
    data = providers.read(kind)
    assert bool(data.fabrics) != ("rdma" in data.lacks), "either its machines have networks, or it says why not"
    for row in data.fabrics:
        assert row.source and re.fullmatch(r"20\d\d-\d\d-\d\d", row.date)
        assert bool(row.network) != bool(row.why), row
        assert not (row.names or row.env) or row.network, row
    for offer in offers.load() if data.fabrics else ():
        if offer.provider == kind and (kind != "gcp" or offer.vendor != "google"):
            assert data.fabric(offer) is not None, f"nothing says the network of {offer.machine_type}"


@pytest.mark.parametrize("kind", sorted({*providers.kinds()} - {*CONNECTED, "gcptpu"}))
def test_where_it_is_not_sold_the_reason_is_said(kind: str) -> None:
    fields: dict[str, Any] = {"simulate": True} if kind == "local" else {"hosts": ["a", "b"]} if kind == "ssh" else {}
    error = refused(sky.NotSupported, kind, "H100:8", provider=fields)
    assert error.field == "rdma" and providers.read(kind).lacks["rdma"] in str(error)
    if issubclass(CLASSES[kind], CloudProvider):
        assert "Providers that do: aws, azure, crusoe, gcp, nebius, oci." in str(error)


def test_slices_of_tpus_have_their_own_interconnect() -> None:
    with pytest.raises(sky.NotSupported, match="interconnect of their own"):
        compiled("gcp", "TPUv5e:8", {"region": "us-west4"})


def test_without_a_count_the_smallest_machine_that_is_connected_is_taken() -> None:
    assert compiled("nebius", "H100").selection.machine_types == ("gpu-h100-sxm/8gpu-128vcpu-1600gb",)
    alone = compiled("nebius", "H100", rdma=False).selection
    assert alone.machine_types == ("gpu-h100-sxm/1gpu-16vcpu-200gb",)
    assert compiled("aws", "L4:1").selection.machine_types == ("g6.8xlarge",)  # the first one with an adapter
    assert "a smaller one" not in compiled("nebius", "H100").selection.price_note


def test_a_list_falls_back_to_what_is_connected() -> None:
    found = compiled("gcp", ["H100:8", "H200:8"], {"reservation": "mine"}).selection
    assert found.machine_types == ("a3-ultragpu-8g",)


@pytest.mark.parametrize(
    ("kind", "accelerator", "words"),
    [
        ("gcp", "H100:8", ["GPUDirect-TCPXO goes through a daemon", "a3-ultragpu-8g (H200:8), a4-highgpu-8g (B200:8)"]),
        ("nebius", "L40S", ["no InfiniBand fabric of Nebius has its platform", "8gpu-128vcpu-1600gb (H100:8)"]),
        ("nebius", "H100:1", ["machines with 8 GPUs alone join a GPU cluster"]),
        ("crusoe", "L40S:8", ["types that end in -ib are", "h100-80gb-sxm-ib.8x"]),
        ("oci", "A10:2", ["bare machines with 8 GPUs alone"]),
        ("azure", "A100:1", ["has no InfiniBand", "Standard_ND96isr_H100_v5"]),
        ("aws", None, ["is between machines with accelerators"]),
    ],
)
def test_a_machine_that_is_not_connected_is_refused_by_name(kind: str, accelerator: Any, words: list[str]) -> None:
    error = refused(sky.NotSupported, kind, accelerator)
    assert error.field == "rdma"
    for text in words:
        assert text in str(error)


def test_declared_types_are_all_connected_or_refused() -> None:
    named = {"instance_types": ["g6.xlarge", "g6.8xlarge"]}
    error = refused(sky.NotSupported, "aws", "L4", provider=named)
    assert error.field == "provider.instance_types" and "g6.xlarge: it has no Elastic Fabric Adapter" in str(error)
    assert "g6.8xlarge: it" not in str(error)


def test_efa_and_gpudirect_are_the_same_as_before() -> None:
    for kind, accelerator, field in (("aws", "H100:8", "efa"), ("gcp", "H200:8", "gpudirect")):
        place = CHOSEN[kind][1]
        old = compiled(kind, accelerator, {**place, field: True}, rdma=False)
        new = compiled(kind, accelerator, place)
        assert old.selection.inputs == new.selection.inputs and old.worker == new.worker
    assert compiled("aws", "H100:8", {"placement_group": False}).selection.inputs["placement_group"] is False


def test_what_contradicts_it_is_named() -> None:
    error = refused(sky.InvalidField, "gcp", "H200:8", spot=True)
    assert error.field == "rdma" and "no group" in str(error)
    error = refused(sky.InvalidField, "azure", "H100:8", spot=True)
    assert error.field == "spot" and "or rdma" in str(error)
    error = refused(sky.InvalidField, "azure", "H100:8", provider={"zone": "1"})
    assert error.field == "provider.zone"


@pytest.mark.parametrize(
    ("region", "accelerator", "fabric"),
    [
        ("eu-north1", "H200:8", "fabric-7"),
        ("eu-west1", "H200:8", "fabric-5"),
        ("us-central1", "B200:8", "us-central1-b"),
    ],
)
def test_a_fabric_of_nebius_is_of_the_region_and_the_platform(region: str, accelerator: str, fabric: str) -> None:
    """SkyPilot took one of H100 in eu-north1 for every other: skypilot-org/skypilot#10369."""
    assert compiled("nebius", accelerator, {"region": region}).selection.inputs["infiniband_fabric"] == fabric


def test_the_fabric_of_a_capacity_block_is_named_and_that_of_other_machines_refused() -> None:
    """Reservations are tied to one fabric: dstackai/dstack#2607."""
    own = {"infiniband_fabric": "fabric-6"}
    assert compiled("nebius", "H100:8", own).selection.inputs["infiniband_fabric"] == "fabric-6"
    new = {"infiniband_fabric": "fabric-9"}  # one that is not known here yet
    assert compiled("nebius", "H100:8", new).selection.inputs["infiniband_fabric"] == "fabric-9"
    for wrong in ("fabric-7", "us-central1-a"):
        error = refused(sky.InvalidField, "nebius", "H100:8", provider={"infiniband_fabric": wrong})
        assert error.field == "provider.infiniband_fabric"
        assert "fabric-2, fabric-3, fabric-4, fabric-6" in str(error)
    error = refused(sky.InvalidField, "nebius", "H100:8", provider=own, rdma=False)
    assert "rdma=True" in str(error)


def test_the_network_of_crusoe_may_be_named() -> None:
    own = {"ib_network_id": "0d3f8e1a-1111-2222-3333-444455556666"}
    inputs = compiled("crusoe", "H100:8", own).selection.inputs
    assert inputs["ib_network_id"] == own["ib_network_id"] and inputs["rdma"] is True
    assert "rdma=True" in str(refused(sky.InvalidField, "crusoe", "H100:8", provider=own, rdma=False))


def test_variables_of_the_network_reach_the_workers_and_those_of_the_image_count_more() -> None:
    given = compiled("oci", "H100:8").worker.env
    assert given["NCCL_IB_GID_INDEX"] == "3" and given["NCCL_IB_HCA"].startswith("=mlx5_0,mlx5_1,mlx5_3")
    image = sky.Image(env={"NCCL_IB_HCA": "mlx5_4", "MINE": "1", "NCCL_IB_TC": sky.Secret("tc")})
    own = compiled("oci", "H100:8", image=image)
    assert own.worker.env["NCCL_IB_HCA"] == "mlx5_4" and own.worker.env["MINE"] == "1"
    assert "NCCL_IB_TC" not in own.worker.env and own.worker.secrets["NCCL_IB_TC"]
    assert compiled("oci", "H100:8", rdma=False).worker.env == {}


def test_the_other_networks_of_a_place_say_why_not() -> None:
    oci = providers.read("oci").fabrics
    gb200 = next(row for row in oci if re.match(row.machines, "BM.GPU.GB200.4"))
    assert gb200.network is None and "GPU memory cluster" in gb200.why
    roce = next(row for row in providers.read("crusoe").fabrics if re.match(row.machines, "mi355x-288gb-roce.8x"))
    assert roce.network is None and "transport partitions" in roce.why
