"""Volumes that outlive a fleet: what is declared, where, how many nodes mount it, and what is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from terraform_projects.cdk import read as document
from terraform_projects.cdk import synth

import skyinfra as sky
from skyinfra.bootstrap import steps, user_data
from skyinfra.bootstrap.files import written
from skyinfra.compiler import compile_pool, revision
from skyinfra.providers import kinds, read
from skyinfra.stack import module_inputs

EAST = sky.AWS(zones=["us-east-1a"])
CENTRAL = sky.GCP(zones=["us-central1-a"])
POD = sky.RunPod(data_centers=["EU-RO-1"])
IDS = {
    "aws": "vol-1",
    "gcp": "projects/p/zones/us-central1-a/disks/x",
    "runpod": "abc123",
    "nebius": "computefilesystem-e00a",
}
KEY = "ssh-ed25519 AAAA"
OVER_SSH = {"ssh_public_key": KEY, "allow_cidrs": ["203.0.113.0/24"]}
NORTH = sky.Nebius(project_id="project-e00a", subnet_id="vpcsubnet-e00a", **OVER_SSH)
KINDS = {"aws": EAST, "gcp": CENTRAL, "runpod": POD, "nebius": NORTH}


def volume(provider: Any = EAST, **fields: Any) -> sky.Volume:
    return sky.Volume(**{"name": "datasets", "provider": provider, "size_gb": 500, **fields})


def pool(volumes: dict[str, sky.Volume], provider: Any = EAST, **fields: Any) -> Any:
    return compile_pool(sky.ComputePool(name="p", provider=provider, accelerator="L4", volumes=volumes, **fields), "s")


def said(make: Any) -> str:
    with pytest.raises(sky.SkyinfraError) as caught:
        make()
    return " ".join(str(caught.value).split())


def test_each_place_that_has_them_says_what_it_takes() -> None:
    having = {kind for kind in kinds() if read(kind).volume is not None}
    assert having == KINDS.keys()
    for kind in kinds():
        assert ("volumes" in read(kind).lacks) is (kind not in having), kind
    for provider in KINDS.values():
        made = volume(provider).resource("Fleet_1")
        assert 500 in made.values() and made["lifecycle"]["prevent_destroy"] is True
        # Everything is filled in, and what is not declared is left out.
        assert "None" not in json.dumps(made) and not re.search(r"(?<!\$)\{[a-z_]+\}", json.dumps(made))


@pytest.mark.parametrize("kind", ["aws", "gcp", "runpod"])
def test_a_price_has_its_date(kind: str) -> None:
    described = volume(KINDS[kind]).describe()
    assert described["usd_per_month"] == {"aws": 40.0, "gcp": 50.0, "runpod": 35.0}[kind]
    assert re.search(r", 20\d\d-\d\d", described["price_note"])
    assert "usd_per_month" not in volume(KINDS[kind], size_gb=None, id=IDS[kind]).describe()


REFUSED = {
    "size_gb: is needed, or the id of a volume": {"size_gb": None},
    "expected the id of an EBS volume": {"id": "disk-1"},
    "no such kind": {"kind": "pd-ssd"},
    "an EBS volume has 1 to 16384 GB": {"size_gb": 20_000},
    "an EBS volume is in one zone": {"provider": sky.AWS()},
    'provider.zones: an EBS volume is in one zone Such as sky.AWS(zones=["us-east-1a"])': {
        "provider": sky.AWS(zones=["us-east-1a", "us-east-1b"])
    },
    "Volumes are made on AWS, Google Cloud, Nebius, RunPod": {"provider": sky.Local()},
    "detaches a data disk of Azure while its machine runs": {"provider": sky.Azure(**OVER_SSH)},
    "no disks there that outlive their machine": {"provider": sky.Vultr(**OVER_SSH)},
    "a volume of Vast.ai stays on one host": {"provider": sky.VastAI()},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_declared_wrong_is_named(message: str) -> None:
    assert message in said(lambda: volume(**REFUSED[message]))


@pytest.mark.parametrize(
    "path",
    [
        "data",
        "/",
        "/data/",
        "/data/../etc",
        "/a b",
        "/home/ubuntu",
        "/etc",
        "/tmp/x",
        "/mnt",
        "/mnt/scratch/a",
        "/var/lib/skyinfra",
    ],
)
def test_paths_of_the_system_and_those_that_tasks_do_not_see(path: str) -> None:
    assert "volumes" in said(lambda: pool({path: volume()}))


def test_a_path_within_another_and_one_volume_twice() -> None:
    assert "lies in the path of another volume" in said(
        lambda: pool({"/data": volume(), "/data/a": volume(name="other")})
    )
    assert "is mounted twice, or two have this name" in said(lambda: pool({"/a": volume(), "/b": volume()}))
    many = {f"/data{number}": volume(name=f"v{number}") for number in range(9)}
    assert "a node has at most 8" in said(lambda: pool(many))


# dstackai/dstack#1367 and #2107, BD2KGenomics/cgcloud#95: an instance in another zone than its volume.
def test_the_nodes_stand_in_the_zone_of_the_volume() -> None:
    made = pool({"/data": volume()}, sky.AWS())
    assert made.selection.inputs["zones"] == ["us-east-1a"]
    assert "is in us-east-1a, and the nodes of the pool may stand in us-east-1b" in said(
        lambda: pool({"/data": volume()}, sky.AWS(zones=["us-east-1b"]))
    )
    assert "may stand in us-east-1a, us-east-1b" in said(
        lambda: pool({"/data": volume()}, sky.AWS(zones=["us-east-1a", "us-east-1b"]))
    )
    two = {"/data": volume(), "/more": volume(sky.AWS(zones=["us-east-1b"]), name="more")}
    assert "volumes['/more']: is in us-east-1b" in said(lambda: pool(two, sky.AWS()))
    assert pool({"/data": volume(CENTRAL)}, sky.GCP()).selection.inputs["zones"] == ["us-central1-a"]


def test_a_volume_is_mounted_where_it_is() -> None:
    west = sky.AWS(region="us-west-2")
    assert "is in the region us-east-1, and the pool in us-west-2" in said(lambda: pool({"/data": volume()}, west))
    assert "is a volume of AWS, and the pool is on Google Cloud" in said(lambda: pool({"/data": volume()}, sky.GCP()))
    theirs = sky.GCP(zones=["us-central1-a"], project="theirs")
    mine = sky.GCP(project="mine")
    assert "is in the project theirs, and the pool in mine" in said(lambda: pool({"/data": volume(theirs)}, mine))
    assert "a local node is this machine as it is" in said(
        lambda: compile_pool(sky.ComputePool(name="p", provider=sky.Local(), volumes={"/data": volume()}), "s")
    )


def test_a_disk_is_attached_to_one_node() -> None:
    for more in ({"nodes": 2}, {"provider": sky.AWS(group=True)}, {"spot": True, "nodes": 3}):
        with pytest.raises(sky.NotSupported, match=r"one node|no node of a machine group"):
            pool({"/data": volume()}, **more)
    # A spot pool would fall back to other types, which makes it a group: with a volume it has one type.
    made = pool({"/data": volume()}, spot=True)
    assert len(made.selection.machine_types) == 1 and not made.selection.separate_head
    assert len(pool({}, spot=True).selection.machine_types) > 1
    # A network file system is of as many as like.
    many = compile_pool(
        sky.ComputePool(
            name="p", nodes=3, provider=POD, image=sky.Image(runner="skyinfra==0.1.0"), volumes={"/data": volume(POD)}
        ),
        "s",
    )
    assert many.selection.inputs["volumes"] == [{"name": "datasets", "id": None, "path": "/data"}]
    assert many.selection.inputs["data_centers"] == ["EU-RO-1"]


def test_machines_that_take_hyperdisks_alone() -> None:
    big = {"provider": sky.GCP(zones=["us-central1-a"], reservation="mine"), "accelerator": "B200:8"}
    made = {"name": "p", **big}
    refused = said(lambda: compile_pool(sky.ComputePool(**made, volumes={"/data": volume(CENTRAL)}), "s"))
    assert "takes no pd-balanced" in refused and "Kinds: hyperdisk-balanced" in refused
    fits = volume(CENTRAL, kind="hyperdisk-balanced")
    assert compile_pool(sky.ComputePool(**made, volumes={"/data": fits}), "s")


@pytest.mark.parametrize("machine", ["n2-standard-48", "n2d-standard-8", "e2-standard-4", "n1-standard-8"])
def test_machines_that_take_no_hyperdisks(machine: str) -> None:
    named: dict[str, Any] = {"name": "p", "provider": sky.GCP(zones=["us-central1-a"], instance_types=[machine])}
    hyperdisk = {"/data": volume(CENTRAL, kind="hyperdisk-balanced")}
    refused = said(lambda: compile_pool(sky.ComputePool(**named, volumes=hyperdisk), "s"))
    assert f"{machine} takes no hyperdisk-balanced" in refused and "Kinds: pd-balanced, pd-ssd, pd-standard" in refused
    assert compile_pool(sky.ComputePool(**named, volumes={"/data": volume(CENTRAL)}), "s")


def step_of(text: str) -> dict[str, Any]:
    document = json.loads(written(text)["/opt/skyinfra/steps.json"])
    [found] = [each for each in document["steps"] if each["operation"] == "mount"]
    return dict(found)


def test_what_reaches_the_node() -> None:
    made = pool({"/data": volume()})
    text = user_data(made).head
    found = step_of(text)
    assert found["name"] == "volume datasets" and found["arguments"] == {
        "name": "datasets",
        "mount": "/data",
        "user": "skyinfra",
        "mounted": "disk",
        "devices": ["/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{}", "/dev/xvdg"],
        "ids": "@SKYINFRA_VOLUMES@",
        "index": 0,
    }
    assert "/opt/skyinfra/first_boot/mounts.py" in written(text)
    shared = compile_pool(
        sky.ComputePool(name="p", nodes=2, provider=NORTH, accelerator="H100:8", volumes={"/data": volume(NORTH)}), "s"
    )
    for text in vars(user_data(shared)).values():
        if isinstance(text, str) and "steps.json" in text:
            found = step_of(text)["arguments"]
            assert (found["mounted"], found["devices"]) == ("virtiofs", ["skyinfra-0"])
    found = step_of(user_data(pool({"/data": volume(CENTRAL)}, CENTRAL)).head)["arguments"]
    assert found["devices"] == ["/dev/disk/by-id/google-skyinfra-0"] and found["ids"] == ""
    # Nodes without volumes have nothing of it.
    assert "mounts.py" not in str(written(user_data(pool({})).head).keys())
    assert steps.VERSION == 1


def test_what_makes_a_node_anew() -> None:
    """Volumes that come, go or move do; their size does not, nor what was declared before there were any."""
    without = revision(pool({}))
    mounted = revision(pool({"/data": volume()}))
    assert mounted != without
    assert revision(pool({"/data": volume(size_gb=900, protect=False)})) == mounted
    assert revision(pool({"/other": volume()})) != mounted
    assert "volumes" not in module_inputs(pool({}), "..")


PROGRAM = """
import {library} as lib
cloud = sky.AWS(zones=["us-east-1a"])
volume = sky.Volume(name="datasets", provider=cloud, size_gb=10)
one = lambda **more: sky.ComputePool(name="one", provider=cloud, accelerator="L4", volumes={{"/data": volume}}, **more)
{body}
app.synth()
"""


@pytest.mark.parametrize("library", ["cdktf", "cdktn"])
def test_one_stack_declares_it_and_another_mounts_it(tmp_path: Path, library: str) -> None:
    body = 'sky.FleetStack(app, "data", volumes=[volume])\nsky.FleetStack(app, "train", pools=[one()])'
    synth(tmp_path, PROGRAM.format(library=library, body=body), library)
    data, train = document(tmp_path, "data"), document(tmp_path, "train")
    made = data["resource"]["aws_ebs_volume"]["datasets"]
    assert made["lifecycle"] == {"prevent_destroy": True, "ignore_changes": ["kms_key_id"]}
    assert (made["size"], made["availability_zone"], made["provider"]) == (10, "us-east-1a", "aws.us-east-1")
    assert "module" not in data and data["//"]["skyinfra"]["pools"] == []
    assert "resource" not in train
    [given] = train["locals"]["one_volumes"]
    assert "terraform_remote_state" in given["id"] and train["module"]["one"]["volumes"] == "${local.one_volumes}"
    [mounted] = train["//"]["skyinfra"]["pools"][0]["volumes"]
    assert (mounted["path"], mounted["stack"], mounted["usd_per_month"]) == ("/data", "data", 0.8)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('sky.FleetStack(app, "train", pools=[one()])', "no stack before this one declares it"),
        (
            'sky.FleetStack(app, "data", volumes=[sky.Volume(name="datasets", provider=cloud, size_gb=11)])\n'
            'sky.FleetStack(app, "train", pools=[one()])',
            "no stack before this one declares it",
        ),
        ('sky.FleetStack(app, "f", pools=[one()], volumes=[volume])', "would be destroyed with the pools"),
        ('sky.FleetStack(app, "f", volumes=[volume, volume])', "another volume of that name"),
        ('sky.FleetStack(app, "f", volumes=[cloud])', "expected a Volume"),
        (
            'sky.FleetStack(app, "f", volumes=[sky.Volume(name="v", provider=cloud, id="vol-1")])',
            "has an id, so there is one already",
        ),
    ],
)
def test_a_stack_that_cannot_be_is_refused(tmp_path: Path, body: str, message: str) -> None:
    done = synth(tmp_path, PROGRAM.format(library="cdktf", body=body), "cdktf", check=False)
    assert done.returncode != 0 and message in " ".join(done.stderr.split()), done.stderr
