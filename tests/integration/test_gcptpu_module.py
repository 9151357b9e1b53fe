"""modules/gcptpu: the life of a fleet of TPU slices, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import gcp_answers
from mock_provider.bed import Bed, served
from support import ROOT, module_source

from skyinfra.offers import load
from skyinfra.protocol.manifest import Manifest
from skyinfra.providers import read

SLICE, INSTANCE = "google_tpu_v2_vm", "google_compute_instance"
DATA = "#!/bin/sh\n# @SKYINFRA_NODE@ @SKYINFRA_HEAD@ @SKYINFRA_BUCKET@/secret\n"
PROVIDERS = ("google", "google-beta")
INPUTS: dict[str, Any] = {
    "name": "train",
    "machine_types": ["v5litepod-4"],
    "image": "v2-alpha-tpuv5-lite",
    "zones": ["us-central1-a"],
    "user_data_head": f"{DATA}# @SKYINFRA_VOLUME@\n",
    "user_data_worker": DATA,
    "user_data_revision": "1",
    "versions": {"python": "3.12", "requirements": []},
}


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with served(tmp_path, *PROVIDERS) as made:
        gcp_answers(made.world)
        yield made


def declare(bed: Bed, **inputs: Any) -> dict[str, str]:
    """What a plan would do, in the module."""
    first = not (bed.folder / ".terraform").exists()
    place = {"project": "p", "region": "us-central1"}
    sources = {name: {"source": f"registry.terraform.io/hashicorp/{name}"} for name in PROVIDERS}
    root = {
        "terraform": {"required_providers": sources},
        "provider": {name: {"alias": "there", **place} for name in PROVIDERS},
        "module": {
            "train": {
                "source": module_source("gcptpu"),
                "providers": {name: f"{name}.there" for name in PROVIDERS},
                **INPUTS,
                **inputs,
            }
        },
        "output": {
            "fleet": {"value": "${module.train.fleet}", "sensitive": True},
            "slices": {"value": "${module.train.slices}"},
        },
    }
    bed.write(json.dumps(root), "main.tf.json")
    if first:
        bed.run("init", "-no-color")
    return {address.removeprefix("module.train."): action for address, action in bed.changes().items()}


def test_the_life_of_a_fleet(bed: Bed, tmp_path: Path) -> None:
    runner = tmp_path / "skyinfra-0.1.0-py3-none-any.whl.bz2"
    runner.write_bytes(b"runner")
    given = {"node_count": 2, "runner_file": str(runner), "labels": {"team": "a"}}
    assert set(declare(bed, **given).values()) == {"create"}
    bed.apply()
    assert declare(bed, **given) == {}
    fleet = bed.output("fleet")
    manifest = Manifest.read(fleet)
    assert [node.name for node in manifest.nodes] == ["train-head"] and manifest.group_nodes == 2
    assert manifest.via is not None and manifest.via.kind == "iap"
    slices = {each["labels"]["skyinfra-node"]: each for each in bed.world.asked(SLICE)}
    assert set(slices) == {"train-0", "train-1"}
    first = slices["train-0"]
    assert (first["accelerator_type"], first["runtime_version"]) == ("v5litepod-4", "v2-alpha-tpuv5-lite")
    assert first["scheduling_config"] == []
    assert first["metadata"]["skyinfra-secret"] == fleet["secret"]
    assert first["metadata"]["skyinfra-skyinfra-0-1-0-py3-none-any-whl-bz2-0"]
    assert first["metadata"]["startup-script"].startswith("#!/bin/sh\n# train-0 10.84.0.")
    # Other user data with the same revision, and another version of skyinfra, change nothing.
    runner.write_bytes(b"other")
    assert declare(bed, **given, user_data_worker="#!/bin/sh\n# b\n", user_data_head="#!/bin/sh\n# b\n") == {}
    grown = declare(bed, **{**given, "node_count": 3})
    assert grown == {f'{SLICE}.slice["train-2"]': "create"}
    shrunk = declare(bed, **{**given, "node_count": 1})
    assert shrunk == {f'{SLICE}.slice["train-1"]': "delete"}
    labelled = declare(bed, **{**given, "labels": {"team": "b"}})
    assert set(labelled.values()) == {"update"}
    replaced = declare(bed, **given, user_data_revision="2")
    nodes = [
        f'module.google.{INSTANCE}.node["train-head"]',
        *(f'{SLICE}.slice["train-{number}"]' for number in range(2)),
    ]
    assert {address: replaced[address] for address in nodes} == dict.fromkeys(nodes, "replace")
    spot = declare(bed, **given, spot=True)
    assert spot == dict.fromkeys(nodes[1:], "replace")
    declare(bed, **given)
    upgraded = bed.changes("-replace=module.train.module.google.terraform_data.runner[0]")
    assert {upgraded[f"module.train.{address}"] for address in nodes} == {"update"}
    bed.destroy()
    assert bed.world.existing() == {}
    assert not any(fleet["secret"] in each for each in bed.printed)


def test_a_slice_has_its_network_by_the_name_that_google_answers(bed: Bed) -> None:
    network, subnetwork = "projects/p/global/networks/n", "projects/p/regions/us-central1/subnetworks/n"
    address = "https://www.googleapis.com/compute/v1/"
    bed.world.answer("google_compute_network", {"self_link": address + network})
    bed.world.answer("google_compute_subnetwork", {"self_link": address + subnetwork})
    bed.world.answer("data.google_compute_subnetwork", {"network": f"{address}projects/p/global/networks/mine"})
    declare(bed)
    bed.apply()
    (asked,) = bed.world.asked(SLICE)
    [given] = asked["network_config"]
    assert (given["network"], given["subnetwork"]) == (network, subnetwork)
    # One that was made with the addresses stays as it is, until its network itself is another.
    (made,) = bed.world.existing(SLICE).values()
    made["network_config"][0] |= {"network": address + network, "subnetwork": address + subnetwork}
    bed.world.put(SLICE, 1, made, asked)
    assert declare(bed) == {}
    mine = "projects/p/regions/us-central1/subnetworks/mine"
    assert declare(bed, subnetwork=address + mine)[f'{SLICE}.slice["train-0"]'] == "replace"
    bed.apply()
    [given] = bed.world.asked(SLICE)[0]["network_config"]
    assert (given["network"], given["subnetwork"]) == ("projects/p/global/networks/mine", mine)


def test_the_hosts_of_a_slice(bed: Bed) -> None:
    addresses = [{"ip_address": f"10.84.0.1{n}", "port": 8470, "access_config": []} for n in range(8)]
    bed.world.answer(SLICE, {"network_endpoints": addresses})
    given = {"machine_types": ["v4-64"], "image": "tpu-ubuntu2204-base", "zones": ["us-central2-b"], "hosts": 8}
    slots = [{"index": 0, "kind": "host", "accelerator": "TPUv4-64"}]
    created = declare(bed, **given, slots=slots)
    assert set(created.values()) == {"create"} and sum(SLICE in address for address in created) == 1
    bed.apply()
    assert declare(bed, **given, slots=slots) == {}
    manifest = Manifest.read(bed.output("fleet"))
    assert (manifest.group_nodes, manifest.node_count, [slot.kind for slot in manifest.slots]) == (8, 8, ["host"])
    (made,) = bed.world.asked(SLICE)
    assert (made["name"].rpartition("-")[0], made["accelerator_type"]) == ("train-0", "v4-64")
    # All hosts have one text, with the name of the slice.
    assert made["metadata"]["startup-script"].startswith("#!/bin/sh\n# train-0 10.84.0.")
    assert bed.output("slices") == {"train-0": [each["ip_address"] for each in addresses]}
    bed.destroy()
    assert bed.world.existing() == {}


def test_a_slice_that_was_taken_back_is_named_with_what_brings_it_back(bed: Bed) -> None:
    given = {"spot": True, "node_count": 2}
    declare(bed, **given)
    bed.apply()
    # Google keeps a spot slice that it took back, and the provider finds it.
    [(asked, made)] = zip(bed.world.asked(SLICE)[1:], list(bed.world.existing(SLICE).values())[1:], strict=True)
    bed.world.put(SLICE, 2, made | {"state": "PREEMPTED"}, asked)
    taken = made["labels"]["skyinfra-node"]
    with pytest.raises(AssertionError, match="was taken back") as caught:
        declare(bed, **given)
    again = f"-replace='module.train.{SLICE}.slice[\"{taken}\"]'"
    assert again.replace("module.train", "module.NAME") in caught.value.args[0].replace("\\", "")
    assert bed.changes(again.replace("'", "")) == {f'module.train.{SLICE}.slice["{taken}"]': "replace"}
    bed.destroy()
    assert bed.world.existing() == {}


@pytest.mark.parametrize(
    ("message", "inputs"),
    [
        ("user_data_worker: needed", {"user_data_worker": ""}),
        ("machine_types: one accelerator type", {"machine_types": ["v5litepod-4", "v4-8"]}),
        ("machine_types: one accelerator type", {"machine_types": ["n1-standard-8"]}),
        ("zones: at least one zone", {"zones": []}),
        ("node_count: a slice of 2 hosts is a fleet of its own", {"hosts": 2, "node_count": 2}),
        ("hosts: a whole number", {"hosts": 0}),
    ],
)
def test_what_is_refused_says_what_would_work(bed: Bed, message: str, inputs: dict[str, Any]) -> None:
    with pytest.raises(AssertionError) as caught:
        declare(bed, **inputs)
    assert message in str(caught.value)


def test_what_its_readme_shows_is_valid(bed: Bed) -> None:
    text = (ROOT / "modules" / "gcptpu" / "README.md").read_text()
    [shown] = [each.partition("```")[0] for each in text.split("```hcl\n")[1:]]
    for name in ("head.sh", "worker.sh"):
        bed.write("#!/bin/sh\n", name)
    bed.write(shown.replace("./modules/gcptpu", module_source("gcptpu")))
    bed.run("init", "-no-color")
    bed.run("validate", "-no-color")
    bed.run("fmt", "-check", "-recursive", str(ROOT / "modules" / "gcptpu"))


def test_every_slice_has_a_runtime_version_and_zones() -> None:
    machines = read("gcptpu").machines
    for offer in load():
        if offer.provider == "gcp" and offer.vendor == "google":
            generation = offer.machine_type.partition("-")[0]
            if generation == "tpu7x":  # the Cloud TPU API has none: it is refused by name
                continue
            known = {zone.rpartition("-")[0] for zone in machines["zones"][generation]}
            assert known & set(offer.regions), offer.machine_type
