"""Next steps after a refusal by a cloud: advice from the stack and the offers, beyond Terraform's message."""

from __future__ import annotations

import re
import shlex
from typing import Any

from skyinfra import offers
from skyinfra.errors import CloudRefused
from skyinfra.providers.quotas import vcpu_quota
from skyinfra.terraform.cloud_errors import Refusal, refusals
from skyinfra.terraform.synthesized import SynthesizedStack


def next_steps(stack: SynthesizedStack, error: CloudRefused) -> list[str]:
    """Sentences for each cause and pool, in the order of the refusals; none twice."""
    found = refusals(error.diagnostics)
    steps = dict.fromkeys(refusal.hint for refusal in found)
    for refusal in found:
        pool = next((each for each in stack.pools if each["name"] == refusal.pool), None)
        steps |= dict.fromkeys(_steps(stack, refusal, pool))
    return list(steps)


def _steps(stack: SynthesizedStack, refusal: Refusal, pool: dict[str, Any] | None) -> list[str]:
    if refusal.cause == "CloudCredentialsRefused":
        profile = _profile(stack, refusal)
        return [f"The stack uses the profile {profile}: aws sso login --profile {profile}"] if profile else []
    if pool is None or pool["provider"] != "aws":
        return []
    if refusal.cause == "CapacityUnavailable":
        return _other_capacity(stack, refusal, pool)
    if refusal.cause == "QuotaExceeded" and "vCPU" in refusal.says:
        return _quota(stack, pool)
    return []


def _profile(stack: SynthesizedStack, refusal: Refusal) -> str | None:
    """Returns the profile of the pool's Terraform provider, or of the provider that the refusal is about."""
    if refusal.pool is not None:
        found: str | None = stack.configuration(refusal.pool).get("profile")
        return found
    alias = refusal.address.rpartition("].")[2]
    configurations = [each for every in stack.providers.values() for each in every]
    return next((each.get("profile") for each in configurations if each.get("alias") == alias), None)


def _other_capacity(stack: SynthesizedStack, refusal: Refusal, pool: dict[str, Any]) -> list[str]:
    lines = []
    zones = re.search(r"choosing ((?:[a-z]{2,4}(?:-[a-z]+)+-\d[a-z](?:, | and )?)+)", refusal.words)
    if zones:
        named = ", ".join(re.findall(r"[a-z]{2,4}(?:-[a-z]+)+-\d[a-z]", zones[1]))
        zone = shlex.quote(f'module.{stack.module_of(pool["name"])}.terraform_data.zone["head"]')
        lines.append(
            f"AWS names zones that have it now: {named}. Declare one: sky.AWS(zones=[...]), and move the pool there, "
            f"with the nodes that it has: skyinfra deploy {stack.name} --replace {zone}"
        )
    return lines + offers.instead("aws", pool["machine_types"][0], pool.get("region", ""), spot=pool["spot"])


def _quota(stack: SynthesizedStack, pool: dict[str, Any]) -> list[str]:
    machine, region = pool["machine_types"][0], pool.get("region", "")
    offer, quota = offers.named("aws", machine), vcpu_quota(machine, spot=pool["spot"])
    if quota is None:
        return []
    needed = (offer.vcpus or 0) * pool["nodes"] if offer else 0
    if not needed:
        return [f"The quota is {quota.name} ({quota.code}); `skyinfra preflight {stack.name}` says how much is in use."]
    return [
        f"pool {pool['name']} alone needs {needed} vCPUs of {quota.name}; `skyinfra preflight {stack.name}` says how "
        f"much is in use. {quota.increase(needed, region, stack.configuration(pool['name']).get('profile'))}"
    ]
