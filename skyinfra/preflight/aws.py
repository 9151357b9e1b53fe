"""The checks of pools on AWS. They only read; nothing is created, and nothing is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from skyinfra.buckets import load_boto3
from skyinfra.preflight.access import (
    check_account,
    check_buckets,
    check_credentials,
    check_instance_profile,
    not_checked,
)
from skyinfra.preflight.api import Api, CallFailed
from skyinfra.preflight.capacity import check_blocks, check_reservation
from skyinfra.preflight.facts import Context
from skyinfra.preflight.images import check_images
from skyinfra.preflight.machines import check_machines
from skyinfra.preflight.network import check_network, check_security_groups
from skyinfra.preflight.pool_inputs import PoolInputs, not_asked, of_place, read
from skyinfra.preflight.quotas import check_quotas
from skyinfra.preflight.report import Finding, Line
from skyinfra.preflight.spot import check_prices, check_score
from skyinfra.terraform.synthesized import SynthesizedStack

Check = Callable[[Context], list[Finding]]

# In the order of the report, after the credentials.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("machine", check_machines),
    ("quota", check_quotas),
    ("spot price", check_prices),
    ("spot score", check_score),
    ("image", check_images),
    ("network", check_network),
    ("security group", check_security_groups),
    ("instance profile", check_instance_profile),
    ("bucket", check_buckets),
    ("reservation", check_reservation),
    ("capacity block", check_blocks),
)
# Of these the first are about machines, which a place has or has not.
_ABOUT_PLACES = 4
WORKERS = 8

# The IAM actions that are asked for, all of which only read. Without one of them its checks are warnings.
ACTIONS = (
    "ec2:DescribeAddresses",
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeCapacityBlockOfferings",
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeImages",
    "ec2:DescribeInstances",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
    "ec2:GetSpotPlacementScores",
    "iam:GetInstanceProfile",
    "servicequotas:GetAWSDefaultServiceQuota",
    "servicequotas:GetServiceQuota",
    "ssm:GetParameter",
    "sts:GetCallerIdentity",
)

Account = tuple[str, str | None]


def check(
    stack: SynthesizedStack, pools: Sequence[dict[str, Any]], *, session: Any = None, workers: int | None = None
) -> dict[str, list[Line]]:
    """Returns the lines of *pools* of *stack* by their names; see `check_pools`."""
    return check_pools([read(stack, pool) for pool in pools], session=session, workers=workers or WORKERS)


def check_place(stack: SynthesizedStack, pool: Mapping[str, Any], *, session: Any = None) -> list[Line]:
    """Returns what AWS says of the machines of a *pool*, which has the fields of one of its places."""
    return check_pools([of_place(stack, pool)], session=session, checks=CHECKS[:_ABOUT_PLACES])[pool["name"]]


def check_pools(
    pools: Sequence[PoolInputs],
    *,
    session: Any = None,
    workers: int = WORKERS,
    checks: Sequence[tuple[str, Check]] = CHECKS,
) -> dict[str, list[Line]]:
    """Returns the lines of each pool by its name.

    session: a boto3 session for all pools; None makes one for each region and profile. workers: questions at a time.
    checks: which, besides that of the credentials. Raises `MissingDependency`.
    """
    load_boto3("preflight asks AWS")
    accounts = list(dict.fromkeys((pool.region, pool.profile) for pool in pools if not pool.logins))
    with ThreadPoolExecutor(workers) as executor:
        reached = dict(zip(accounts, executor.map(lambda each: _reach(each, session), accounts), strict=True))
        credentials = {pool.pool: _credentials(pool, reached) for pool in pools}
        todo = list(_todo([pool for pool in pools if credentials[pool.pool].result != "fail"], reached, checks))
        found = list(executor.map(lambda each: _lines(*each), todo))
    lines = {pool: [found.line(pool, "credentials")] for pool, found in credentials.items()}
    for (_, _, context), made in zip(todo, found, strict=True):
        lines[context.inputs.pool] += made
    return lines


def _reach(account: Account, session: Any) -> tuple[Api | None, Finding]:
    """Returns the API of a region, None where the credentials fail, and the finding on the credentials."""
    region, profile = account
    try:
        api = Api(region, profile, session)
    except CallFailed as error:
        return None, not_checked(error, region, profile)
    finding = check_credentials(api)
    return (None if finding.result == "fail" else api), finding


def _credentials(pool: PoolInputs, reached: dict[Account, tuple[Api | None, Finding]]) -> Finding:
    """Returns the finding on the credentials that the provider block of *pool* would use."""
    if pool.logins:
        return not_asked(pool.logins)
    api, found = reached[pool.region, pool.profile]
    return (api and check_account(api, pool)) or found


def _todo(
    pools: Sequence[PoolInputs],
    reached: dict[Account, tuple[Api | None, Finding]],
    checks: Sequence[tuple[str, Check]],
) -> Iterable[tuple[str, Check, Context]]:
    asked = [pool for pool in pools if not pool.logins]
    for pool in asked:
        api = reached[pool.region, pool.profile][0]
        peers = tuple(each for each in asked if (each.region, each.profile) == (pool.region, pool.profile))
        if api is not None:
            yield from ((name, check, Context(api, pool, peers)) for name, check in checks)


def _lines(name: str, check: Check, context: Context) -> list[Line]:
    inputs = context.inputs
    try:
        findings = check(context)
    except CallFailed as error:
        findings = [not_checked(error, inputs.region, inputs.profile)]
    return [finding.line(inputs.pool, name) for finding in findings]
