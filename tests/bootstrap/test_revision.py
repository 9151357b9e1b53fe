"""What a node is replaced for: what is declared and reaches it, and nothing of the machine that deploys."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

import skyinfra as sky
from skyinfra.bootstrap import runner_wheel, user_data
from skyinfra.compiler import compile_pool, revision
from skyinfra.engine.credentials import Credentials
from skyinfra.pool import ComputePool, Image, Worker

CERTIFICATE = Credentials.derive("0123456789abcdef" * 2, role="client", name="x").ca
CPU = {"accelerator": None}


def of(provider: dict[str, Any], image: dict[str, Any], worker: dict[str, Any], pool: dict[str, Any]) -> str:
    parts = {"provider": sky.AWS(**provider), "image": Image(**image), "worker": Worker(**worker)}
    stack = pool.get("stack", "s")
    return revision(compile_pool(ComputePool(**{"name": "p", "accelerator": "H100:8", **parts, **pool}), stack))


# Every field: what it is changed to, with what else is declared before and after, and whether nodes are replaced.
Table = dict[str, list[tuple[Any, dict[str, Any], bool]]]
IMAGE: Table = {
    "python": [("3.12", {}, True)],
    "pip": [(["torch"], {}, True)],
    "apt": [(["git"], {}, True)],
    "env": [({"A": "b"}, {}, True)],
    "run": [(["true"], {}, True)],
    "preload": [(["torch"], {}, True)],
    "runner": [("skyinfra==9", {}, True)],
    "index": [("https://pypi.example.com/simple", {}, True)],
    "extra_indexes": [(["https://pypi.example.com/simple"], {}, True)],
    "wheelhouse": [("/wheels", {}, True)],
    "proxy": [("http://proxy:3128", {}, True)],
    "ca_certificate": [(CERTIFICATE, {}, True)],
}
WORKER: Table = {
    "concurrency": [(8, {}, False), (4, CPU, True)],
    "executor": [("process", {}, False)],
    "drain_seconds": [(5, {}, True)],
}
SUBNETS = {"vpc_id": "vpc-1", "subnet_ids": ["subnet-1"]}
POOL: Table = {
    "provider": [],  # below
    "accelerator": [
        ("H100:8/3g.40gb", {}, False),
        ("H100!:8", {}, False),
        ("H100-SXM:8", {}, False),
        (["H100:8", "A100:8"], {}, False),
        ("A100:8", {}, True),
        ("A100-40GB:8", {"accelerator": "A100:8"}, True),
        ("H100:1", {}, True),
        (None, {}, True),
    ],
    "name": [("q", {}, False)],
    "nodes": [(3, {}, False), (sky.Range(0, 8), {}, True), (sky.Range(0, 8), {"nodes": sky.Range(2, 4)}, False)],
    "idle_seconds": [(900.0, {"nodes": sky.Range(0, 8)}, True)],
    "image": [],
    "worker": [],
    "plugins": [([sky.plugins.mig("3g.40gb")], {}, False), ([sky.plugins.torch()], {}, True)],
    "spot": [(True, {}, False)],
    "vcpus": [(8, {}, False)],
    "memory_gb": [(64, {}, False)],
    "disk_gb": [(500, {}, False)],
    "max_hourly_cost": [(500, {}, False)],
    "budget": [(sky.Budget(usd=200), {}, False)],
    "rdma": [(True, {}, False)],
    "stop_after_idle": [("30m", {}, False)],
    "max_lifetime": [("12h", {}, False)],
    "replace_sick": [(True, {"nodes": 2}, False)],
    "labels": [({"team": "ml"}, {}, False)],
    "stack": [("t", {}, False)],
    "volumes": [({"/data": sky.Volume(name="v", provider=sky.AWS(zones=["us-east-1a"]), size_gb=9)}, {}, True)],
    "mounts": [([sky.Mount("s3://my-bucket/data", "/data")], {}, True)],
    # Its tag carries one layout; a machine that gets its configuration anew is not replaced for it, see below.
    "layout": [(sky.mig.Follow(["7g.80gb"]), {}, True)],
    # Each place has a module of its own.
    "places": [(sky.cheapest([sky.AWS(), sky.GCP()]), {}, False)],
}
# The module replaces nodes for some of these, by itself: another machine, another image, another network.
PROVIDER: Table = {
    "account_id": [("123456789012", {}, False)],
    "region": [("us-west-2", {}, False)],
    "regions": [(["us-east-1", "us-west-2"], {}, False)],
    "zones": [(["us-east-1a"], {}, False)],
    "profile": [("research", {}, False)],
    "instance_types": [(["p5.48xlarge"], {}, False)],
    "head_instance_type": [("m6i.xlarge", {}, False)],
    "vpc_id": [("vpc-1", {"subnet_ids": ["subnet-1"]}, False)],
    "subnet_ids": [(["subnet-1"], {}, False)],
    "security_group_ids": [(["sg-1"], SUBNETS, False)],
    "head_public_ip": [(True, SUBNETS, False)],
    "allow_cidrs": [(["203.0.113.7/32"], {}, False)],
    "ssh_public_key": [("ssh-ed25519 AAAA", {}, False)],
    "iam_instance_profile": [("mine", {}, False)],
    "ami": [("ami-1", {}, False)],
    "capacity": [(sky.CapacityReservation(id="cr-1"), {}, False)],
    "spot_max_price": [(5.0, {"spot": True}, False)],
    "efa": [(True, {}, False)],
    "placement_group": [(True, {}, False)],
    "group": [(True, {}, False)],
    "iam_path": [("/x/", {}, False)],
    "permissions_boundary": [("arn:aws:iam::1:policy/x", {}, False)],
    "kms_key_id": [("arn:aws:kms:us-east-1:1:key/x", {}, False)],
    "head_volume_gb": [(40, {}, False)],
}
TABLES: dict[str, tuple[Any, Table]] = {
    "provider": (sky.AWS, PROVIDER),
    "image": (Image, IMAGE),
    "worker": (Worker, WORKER),
    "pool": (ComputePool, POOL),
}


def changes() -> Iterator[Any]:
    for part, (_, table) in TABLES.items():
        for field, rows in table.items():
            for value, given, replaces in rows:
                yield pytest.param(part, field, value, given, replaces, id=f"{part}.{field}={value!r}"[:60])


@pytest.mark.parametrize("part", TABLES)
def test_the_table_has_every_field(part: str) -> None:
    model, table = TABLES[part]
    # A provider block of the stack's own is a construct, see tests/test_neighbours.py.
    assert {*table, "provider"} == {*model.model_fields, "provider"}


@pytest.mark.parametrize(("part", "field", "value", "given", "replaces"), changes())
def test_what_replaces_a_node(part: str, field: str, value: Any, given: dict[str, Any], replaces: bool) -> None:
    declared: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    for name, each in given.items():
        declared["pool" if name in POOL else part][name] = each
    changed = {name: dict(fields) for name, fields in declared.items()}
    changed[part][field] = value
    assert (of(**declared) != of(**changed)) == replaces


def test_layouts_that_follow_the_work_reach_machines_whose_configuration_is_written_anew() -> None:
    fields: dict[str, Any] = {"provider": sky.SSH(hosts=["gpu1"]), "accelerator": "H100:8"}
    layout = sky.mig.Follow(["7g.80gb"])
    plain, follows = (compile_pool(ComputePool(**fields, layout=each), "s") for each in (None, layout))
    assert revision(plain) == revision(follows)
    assert follows.head.follow == layout


def test_what_is_declared_at_its_default_is_as_good_as_not_declared() -> None:
    said: dict[str, Any] = {"pip": [], "env": {}, "python": None}
    assert of({}, {}, {}, {}) == of({}, said, {"drain_seconds": 600}, {"plugins": []})


def test_the_machine_that_deploys_replaces_nothing_and_changes_no_user_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A colleague's environment: another Python, other packages, another version of skyinfra with other code."""
    pools = [
        ComputePool(name="p", provider=sky.AWS(), accelerator="L4", nodes=2, spot=spot, image=Image(**image))
        for spot in (False, True)
        for image in ({"pip": ["torch"]}, {"runner": "skyinfra==9"})
    ]
    here = [user_data(compile_pool(pool, "s")) for pool in pools]
    found = metadata.version
    caches = (runner_wheel.version_of, runner_wheel.wheel)
    monkeypatch.setattr(metadata, "version", lambda name: "3.1.1" if name == "cloudpickle" else found(name))
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "99", "1"))
    monkeypatch.setattr("skyinfra.__version__", "9.9.9")
    for cache in caches:
        cache.cache_clear()
    try:
        there = [user_data(compile_pool(pool, "s")) for pool in pools]
        # The code is another.
    finally:
        for cache in caches:
            cache.cache_clear()
    for mine, theirs in zip(here, there, strict=True):
        assert mine.revision == theirs.revision is not None
        assert (mine.head, mine.worker) == (theirs.head, theirs.worker)
        # It travels as data, which the module takes for a fleet that it makes.
        assert theirs.versions is not None and theirs.versions != mine.versions
        assert theirs.versions["python"] == "3.99"
        assert mine.versions is not None and theirs.versions["requirements"] == mine.versions["requirements"]


def test_steps_and_templates_of_another_version_replace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = compile_pool(ComputePool(name="p", provider=sky.AWS(), accelerator="L4"), "s")
    before = user_data(deployment)
    monkeypatch.setattr("skyinfra.bootstrap.steps._GROUPS", ("video",))
    after = user_data(deployment)
    assert before.head != after.head and before.revision == after.revision
