"""Changed accounts, regions, projects: what the state has and the declaration, one changed at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.deploy.places import accounts, kept_in_place, refuse_gone, refuse_moved
from skyinfra.errors import PlaceChanged, SkyinfraError, WrongAccount
from skyinfra.terraform.program import Plan
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9Z9 me"
SUBSCRIPTION, OTHER = (f"0000000{n}-0000-0000-0000-000000000000" for n in (1, 2))
HOSTED: dict[str, Any] = {"ssh_public_key": KEY, "allow_cidrs": ["203.0.113.7/32"]}
OCI: dict[str, Any] = {
    **HOSTED,
    "compartment_id": "ocid1.compartment.oc1..a",
    "availability_domain": "Uocm:PHX-AD-1",
    "image": "ocid1.image.oc1.phx.a",
}


def of(type: str, name: str, source: str, alias: str, **attributes: Any) -> Resource:
    provider = f'provider["registry.terraform.io/{source}"].{alias}'
    return Resource("train", type, name, provider, attributes)


def aws(type: str = "aws_instance", *, alias: str = "us-east-1", region: str = "us-east-1", **more: Any) -> Resource:
    arn = f"arn:aws:ec2:{region}:111111111111:instance/i-1"
    return of(type, "head", "hashicorp/aws", alias, **{"arn": arn, "instance_type": "g6.xlarge", **more})


def google(zone: str = "us-central1-a", project: str = "mine", alias: str = "us-central1") -> Resource:
    return of("google_compute_instance", "node", "hashicorp/google", alias, zone=zone, project=project)


def azure(alias: str = "this") -> Resource:
    id = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/a/providers/Microsoft.Compute/virtualMachines/b"
    return of("azurerm_linux_virtual_machine", "node", "hashicorp/azurerm", alias, id=id)


def oci(alias: str = "us-phoenix-1") -> Resource:
    return of("oci_core_instance", "node", "oracle/oci", alias, region="phx", id="ocid1.instance.oc1.phx.a")


def crusoe(alias: str = "one", project_id: str = "0") -> Resource:
    return of("crusoe_compute_instance", "node", "crusoecloud/crusoe", alias, project_id=project_id)


def stack(folder: Path, provider: Any, name: str = "train") -> SynthesizedStack:
    # Crusoe has no machines without accelerators.
    accelerator = "L40S" if isinstance(provider, sky.Crusoe) else None
    return synthesized(folder, sky.ComputePool(name=name, provider=provider, accelerator=accelerator), name="fleet")


MOVED = [
    (sky.AWS(region="us-west-2"), aws(), "region", "us-east-1"),
    (sky.AWS(region="us-west-2", profile="research"), aws(alias="us-east-1_research"), "region", "us-east-1"),
    (sky.AWS(account_id="222222222222"), aws(), "account_id", "111111111111"),
    (sky.GCP(region="europe-west4"), google(), "region", "us-central1"),
    (sky.GCP(project="yours"), google(), "project", "mine"),
    (sky.Azure(subscription_id=OTHER, **HOSTED), azure(), "subscription_id", SUBSCRIPTION),
    (sky.GCP(region="europe-west4"), google("us-central1-ai1a"), "region", "us-central1"),
    (sky.OCI(region="us-ashburn-1", **OCI), oci(), "region", "us-phoenix-1"),
    (sky.OCI(region="us-ashburn-1", **OCI), oci("us-gov-phoenix-1"), "region", "us-gov-phoenix-1"),
    (sky.Crusoe(project="two", **HOSTED), crusoe(), "project", "one"),
    (sky.Crusoe(project=OTHER, **HOSTED), crusoe("this", SUBSCRIPTION), "project_id", SUBSCRIPTION),
]


@pytest.mark.parametrize(("provider", "resource", "field", "there"), MOVED)
def test_a_pool_in_another_place_is_refused(
    tmp_path: Path, provider: Any, resource: Resource, field: str, there: str
) -> None:
    # hashicorp/terraform-provider-aws#6731, #11052, #32810: "state gets lost when changing the region".
    with pytest.raises(SkyinfraError) as caught:
        refuse_moved(stack(tmp_path, provider), [resource])
    said = str(caught.value)
    assert isinstance(caught.value, WrongAccount if field == "account_id" else PlaceChanged)
    assert f"train.provider.{field}" in said and f"the pool has 1 machine in {there}" in said
    assert "Destroy them first: skyinfra destroy fleet" in said and "another name" in said


def test_a_resource_that_is_no_machine_is_not_forgotten_either(tmp_path: Path) -> None:
    with pytest.raises(PlaceChanged, match="the pool has 1 resource in us-east-1"):
        refuse_moved(stack(tmp_path, sky.AWS(region="us-west-2")), [aws("aws_vpc")])


SAME = [
    (sky.AWS(), aws()),
    (sky.AWS(profile="other"), aws()),
    (sky.AWS(account_id="111111111111"), aws()),
    (sky.AWS(), aws("aws_iam_role", arn="arn:aws:iam::111111111111:role/a")),
    (sky.AWS(), aws("aws_s3_bucket", arn="arn:aws:s3:::a")),
    (sky.GCP(), google()),
    (sky.GCP(), google("us-central1-ai1a", alias="another")),
    (sky.GCP(project="mine"), google()),
    (sky.Azure(subscription_id=SUBSCRIPTION, **HOSTED), azure()),
    (sky.Azure(**{**HOSTED, "region": "westeurope"}), azure()),
    (sky.OCI(**OCI), oci()),
    (sky.Crusoe(**HOSTED), crusoe("this")),
    (sky.Crusoe(project=OTHER, **HOSTED), crusoe(OTHER, OTHER)),
    # Which id a name has, the provider alone knows.
    (sky.Crusoe(project="two", **HOSTED), crusoe("two", SUBSCRIPTION)),
]


@pytest.mark.parametrize(("provider", "resource"), SAME)
def test_what_moves_nothing_is_not_refused(tmp_path: Path, provider: Any, resource: Resource) -> None:
    refuse_moved(stack(tmp_path, provider), [resource])


AMBIENT = [
    (sky.GCP(), google(), "GOOGLE_CLOUD_PROJECT", "yours", "mine"),
    (sky.Azure(**HOSTED), azure(), "ARM_SUBSCRIPTION_ID", OTHER, SUBSCRIPTION),
    (sky.Crusoe(**HOSTED), crusoe("this", SUBSCRIPTION), "CRUSOE_DEFAULT_PROJECT", OTHER, SUBSCRIPTION),
]


@pytest.mark.parametrize(("provider", "resource", "variable", "other", "same"), AMBIENT)
def test_a_variable_of_the_environment_that_names_another_place_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: Any,
    resource: Resource,
    variable: str,
    other: str,
    same: str,
) -> None:
    made = stack(tmp_path, provider)
    monkeypatch.setenv(variable, same)
    refuse_moved(made, [resource])
    monkeypatch.setenv(variable, other)
    with pytest.raises(PlaceChanged, match=f"in {same}:"):
        refuse_moved(made, [resource])


def written(made: SynthesizedStack) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((made.folder / "cdk.tf.json").read_text())
    return document


def test_the_provider_compares_the_account_of_the_state_with_its_credentials(tmp_path: Path) -> None:
    made = stack(tmp_path, sky.AWS())
    before = written(made)
    with kept_in_place(made, [aws(), aws("aws_vpc")], destroy=False):
        [block] = written(made)["provider"]["aws"]
        assert block == {**before["provider"]["aws"][0], "allowed_account_ids": ["111111111111"]}
    assert written(made) == before
    # skypilot-org/skypilot#2646: the account itself is gone.
    with kept_in_place(made, [aws()], destroy=True, gone=True):
        assert written(made) == before
    assert accounts([aws(), aws("aws_vpc"), oci()]) == (
        "The resources of the stack are in the account_id 111111111111."
    )
    made = stack(tmp_path, sky.Azure(**HOSTED))
    with kept_in_place(made, [azure()], destroy=False):
        [block] = written(made)["provider"]["azurerm"]
        assert block["subscription_id"] == SUBSCRIPTION


def test_a_declared_account_is_left_as_it_is(tmp_path: Path) -> None:
    made = stack(tmp_path, sky.AWS(account_id="222222222222"))
    with kept_in_place(made, [aws()], destroy=False):
        assert [each["allowed_account_ids"] for each in written(made)["provider"]["aws"]] == [["222222222222"]]


@pytest.mark.parametrize("argument", [{"forbidden_account_ids": ["9"]}, {"skip_requesting_account_id": True}])
def test_a_block_whose_arguments_bear_no_account_is_left_as_it_is(tmp_path: Path, argument: dict[str, Any]) -> None:
    made = stack(tmp_path, sky.AWS())
    document = written(made)
    document["provider"]["aws"][0] |= argument
    (made.folder / "cdk.tf.json").write_text(json.dumps(document))
    with kept_in_place(made, [aws()], destroy=False):
        assert written(made)["provider"] == document["provider"]


def test_a_destroy_uses_the_provider_that_made_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # hashicorp/terraform-provider-aws#15260: "destroy removes ec2 instance from local state without comparing the
    # region".
    config = tmp_path / "config"
    config.write_text("[profile research]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    made = stack(tmp_path, sky.AWS(region="us-west-2", profile="prod"))
    with kept_in_place(made, [aws(alias="us-east-1_research")], destroy=True):
        document = written(made)
    assert document["module"]["train"]["providers"] == {"aws": "aws.us-east-1_research"}
    [former] = [each for each in document["provider"]["aws"] if each["alias"] == "us-east-1_research"]
    assert (former["region"], former["profile"]) == ("us-east-1", "research")
    assert former["allowed_account_ids"] == ["111111111111"]
    # A profile that was renamed since: the region alone.
    config.write_text("")
    with kept_in_place(made, [aws(alias="us-east-1_research")], destroy=True):
        assert all(each.get("profile") in (None, "prod") for each in written(made)["provider"]["aws"])


def test_a_pool_that_is_not_declared_any_more_keeps_its_provider(tmp_path: Path) -> None:
    made = stack(tmp_path, sky.AWS(region="us-west-2"), name="west")
    with kept_in_place(made, [aws()], destroy=False):
        blocks = {each["alias"]: each for each in written(made)["provider"]["aws"]}
    assert set(blocks) == {"us-east-1", "us-west-2"}
    assert "allowed_account_ids" in blocks["us-east-1"] and "allowed_account_ids" not in blocks["us-west-2"]
    # Also the last one of its cloud.
    made = stack(tmp_path, sky.Local(), name="cpu")
    with kept_in_place(made, [aws()], destroy=False):
        assert written(made)["terraform"]["required_providers"]["aws"]["source"].endswith("hashicorp/aws")
    # Host keys come from a provider that no cloud has.
    with kept_in_place(made, [oci(), of("tls_private_key", "host", "hashicorp/tls", "this")], destroy=False):
        assert written(made)["provider"] == {
            "oci": [{"alias": "us-phoenix-1", "region": "us-phoenix-1"}],
            "tls": [{"alias": "this"}],
        }
    # A block of the project's own is nobody's to make up.
    with kept_in_place(made, [aws(alias="east")], destroy=False):
        assert written(made).get("provider", {}).get("aws", []) == []


def test_nodes_that_their_module_alone_ends_keep_it(tmp_path: Path) -> None:
    # hashicorp/terraform#13549: what is not in the configuration is forgotten, and runs on.
    node = Resource("train", "terraform_data", "node", 'provider["terraform.io/builtin/terraform"]', {}, key="train-0")
    made = stack(tmp_path, sky.AWS(), name="cloud")
    before = written(made)
    with kept_in_place(made, [node], destroy=False):
        module = written(made)["module"]["train"]
        assert (module["source"], module["count"]) == ("./local", 0) and (made.folder / "local" / "node.sh").is_file()
    assert written(made) == before
    with kept_in_place(made, [node], destroy=True):
        assert "count" not in written(made)["module"]["train"]
    # Another provider under the same name is refused, and a destroy has the module of the one before.
    made = stack(tmp_path, sky.AWS())
    with pytest.raises(PlaceChanged, match="nodes of the provider 'local'") as caught:
        refuse_moved(made, [node])
    assert "train.provider" in str(caught.value) and "skyinfra destroy fleet" in str(caught.value)
    with kept_in_place(made, [node], destroy=True):
        assert written(made)["module"]["train"]["source"] == "./local"
    made = stack(tmp_path, sky.Local())
    before = written(made)
    refuse_moved(made, [node])
    with kept_in_place(made, [node], destroy=False):
        assert written(made) == before


def test_a_pool_of_which_the_cloud_finds_nothing_is_not_forgotten(tmp_path: Path) -> None:
    """As credentials of another account look, where no provider compares them."""
    made = stack(tmp_path, sky.DigitalOcean(**HOSTED))
    where = "digitalocean/digitalocean", "this"
    droplet = of("digitalocean_droplet", "node", *where, size="s", region="r")
    key = of("digitalocean_ssh_key", "this", *where)

    def plan(*gone: Resource) -> Plan:
        return Plan(tmp_path / "plan", changes=(("create", "a"),), gone=frozenset(each.address for each in gone))

    with pytest.raises(WrongAccount, match=r"none of 1 machine, and 2 of its 2 resources") as caught:
        refuse_gone(made, [droplet, key], plan(droplet, key), destroy=False)
    assert "skyinfra deploy fleet --gone" in str(caught.value)
    # In HCP Terraform: what the state has, and is made again.
    again = (("create", droplet.address), ("create", key.address), ("create", "a"))
    elsewhere = Plan(tmp_path / "plan", changes=again, run="https://app.terraform.io/app/o/w/runs/run-1")
    with pytest.raises(WrongAccount, match=r"none of 1 machine, and 2 of its 2 resources"):
        refuse_gone(made, [droplet, key], elsewhere, destroy=False)
    refuse_gone(made, [droplet, key], dataclasses.replace(elsewhere, changes=again[::2]), destroy=False)
    # A machine that was taken back, or removed by hand.
    refuse_gone(made, [droplet, key], plan(droplet), destroy=False)
    # Of a machine alone nobody can say.
    refuse_gone(made, [droplet], plan(droplet), destroy=False)


def test_two_accounts_of_one_profile_are_refused() -> None:
    from cdktf import Testing

    pools = [
        sky.ComputePool(name=name, provider=sky.AWS(account_id=account * 12))
        for name, account in (("a", "1"), ("b", "2"))
    ]
    with pytest.raises(sky.InvalidField, match="which are one account"):
        sky.FleetStack(Testing.app(), "fleet", pools=pools)
