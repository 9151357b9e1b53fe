"""The IAM policy of whoever plans, deploys and destroys a stack, from the actions in providers/aws_actions.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyinfra.errors import NotSupported
from skyinfra.preflight.aws import ACTIONS
from skyinfra.preflight.pool_inputs import is_group
from skyinfra.providers.aws_fields import partition, permissions
from skyinfra.terraform.expressions import is_reference
from skyinfra.terraform.stores import jobs_prefix
from skyinfra.terraform.synthesized import SynthesizedStack


def policy(stack: SynthesizedStack) -> dict[str, Any]:
    """Returns the policy document for the pools of *stack* on AWS, and its state in S3. Raises `NotSupported`."""
    pools = [(name, inputs) for name, inputs in stack.modules.items() if _provider(stack, name) == "aws"]
    if not pools:
        raise NotSupported("has no pool on AWS, and needs no IAM actions", field="stack", given=stack.name)
    regions = sorted(
        {
            stack.configuration(each["name"]).get("region") or each["region"]
            for each in stack.pools
            if each["provider"] == "aws"
        }
    )
    arn = f"arn:{partition(regions[0])}"
    statements = [_anywhere(pools, regions)]
    statements += _merged([each for name, inputs in pools for each in _of_pool(name, inputs, arn)])
    preflight = [action for action in ACTIONS if action not in statements[0]["Action"]]
    statements.append({"Sid": "Preflight", "Effect": "Allow", "Action": preflight, "Resource": "*"})
    statements += _state(stack.backend.get("s3"), arn)
    return {"Version": "2012-10-17", "Statement": statements}


def _provider(stack: SynthesizedStack, pool: str) -> str | None:
    return next((str(each["provider"]) for each in stack.pools if each["name"] == pool), None)


def parts(inputs: Mapping[str, Any]) -> Iterator[str]:
    """The parts of modules/aws that a pool with these *inputs* has; the module decides in the same way."""
    types, several = inputs["machine_types"], inputs["node_count"] > 1
    grouped = is_group(inputs)
    own_network = not inputs.get("subnet_ids")
    yield "every"
    yield "network" if own_network else "subnets"
    cards = inputs.get("efa_interfaces", {})
    if own_network and (grouped or several) and any(len(cards.get(each, ())) > 1 for each in types):
        yield "private"
    has = {
        "address": own_network or inputs.get("head_public_ip"),
        "security_groups": not inputs.get("security_group_ids"),
        "role": not inputs.get("iam_instance_profile"),
        "profile": inputs.get("iam_instance_profile"),
        "bucket": inputs.get("runner_file") or inputs.get("versions"),
        "image": any((inputs.get(each) or "").startswith("/") for each in ("image", "head_image")),
        "group": grouped,
        # A group asks for its spot instances itself.
        "spot": inputs["spot"] and not grouped,
        "key_pair": inputs.get("ssh_public_key"),
        "placement_group": inputs.get("placement_group"),
        "key": inputs.get("kms_key_id"),
    }
    yield from (part for part, there in has.items() if there)


def _actions(inputs: Mapping[str, Any]) -> set[str]:
    known = permissions()
    has = set(parts(inputs))
    rows = [known["called"].get(part, ()) for part in has]
    rows += [row["actions"] for row in known["not_called"] if row["part"] in has]
    return {action for row in rows for action in row}


# Services whose actions are limited to what belongs to the pool.
_NAMED = ("iam", "s3", "kms")


def _anywhere(pools: Sequence[tuple[str, Mapping[str, Any]]], regions: list[str]) -> dict[str, Any]:
    """Returns the actions that IAM limits by region alone."""
    found = {action for _, inputs in pools for action in _actions(inputs)}
    return {
        "Sid": "Fleet",
        "Effect": "Allow",
        "Action": sorted(action for action in found if action.partition(":")[0] not in _NAMED),
        "Resource": "*",
        "Condition": {"StringEquals": {"aws:RequestedRegion": regions}},
    }


def _merged(statements: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The *statements* with one for all pools that may do the same: a policy has a limited size."""
    found: dict[str, dict[str, Any]] = {}
    for each in statements:
        same = found.setdefault(str({**each, "Resource": None}), {**each, "Resource": []})
        same["Resource"] += [resource for resource in each["Resource"] if resource not in same["Resource"]]
    sids: list[str] = []
    for each in found.values():
        sids.append(each["Sid"])
        again = sids.count(each["Sid"])
        yield {**each, "Sid": each["Sid"] if again == 1 else f"{each['Sid']}{again}"}


def _of_pool(name: str, inputs: Mapping[str, Any], arn: str) -> Iterator[dict[str, Any]]:
    """The statements on the role, the bucket and the key of one pool."""
    actions = _actions(inputs)
    selected = {service: sorted(a for a in actions if a.startswith(f"{service}:")) for service in _NAMED}
    # The module's names begin so; see its locals.
    prefix = f"skyinfra-{name}-"
    path = inputs.get("iam_path") or "/"
    own, key = inputs.get("iam_instance_profile"), inputs.get("kms_key_id")
    service = f"ec2.amazonaws.com{'.cn' if arn.endswith('-cn') else ''}"
    linked = [action for action in selected["iam"] if action == "iam:CreateServiceLinkedRole"]
    passed = [action for action in selected["iam"] if action == "iam:PassRole"]
    roles = f"{arn}:iam::*:role/*" if own else f"{arn}:iam::*:role{path}{prefix[:38]}*"
    profiles = f"{arn}:iam::*:instance-profile/{'*' if own else f'{path[1:]}{prefix}*'}"
    # What preflight asks of buckets that nodes mount.
    mounted = [f"{arn}:s3:::{name}" for name in dict.fromkeys(each["bucket"] for each in inputs.get("buckets") or ())]
    rest = [action for action in selected["iam"] if action not in (*linked, *passed)]
    for sid, selected_actions, resources, condition in (
        ("Role", rest, [roles, profiles], None),
        ("Pass", passed, [roles], {"StringEquals": {"iam:PassedToService": service}}),
        ("Linked", linked, [f"{arn}:iam::*:role/aws-service-role/*"], None),
        ("Bucket", selected["s3"], [f"{arn}:s3:::{prefix[:37]}*", f"{arn}:s3:::{prefix[:37]}*/*"], None),
        ("Mounted", ["s3:ListBucket"] if mounted else [], mounted, None),
        ("Key", selected["kms"], [f"{arn}:kms:*:*:key/*" if is_reference(key) else key], None),
    ):
        if selected_actions:
            statement = {"Sid": sid, "Effect": "Allow", "Action": selected_actions, "Resource": resources}
            yield statement if condition is None else {**statement, "Condition": condition}


def _state(backend: Mapping[str, Any] | None, arn: str) -> Iterator[dict[str, Any]]:
    """The statements on a state in S3: its file, the lock beside it, and the jobs that are kept there."""
    if backend is None or "endpoints" in backend:
        return
    bucket, key = f"{arn}:s3:::{backend['bucket']}", backend["key"]
    yield {"Sid": "States", "Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": bucket}
    files = [f"{bucket}/{key}", f"{bucket}/{key}.tflock"]
    actions = ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
    yield {"Sid": "State", "Effect": "Allow", "Action": actions, "Resource": files}
    kept = f"{bucket}/{jobs_prefix(backend)}*"
    yield {"Sid": "Jobs", "Effect": "Allow", "Action": actions, "Resource": kept}
    if "kms_key_id" in backend:
        actions = ["kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey"]
        yield {"Sid": "StateKey", "Effect": "Allow", "Action": actions, "Resource": backend["kms_key_id"]}
    # https://developer.hashicorp.com/terraform/language/backend/s3 (2026-11-27)
    if "dynamodb_table" in backend:
        actions = ["dynamodb:DeleteItem", "dynamodb:DescribeTable", "dynamodb:GetItem", "dynamodb:PutItem"]
        table = f"{arn}:dynamodb:*:*:table/{backend['dynamodb_table']}"
        yield {"Sid": "StateLock", "Effect": "Allow", "Action": actions, "Resource": table}
    if role := backend.get("assume_role", {}).get("role_arn"):
        yield {"Sid": "StateRole", "Effect": "Allow", "Action": ["sts:AssumeRole"], "Resource": role}
