"""Marketplaces: the port of the head, which their own API says, and what a node begins with."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules import marketplaces
from cloud_modules.cases import RUNPOD, VASTAI, ModuleCase, root
from cloud_modules.marketplaces import Marketplace
from mock_provider.bed import Bed, served
from support import first_fast

CASES = {"runpod": RUNPOD, "vastai": VASTAI}
# What a head that has ended, and one without a port, says.
ENDED = {"runpod": {"status": "EXITED", "runtime": None}, "vastai": {"actual_status": "exited", "ports": None}}
UNMAPPED = {"runpod": {"runtime": {"ports": []}}, "vastai": {"ports": {}}}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> ModuleCase:
    return CASES[request.param]


@pytest.fixture
def market(case: ModuleCase, tmp_path: Path) -> Iterator[tuple[Bed, Marketplace]]:
    with served(tmp_path, *case.mock) as bed:
        case.answers(bed.world)
        assert case.api is not None
        with case.api(bed.world) as (server, variables):
            assert isinstance(server, Marketplace)
            bed.environment |= variables
            declare(bed, case)
            bed.run("init", "-no-color")
            yield bed, server


def declare(bed: Bed, case: ModuleCase, **inputs: Any) -> dict[str, str]:
    bed.write(root(case, **{"node_count": 2, "wait_seconds": 20, **inputs}), "main.tf.json")
    return {} if not list(bed.folder.glob("*.tfstate")) else bed.changes()


def starts(bed: Bed, case: ModuleCase) -> list[str]:
    """The scripts that the nodes begin with, the head's first."""
    kind = case.nodes.rstrip("\\.")
    packed = [each["env"]["SKYINFRA_START"] for each in bed.world.asked(kind)]
    return [gzip.decompress(base64.b64decode(each)).decode() for each in packed]


def test_the_head_is_found_when_it_runs_and_the_workers_begin_with_its_address(
    case: ModuleCase, market: tuple[Bed, Marketplace]
) -> None:
    bed, server = market
    server.later = 3
    bed.apply()
    fleet = bed.output("fleet")
    assert fleet["head"] == {"address": "192.0.2.1", "port": 43001}
    head, worker = starts(bed, case)
    assert "192.0.2.1:43001" in worker and "192.0.2.1" not in head
    for script in (head, worker):
        assert fleet["secret"] in script and "@SKYINFRA" not in script
    assert len(server.asked) == 4
    # It is asked once: neither a plan nor another apply asks again.
    assert bed.changes() == {} and len(server.asked) == 4
    state = (bed.folder / "terraform.tfstate").read_text()
    assert marketplaces.KEY not in state + "".join(bed.printed) and fleet["secret"] not in "".join(bed.printed)
    assert not list(bed.folder.glob(".skyinfra*"))


def test_another_head_is_another_address_and_other_workers(case: ModuleCase, market: tuple[Bed, Marketplace]) -> None:
    bed, server = market
    bed.apply()
    before = {node["name"]: node["id"] for node in bed.output("fleet")["nodes"]}
    # Its port is another one after a reset, which nobody says.
    server.moved = 7
    assert bed.changes() == {}
    bed.apply("-replace=module.train.module.market.terraform_data.found")
    fleet = bed.output("fleet")
    after = {node["name"]: node["id"] for node in fleet["nodes"]}
    assert fleet["head"]["port"] == 43008
    assert after["train-0"] == before["train-0"] and after["train-1"] != before["train-1"]
    assert ":43008" in starts(bed, case)[1]
    # Another image: everything anew.
    declare(bed, case, image="registry.example.com/other")
    bed.apply()
    assert {node["id"] for node in bed.output("fleet")["nodes"]}.isdisjoint(after.values())
    assert bed.changes() == {}


def test_a_node_keeps_its_own_key_where_it_deletes_itself(case: ModuleCase, market: tuple[Bed, Marketplace]) -> None:
    """And no other: what it begins with is not changed while it stands, for that would start it again."""
    bed, _ = market
    first = "args" if case.name == "runpod" else "onstart"
    kind = case.nodes.rstrip("\\.")
    bed.apply()
    assert all("/opt/skyinfra/rented" not in each[first] for each in bed.world.asked(kind))
    assert declare(bed, case, deletes_itself=True) == {}
    bed.destroy()
    bed.apply()
    own = {
        "runpod": '"https://rest.runpod.io/v1/pods/$RUNPOD_POD_ID" "$RUNPOD_API_KEY"',
        "vastai": '"https://console.vast.ai/api/v0/instances/$CONTAINER_ID/" "$CONTAINER_API_KEY"',
    }
    for each in bed.world.asked(kind):
        assert f'&& printf "%s %s" {own[case.name]} >/opt/skyinfra/rented && unset SKYINFRA_START' in each[first]


@pytest.mark.parametrize("status", first_fast([401, 403, 404]))
def test_a_refusal_ends_the_apply_at_once(market: tuple[Bed, Marketplace], status: int) -> None:
    bed, server = market
    server.status = status
    assert f"answers {status}" in bed.apply(code=1) and len(server.asked) == 1
    server.status = None
    bed.apply()
    assert bed.changes() == {}


def test_what_may_pass_is_asked_again(market: tuple[Bed, Marketplace]) -> None:
    bed, server = market
    server.statuses = [500, 429, 502]
    bed.apply()
    assert len(server.asked) == 4


def test_a_head_that_ends_is_said(case: ModuleCase, market: tuple[Bed, Marketplace]) -> None:
    bed, server = market
    server.changed = ENDED[case.name]
    assert "exited instead of starting" in bed.apply(code=1).lower()
    server.changed = UNMAPPED[case.name]
    declare(bed, case, wait_seconds=1)
    assert "no public port for 8786 within 1 s" in bed.apply(code=1)
    bed.destroy()
    assert bed.world.existing() == {}


def test_a_key_that_is_missing_is_said(market: tuple[Bed, Marketplace]) -> None:
    bed, _ = market
    key = next(name for name in bed.environment if name.endswith("_API_KEY"))
    bed.environment[key] = ""
    assert f"{key} is not set" in bed.apply(code=1)


def test_an_apply_that_was_cut_off_says_how_to_go_on(market: tuple[Bed, Marketplace]) -> None:
    bed, _ = market
    bed.apply("-target=module.train.module.market.terraform_data.found")
    for left in bed.folder.glob(".skyinfra*"):
        left.unlink()
    bed.run("apply", "-no-color", "-auto-approve", code=1)
    assert "-replace=module.train.module.market.terraform_data.found" in "".join(bed.printed[-1].split("\n")).replace(
        "│", ""
    )
    bed.apply("-replace=module.train.module.market.terraform_data.found")
    assert bed.changes() == {}


def test_every_pod_has_the_network_volumes(case: ModuleCase, market: tuple[Bed, Marketplace]) -> None:
    """One that comes makes the pods anew: an update would start them again at another port."""
    if case.name != "runpod":
        pytest.skip("a volume of Vast.ai stays on one host")
    bed, _ = market
    given = {"node_count": 2, "data_centers": ["EU-RO-1"]}
    declare(bed, case, **given)
    bed.apply()
    assert [pod["network_volumes"] for pod in bed.world.asked("runpod_pod")] == [None, None]
    mounted = {**given, "volumes": [{"name": "datasets", "id": "abc123", "path": "/data"}]}
    changes = declare(bed, case, **mounted)
    pods = {address: action for address, action in changes.items() if "runpod_pod." in address}
    assert len(pods) == 2 and set(pods.values()) == {"replace"}
    bed.apply()
    volumes = [pod["network_volumes"] for pod in bed.world.asked("runpod_pod")]
    assert volumes == [[{"volume_id": "abc123", "path": "/data"}]] * 2
    assert declare(bed, case, **mounted) == {}
