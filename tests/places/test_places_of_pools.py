"""The places of a pool: their order, their names, the modules that they get, and the file that says which counts."""

from __future__ import annotations

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from terraform_projects.synthesized import document_of

import skyinfra as sky
from skyinfra.compiler import compile_pools
from skyinfra.places.candidates import account
from skyinfra.places.choices import NAME, Choice, Choices, Refused


def pool(provider: Any, accelerator: Any = "H100:8", **more: Any) -> sky.ComputePool:
    return sky.ComputePool(name="t", accelerator=accelerator, provider=provider, **more)


def places(declared: sky.ComputePool, choice: Choice | None = None) -> list[tuple[str, str]]:
    [made] = compile_pools([declared], "s", {"s/t": choice} if choice else None)
    return [(each.place, each.module) for each in made.places]


def test_one_place_in_a_list_is_the_place() -> None:
    alone = document_of("s", [pool(sky.AWS())])
    assert json.dumps(document_of("s", [pool([sky.AWS()])])) == json.dumps(alone)
    assert json.dumps(document_of("s", [pool(sky.AWS(regions=["us-east-1"]))])) == json.dumps(alone)
    further = document_of("s", [pool([sky.AWS(), sky.GCP(project="p")])])
    assert further["module"] == alone["module"] and further["output"] == alone["output"]


def test_the_order_is_that_of_the_declaration() -> None:
    declared = [sky.AWS(zones=["us-east-1a", "us-east-1b"]), sky.AWS(region=["us-east-2", "us-west-2"]), sky.GCP()]
    assert places(pool(declared)) == [
        ("aws us-east-1 us-east-1a", ""),
        ("aws us-east-1 us-east-1b", "t__aws-us-east-1-us-east-1b"),
        ("aws us-east-2", "t__aws-us-east-2"),
        ("aws us-west-2", "t__aws-us-west-2"),
        ("gcp us-central1", "t__gcp-us-central1"),
    ]


def test_a_group_takes_its_zones_itself() -> None:
    declared = pool(sky.AWS(zones=["us-east-1a", "us-east-1b"], group=True))
    assert places(declared) == []


def test_accelerators_come_before_providers_and_those_that_a_provider_has_not_are_passed_over() -> None:
    found = places(pool([sky.AWS(), sky.GCP()], ["H200:8", "L40:8", "A100-80GB:8"]))
    assert {place for place, _ in found} >= {"aws us-east-1 A100:8", "gcp us-central1 A100:8"}
    assert not [place for place, _ in found if place.startswith("aws") and "L40:" in place]
    ranks = [place.split()[2] for place, _ in found]
    assert ranks == sorted(ranks, key=["H200:8", "L40:8", "A100:8"].index)


def test_places_keep_their_names_and_modules_where_a_list_of_accelerators_begins_or_ends() -> None:
    bare, full = Choice("gcp us-central1", "aws us-east-1"), Choice("gcp us-central1 H100:8", "aws us-east-1 H100:8")
    two, several = [sky.AWS(), sky.GCP()], ["H100:8", "A100-80GB:8"]
    assert places(pool(two, several), bare) == [
        ("aws us-east-1", ""),
        ("gcp us-central1", "t__gcp-us-central1"),
        ("aws us-east-1 A100:8", "t__aws-us-east-1-a100-8"),
        ("gcp us-central1 A100:8", "t__gcp-us-central1-a100-8"),
    ]
    assert places(pool(two), full) == [
        ("aws us-east-1 H100:8", ""),
        ("gcp us-central1 H100:8", "t__gcp-us-central1-h100-8"),
    ]
    # Whatever else is declared before it.
    found = places(pool(two, several[::-1]), full)
    assert found[2:] == [("aws us-east-1 H100:8", ""), ("gcp us-central1 H100:8", "t__gcp-us-central1-h100-8")]


def test_zones_and_accelerators_together() -> None:
    found = places(pool(sky.GCP(project="p", zones=["us-central1-a", "us-central1-c"]), ["H100:8", "A100-80GB:8"]))
    assert [place for place, _ in found] == [
        f"gcp us-central1 {zone} p {name}"
        for name in ("H100:8", "A100:8")
        for zone in ("us-central1-a", "us-central1-c")
    ]


def test_the_cheapest_is_by_the_offers_and_has_a_module_of_its_own() -> None:
    declared = pool(sky.cheapest([sky.GCP(), sky.AWS()]))
    assert places(declared) == [("aws us-east-1", "t__aws-us-east-1"), ("gcp us-central1", "t__gcp-us-central1")]
    # What a deploy has written keeps the place, whatever the order becomes, and whatever else is declared.
    kept = Choice("gcp us-central1", "none")
    [made] = compile_pools([declared], "s", {"s/t": kept})
    assert made.module == "t__gcp-us-central1"
    [alone] = compile_pools([pool(sky.GCP())], "s", {"s/t": kept})
    assert alone.module == "t__gcp-us-central1"


def test_a_place_keeps_its_module_in_another_order() -> None:
    before = Choice("aws us-east-1", "aws us-east-1")
    assert ("aws us-east-1", "") in places(pool([sky.GCP(), sky.AWS()]), before)


@pytest.mark.parametrize(
    ("provider", "says"),
    [
        ([], "expected at least one provider"),
        ([sky.AWS(), sky.AWS()], "the same place twice"),
        ([sky.AWS(zones=["us-east-1a"]), sky.AWS(zones=["us-east-1a", "us-east-1b"])], "the same place twice"),
        ([sky.AWS(), sky.Local(simulate=True)], "and nothing simulated"),
        ([sky.AWS(), sky.SSH(hosts=["gpu1"])], "only clouds, containers and this machine"),
        ([sky.Container(), sky.Container()], "the same place twice"),
        ([sky.AWS(provider="aws.lab"), sky.AWS(provider="aws.lab")], "the same place twice"),
        ([sky.AWS(), "gcp"], r"provider\[1\]: expected a provider"),
        ([sky.AWS(), sky.GCP(region="us-west9")], r"provider\[1\]"),
    ],
)
def test_what_is_no_list_of_places_is_refused(provider: Any, says: str) -> None:
    with pytest.raises(sky.DeclarationError, match=says):
        compile_pools([pool(provider)], "s")


AZURE: dict[str, Any] = {"ssh_public_key": f"ssh-ed25519 {'A' * 68}", "allow_cidrs": ["203.0.113.7/32"]}
OCI = {"compartment_id": "ocid1.compartment.oc1..aaaaexample", "image": "ocid1.image.oc1..b", **AZURE}


def test_what_differs_by_a_zone_or_an_account_of_another_name_are_two_places() -> None:
    zones = [sky.Azure(zone=zone, **AZURE) for zone in ("1", "2")]
    assert places(pool(zones)) == [("azure eastus", ""), ("azure eastus 2", "t__azure-eastus-2")]
    domains = [sky.OCI(availability_domain=f"Uocm:PHX-AD-{each}", **OCI) for each in (1, 2)]
    assert [place for place, _ in places(pool(domains))] == [
        "oci us-phoenix-1",
        "oci us-phoenix-1 Uocm:PHX-AD-2 aexample",
    ]
    of = [sky.Azure(subscription_id=f"00000000-0000-0000-0000-{each:012}", **AZURE) for each in (1, 2)]
    assert [place for place, _ in places(pool(of))] == ["azure eastus", "azure eastus 00000002"]
    assert [account(each) for each in of] == [each.subscription_id for each in of]
    own = [sky.AWS(provider="aws.research"), sky.AWS(provider="aws.lab")]
    assert [place for place, _ in places(pool(own))] == ["aws us-east-1", "aws us-east-1 aws.lab"]


def test_own_machines_are_places_too() -> None:
    own = [sky.Container(host="ssh://me@gpu1"), sky.Container(host="ssh://me@gpu2"), sky.Local(), sky.AWS()]
    found = compile_pools([pool(own)], "s")[0].places
    assert [(each.place, each.module) for each in found] == [
        ("container ssh://me@gpu1", ""),
        ("container ssh://me@gpu2", "t__container-ssh-me-gpu2"),
        ("local", "t__local"),
        ("aws us-east-1", "t__aws-us-east-1"),
    ]


def test_no_place_is_dearer_than_is_declared() -> None:
    with pytest.raises(sky.NotOffered, match=r"provider\[1\]"):
        compile_pools([pool([sky.AWS(), sky.GCP()], max_hourly_cost=60)], "s")


def test_a_volume_in_one_zone_and_places_in_several_are_refused() -> None:
    volume = sky.Volume(name="v", provider=sky.AWS(zones=["us-east-1a"]), size_gb=9)
    with pytest.raises(sky.DeclarationError, match="volumes"):
        compile_pools([pool([sky.AWS(zones=["us-east-1a"]), sky.GCP()], volumes={"/data": volume})], "s")
    with pytest.raises(sky.DeclarationError, match="is in us-east-1a"):
        compile_pools([pool(sky.AWS(zones=["us-east-1a", "us-east-1b"]), volumes={"/data": volume})], "s")


def test_a_with_block_has_one_place() -> None:
    with pytest.raises(sky.NotSupported, match="a `with` block is deployed at one place"), pool([sky.AWS(), sky.GCP()]):
        pass


def test_the_file_of_choices(tmp_path: Path) -> None:
    refused = Refused("aws us-east-1", "2026-11-26T05:00:00+00:00", "CapacityUnavailable", {"provider": "aws"})
    made = Choices.read(tmp_path).having("s/t", Choice("gcp us-central1", "aws us-east-1", (refused,)))
    assert Choices.read(tmp_path) == made
    made.without("s")
    assert Choices.read(tmp_path).of("s/t") == Choice(refused=(refused,))
    Choices.read(tmp_path).having("s/t", Choice())
    assert not (tmp_path / NAME).exists() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1, "fleets": {"s/t": {"place": 3}}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(sky.InvalidField, match=NAME):
        Choices.read(tmp_path)


def test_a_place_that_is_not_declared_is_refused() -> None:
    with pytest.raises(sky.InvalidField, match="names a place that the pool has not"):
        places(pool([sky.AWS(), sky.GCP()]), Choice("aws us-east-9"))


def test_a_choice_that_another_command_has_written_meanwhile_stays(tmp_path: Path) -> None:
    first = Choices.read(tmp_path)
    Choices.read(tmp_path).having("b/t", Choice("gcp us-central1", "aws us-east-1", nodes=3))
    made = first.having("a/t", Choice("aws us-east-2", "aws us-east-1"))
    found = Choices.read(tmp_path)
    assert found.of("b/t") == Choice("gcp us-central1", "aws us-east-1", nodes=3)
    assert found.of("a/t") == made.of("a/t") == Choice("aws us-east-2", "aws us-east-1")
    # Of the last one that is removed, too.
    first.having("a/t", Choice())
    assert Choices.read(tmp_path).fleets == {"b/t": found.of("b/t")}


def test_choices_that_many_commands_write_at_once_all_stay(tmp_path: Path) -> None:
    old = Choices.read(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: old.having(f"s{n}/t", Choice(nodes=n)), range(1, 41)))
    assert {name: each.nodes for name, each in Choices.read(tmp_path).fleets.items()} == {
        f"s{n}/t": n for n in range(1, 41)
    }


def test_choices_that_cannot_be_written_leave_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Choices.read(tmp_path).having("s/t", Choice(nodes=2))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        Choices.read(tmp_path).having("s/t", Choice(nodes=3))
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
    assert Choices.read(tmp_path).of("s/t").nodes == 2
