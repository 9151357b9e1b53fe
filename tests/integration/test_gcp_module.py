"""modules/gcp besides the contract of all modules: what reaches the nodes, accounts, names and mounts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import of_project
from cloud_modules.gcp import GOOGLE, GROUP, INSTANCE, TEMPLATE, declare, google, instances, long_runner, refused
from mock_provider.bed import Bed
from mock_provider.world import Failure

from skyinfra.terraform.program import Terraform


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with google(tmp_path) as made:
        yield made


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    return long_runner(tmp_path)


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
