"""The quotas of an AWS account that a pool counts towards, by machine type and purchase. From quotas.json."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from skyinfra.providers.data import read


@dataclass(frozen=True, slots=True)
class Quota:
    """A quota of Service Quotas: the service's code, the quota's code and its name."""

    service: str
    code: str
    name: str

    def increase(self, value: int, region: str, profile: str | None = None) -> str:
        """Returns the command that asks for *value*."""
        command = (
            f"aws service-quotas request-service-quota-increase --service-code {self.service} --quota-code {self.code} "
            f"--desired-value {value} --region {region}"
        )
        return f"{command} --profile {profile}" if profile else command


@cache
def vcpu_quota(machine_type: str, *, spot: bool = False) -> Quota | None:
    """The quota of vCPUs that *machine_type* counts towards, on-demand or as spot; None where it is not known."""
    for family, code, name in read("aws").quotas["spot" if spot else "on-demand"]:
        if re.match(family, machine_type):
            return Quota("ec2", code, name)
    return None


def vpc_quota() -> Quota:
    """Returns the quota of VPCs in a region."""
    return Quota(*read("aws").quotas["vpcs"])


def address_quota() -> Quota:
    """Returns the quota of Elastic IPs in a region."""
    return Quota(*read("aws").quotas["addresses"])
