"""The machines that a cloud has of a fleet: after an answer that never came, one may be in no state."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from skyinfra.preflight import access, api, rest
from skyinfra.preflight.facts import tags
from skyinfra.preflight.pool_inputs import profile_of
from skyinfra.providers import machines_of, read
from skyinfra.terraform.state import Resource

SECONDS = 20.0
# Of EC2's instances. One that shuts down costs nothing, and is gone soon.
_LIVING = ["pending", "running", "stopping", "stopped"]
# The tag of what a launch template starts: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/launch-instances-from-launch-template.html
_TEMPLATE = "aws:ec2launchtemplate:id"
# What a group starts is in no state either: https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-tagging.html
_GROUP = "aws:autoscaling:groupName"


@dataclass(frozen=True, slots=True)
class Existing:
    """A machine. where: its zone or region; "" where that is not said. end: how a person ends it."""

    id: str
    where: str
    end: str


def is_asked(provider: str) -> bool:
    """Returns whether that provider can be asked for machines that no state has.

    Others refuse a second one of a name.
    """
    table = read(provider).preflight
    return table is not None and (table.existing is not None or table.module == "skyinfra.preflight.aws")


def outside(
    stack: str,
    pool: Mapping[str, Any],
    resources: Iterable[Resource],
    *,
    environment: Mapping[str, str] | None = None,
    session: Any = None,
) -> list[Existing] | None:
    """Returns the machines of *pool* that its module has made and the state has not; None where nobody can be asked.

    pool: with the ``provider``, ``region`` and ``account`` of its place. resources: of its module. environment: with
    keys; None is that of the process. session: of boto3. Raises `Unanswered`, `MissingDependency`.
    """
    table = read(pool["provider"]).preflight
    # Resources of two types may have one id.
    known = [(each, str(each.attributes["id"])) for each in resources if each.attributes.get("id")]
    machines = {id for each, id in known if machines_of(each.type, each.attributes) is not None}
    if table is not None and table.module == "skyinfra.preflight.aws":
        return [each for each in _on_aws(stack, pool, {id for _, id in known}, session) if each.id not in machines]
    secret = next((id for each, id in known if (each.type, each.name) == ("terraform_data", "secret")), None)
    if table is None or table.existing is None or secret is None:
        return None
    asked, called = table.existing, read(pool["provider"]).about.called
    answers = rest.Api(called, table, deadline=time.monotonic() + SECONDS, environment=environment)
    # What a fleet has one of is named with a part of the secret's id: see modules/core.
    own = re.compile(rf"skyinfra-[a-z0-9-]*-{re.escape(secret[:8])}")
    return [
        Existing(id, rest.text(row, asked.where), f"End it in the console of {called}.")
        for answer in answers.pages(asked.path, {}, asked.next)
        for row in rest.rows(answer, asked.rows)
        if own.search(json.dumps(row)) and (id := rest.text(row, asked.id)) not in machines
    ]


def _on_aws(stack: str, pool: Mapping[str, Any], ids: Set[str], session: Any) -> list[Existing]:
    region, profile = pool.get("region") or "", profile_of(pool)
    names = {"tag:skyinfra:stack": [stack], "tag:skyinfra:pool": [pool["name"]], "instance-state-name": _LIVING}
    filters = [{"Name": name, "Values": values} for name, values in names.items()]
    try:
        answer = api.Api(region, profile, session).ask("ec2", "describe_instances", Filters=filters)
    except api.CallFailed as error:
        raise rest.Unanswered("silent", access.not_checked(error, region, profile).found) from None
    option = f" --profile {profile}" if profile else ""
    return [
        Existing(
            each["InstanceId"],
            each["Placement"]["AvailabilityZone"],
            f"End it with: aws ec2 terminate-instances --region {region} --instance-ids {each['InstanceId']}{option}",
        )
        for reservation in answer["Reservations"]
        for each in reservation["Instances"]
        if _is_of(each, ids)
    ]


def _is_of(instance: Mapping[str, Any], ids: Set[str]) -> bool:
    """Returns whether an *instance* has one of the *ids* of the state: another checkout may name a fleet so."""
    found = tags(dict(instance))
    has = {each["GroupId"] for each in instance.get("SecurityGroups", ())}
    has |= {each["NetworkInterfaceId"] for each in instance.get("NetworkInterfaces", ())}
    return _GROUP not in found and bool((has | {found.get(_TEMPLATE, "")}) & ids)
