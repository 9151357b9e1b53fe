"""The machines that a cloud has of a fleet and its state has not, by the answers of moto and of documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from moto_aws.account import Cloud
from servers.rest import Rest, serving

from skyinfra.preflight.existing import outside
from skyinfra.preflight.rest import Unanswered
from skyinfra.terraform.state import Resource

SECRET = "0f3a9c1e-5b77-4b1f-9d6a-2b1f0c9e8d7a"
OWN = "skyinfra-s-t-0f3a9c1e"
KEY = "k3y-of-t3sts"


def resource(type: str, name: str, id: str) -> Resource:
    return Resource("t", type, name, "", {"id": id})


def pool(provider: str, region: str | None = "us-east-1", **more: Any) -> dict[str, Any]:
    return {"name": "t", "provider": provider, "region": region, **more}


SECRET_OF_FLEET = resource("terraform_data", "secret", SECRET)


@pytest.mark.slow
def test_of_aws_those_of_the_stack_that_have_a_resource_of_the_state(cloud: Cloud, tmp_path: Path) -> None:
    groups = [
        cloud.ec2.create_security_group(GroupName=name, Description="d")["GroupId"] for name in ("ours", "theirs")
    ]
    tags = {"skyinfra:stack": "s", "skyinfra:pool": "t"}
    for count, more, group in (
        (2, {}, groups[0]),
        (1, {}, groups[1]),  # of another checkout, with the same names
        (1, {"skyinfra:pool": "u"}, groups[0]),
        (1, {"skyinfra:group": "g", "aws:autoscaling:groupName": "g"}, groups[0]),
    ):
        cloud.run("t3.micro", count, {**tags, **more}, SecurityGroupIds=[group])
    found = {
        each["InstanceId"]: each
        for reservation in cloud.ec2.describe_instances()["Reservations"]
        for each in reservation["Instances"]
    }
    known, stray = list(found)[:2]
    state = [
        SECRET_OF_FLEET,
        resource("aws_security_group", "nodes", groups[0]),
        resource("aws_instance", "head", known),
    ]
    [answer] = outside("s", pool("aws", account=None), state, session=cloud.session) or []
    assert answer.id == stray and answer.where.startswith("us-east-1")
    assert answer.end == f"End it with: aws ec2 terminate-instances --region us-east-1 --instance-ids {stray}"
    named = pool("aws", account="a 123456789012", profile="a")
    [again] = outside("s", named, state, session=cloud.session) or []
    assert again.end == f"{answer.end} --profile a"
    cloud.ec2.terminate_instances(InstanceIds=[stray])
    assert outside("s", pool("aws"), state, session=cloud.session) == []


@pytest.mark.slow
def test_what_aws_does_not_answer(cloud: Cloud) -> None:
    cloud.refuse("ec2", "DescribeInstances", "UnauthorizedOperation", status=403)
    with pytest.raises(Unanswered) as caught:
        outside("s", pool("aws"), [SECRET_OF_FLEET], session=cloud.session)
    assert "may not call ec2:DescribeInstances" in caught.value.reason


def row(id: Any, own: str = OWN, **more: Any) -> dict[str, Any]:
    return {"id": id, "name": "t-0", "ssh_key_names": [own], "region": {"name": "us-east-1", "slug": "nyc2"}, **more}


# As the documents have them that the data files name.
ANSWERS: dict[str, tuple[str, dict[str, str], list[dict[str, Any]], str]] = {
    "lambda": ("/api/v1/instances", {"LAMBDALABS_API_KEY": KEY}, [row("a"), row("b"), row("c", "mine")], "data"),
    "digitalocean": (
        "/v2/droplets",
        {"DIGITALOCEAN_TOKEN": KEY},
        [row(1, tags=[OWN]), row(2, tags=["x", OWN]), row(3, "x", tags=["skyinfra-s-t-11111111"])],
        "droplets",
    ),
    "vultr": (
        "/v2/instances",
        {"VULTR_API_KEY": KEY},
        [{"id": "a", "label": f"{OWN}-0", "region": "ewr"}, {"id": "b", "label": f"{OWN}-1", "region": "ewr"}],
        "instances",
    ),
    "vastai": (
        "/api/v0/instances/",
        {"VASTAI_API_KEY": KEY},
        [{"id": 7, "label": f"{OWN}-0", "geolocation": "SE"}, {"id": 8, "label": f"{OWN}-1"}, {"id": 9, "label": None}],
        "instances",
    ),
}
ADDRESS = {
    "lambda": "SKYINFRA_LAMBDA_URL",
    "digitalocean": "DIGITALOCEAN_API_URL",
    "vultr": "VULTR_API_ENDPOINT",
    "vastai": "VASTAI_API_URL",
}


MACHINE = {
    "lambda": "lambdalabs_instance",
    "digitalocean": "digitalocean_droplet",
    "vultr": "vultr_instance",
    "vastai": "vastai_instance",
}


@pytest.mark.parametrize("provider", ANSWERS)
def test_of_other_clouds_those_whose_names_are_of_the_fleet(provider: str) -> None:
    path, keys, rows, key = ANSWERS[provider]
    with serving({path: {key: rows}}) as rest:
        environment = {**keys, ADDRESS[provider]: rest.address}
        state = [SECRET_OF_FLEET, resource(MACHINE[provider], "node", str(rows[0]["id"]))]
        # What is no machine may have its id.
        state.append(resource("random_key", "login", str(rows[1]["id"])))
        [stray] = outside("s", pool(provider), state, environment=environment) or []
        assert stray.id == str(rows[1]["id"]) and "console" in stray.end
        assert rest.headers("Authorization") == {f"Bearer {KEY}"}


def test_without_a_key_nobody_knows() -> None:
    with pytest.raises(Unanswered, match="LAMBDALABS_API_KEY"):
        outside("s", pool("lambda"), [SECRET_OF_FLEET], environment={})


@pytest.mark.parametrize("provider", ["gcp", "azure", "local", "oci"])
def test_who_is_not_asked(provider: str) -> None:
    assert outside("s", pool(provider), [SECRET_OF_FLEET], environment={}) is None


def test_before_there_is_a_secret_there_is_no_machine() -> None:
    with serving({}) as rest:
        assert isinstance(rest, Rest)
        assert outside("s", pool("lambda"), [], environment={"SKYINFRA_LAMBDA_URL": rest.address}) is None
        assert not rest.asked
