"""The inputs of a pool's AWS module, and the account of a provider block, read from the synthesized stack.

Preflight asks as Terraform will, or says that it does not ask.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyinfra.preflight.report import Finding, warned
from skyinfra.providers import Data
from skyinfra.providers import read as data_of
from skyinfra.terraform.expressions import is_reference
from skyinfra.terraform.synthesized import SynthesizedStack

# Arguments of the providers' blocks that log in: access_key, assume_role, shared_credentials_files, service_account,
# use_oidc, client_id ... What begins with skip_ or token_bucket_ does not, and spaces_ is of DigitalOcean's buckets.
_LOGIN = re.compile(
    r"(?!skip_|token_bucket_|spaces_)(.*(token|key|secret|credential|password|oidc|profile|config_file)"
    r"|assume_role|impersonate_service_account$|service_account$|client_|tenan|user_ocid|use_msi|auth$)"
)


@dataclass(frozen=True, slots=True)
class PoolInputs:
    """The inputs of one pool on AWS; the fields are those of modules/aws.

    profile: of the shared AWS configuration, None for what the environment says. head_machine_type: where the head is a
    machine besides the nodes. interfaces: network interfaces of one node, by machine type; one where it is not named.
    buckets: what nodes mount of them: bucket, prefix, and whether they write there. grouped: whether the nodes are an
    Auto Scaling group. max_hourly_cost: the declared cap, USD per node and hour. unknown: inputs that are outputs of
    other constructs, which Terraform alone knows; they are left out. accounts: those that the provider block allows;
    empty for any. logins: its arguments that log in otherwise than the environment does.
    """

    stack: str
    pool: str
    region: str
    profile: str | None
    nodes: int
    machine_types: tuple[str, ...]
    grouped: bool
    spot: bool
    spot_max_price: float | None
    max_hourly_cost: float | None
    zones: tuple[str, ...]
    vpc_id: str | None = None
    subnet_ids: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    head_public_ip: bool = False
    image: str = ""
    head_image: str | None = None
    disk_gb: int = 0
    iam_instance_profile: str | None = None
    capacity_block_id: str | None = None
    capacity_reservation_id: str | None = None
    interfaces: Mapping[str, int] = field(default_factory=dict)
    placement_group: bool = False
    head_machine_type: str | None = None
    elastic: bool = False
    buckets: tuple[tuple[str, str, bool], ...] = ()
    unknown: frozenset[str] = frozenset()
    accounts: tuple[str, ...] = ()
    logins: tuple[str, ...] = ()

    @property
    def one_zone(self) -> bool:
        """Whether all nodes stand in one zone."""
        return not self.grouped or self.placement_group or bool(self.interfaces)

    @property
    def purchase(self) -> str:
        """The purchase option as EC2 names it: spot, capacity-block or on-demand."""
        return "spot" if self.spot else "capacity-block" if self.capacity_block_id else "on-demand"

    @property
    def reservation(self) -> str | None:
        """The id of the capacity block or reservation."""
        return self.capacity_block_id or self.capacity_reservation_id

    def interfaces_of(self, machine_type: str) -> int:
        """Network interfaces of one node of that type."""
        return self.interfaces.get(machine_type, 1)


def profile_of(place: Mapping[str, Any]) -> str | None:
    """Returns the profile of a *place*; of one that names none, its account is told by nothing else."""
    return place.get("profile", place.get("account")) or None


def is_group(inputs: Mapping[str, Any]) -> bool:
    """Returns whether nodes with these *inputs* are an Auto Scaling group; the module decides in the same way."""
    several = len(inputs["machine_types"]) > 1
    if inputs.get("min_nodes") is not None:
        return True
    if inputs.get("group") is not None:
        return several or bool(inputs["group"])
    return several or (inputs["spot"] and inputs["node_count"] > 1)


def of_place(stack: SynthesizedStack, pool: Mapping[str, Any]) -> PoolInputs:
    """Returns the inputs of a *pool* with the fields of one of its places, whose module the stack may not have.

    What is of no machine, such as networks and images, is left at nothing.
    """
    own = stack.block(pool["own"]) if pool.get("own") else {}
    named = [pool["account_id"]] if "account_id" in pool else own.get("allowed_account_ids", ())
    return PoolInputs(
        stack=stack.name,
        pool=pool["name"],
        region=own.get("region") or pool["region"],
        profile=own.get("profile") or profile_of(pool),
        nodes=pool["nodes"],
        machine_types=tuple(pool["machine_types"]),
        grouped=bool(pool.get("grouped")),
        spot=bool(pool.get("spot")),
        spot_max_price=None,
        max_hourly_cost=pool.get("max_hourly_cost"),
        zones=tuple(pool.get("zones", ())),
        head_machine_type=pool.get("head"),
        accounts=_accounts(named),
        logins=logins(data_of("aws"), own),
    )


def _accounts(given: Any) -> tuple[str, ...]:
    """Returns the accounts that are *given*; none where Terraform alone knows one of them."""
    return () if "${" in str(given) else tuple(map(str, given or ()))


def read(stack: SynthesizedStack, pool: dict[str, Any]) -> PoolInputs:
    """Reads the inputs of *pool*, one of `stack.pools`."""
    name = pool["name"]
    configuration = stack.configuration(name)
    module = {key: value for key, value in stack.modules[name].items() if not is_reference(value)}
    grouped = is_group(module)
    return PoolInputs(
        stack=stack.name,
        pool=name,
        region=configuration.get("region") or pool["region"],
        profile=configuration.get("profile"),
        nodes=module["node_count"],
        machine_types=tuple(module["machine_types"]),
        grouped=grouped,
        spot=module["spot"],
        spot_max_price=module.get("spot_max_price"),
        max_hourly_cost=pool.get("max_hourly_cost"),
        zones=tuple(module.get("zones", ())),
        vpc_id=module.get("vpc_id"),
        subnet_ids=tuple(module.get("subnet_ids", ())),
        security_group_ids=tuple(module.get("security_group_ids", ())),
        head_public_ip=module.get("head_public_ip", False),
        image=module.get("image", ""),
        head_image=module.get("head_image") if grouped else None,
        disk_gb=module["disk_gb"],
        iam_instance_profile=module.get("iam_instance_profile"),
        capacity_block_id=module.get("capacity_block_id"),
        capacity_reservation_id=module.get("capacity_reservation_id"),
        interfaces={kind: len(cards) for kind, cards in module.get("efa_interfaces", {}).items()},
        placement_group=module.get("placement_group", False),
        head_machine_type=module.get("head_machine_type") if grouped else None,
        elastic=module.get("min_nodes") is not None,
        buckets=tuple((each["bucket"], each["prefix"], each["write"]) for each in module.get("buckets") or ()),
        unknown=frozenset(stack.modules[name].keys() - module.keys()),
        accounts=_accounts(configuration.get("allowed_account_ids", ())),
        logins=logins(data_of("aws"), configuration),
    )


def logins(data: Data, block: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the arguments by which a provider *block* logs in otherwise than the environment and its profile do.

    Those of blocks that are made for pools are none; a region or an account that Terraform alone knows is one.
    """
    ours, place = data.terraform.get("settings", {}), data.terraform.get("config", ())
    return tuple(
        name
        for name, value in block.items()
        if (value and value != ours.get(name) and _LOGIN.match(name) and name not in place)
        or (name in place and "${" in str(value))
    )


def log_in_otherwise(arguments: tuple[str, ...]) -> str:
    """Returns why nobody asks with the credentials of the environment."""
    return f"the provider block logs in otherwise, by {', '.join(arguments)}"


def not_asked(arguments: tuple[str, ...]) -> Finding:
    """Returns the finding on the credentials of a block with those *arguments*."""
    return warned(
        f"not asked: {log_in_otherwise(arguments)}", "See in the console of that account whether it has the machines."
    )


def declared(data: Data, block: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that name the account, as *block* has it, or another variable that the provider reads."""
    found = {}
    for argument, names in _variables(data).items():
        value = block.get(argument) or next((environment[name] for name in names if environment.get(name)), None)
        if value is not None:
            found[names[0]] = str(value)
    return found


def names_no_login(data: Data, variables: tuple[str, ...]) -> bool:
    """Returns whether *variables* say which account, and nothing of who logs in."""
    return set(variables) <= {names[0] for names in _variables(data).values()}


def _variables(data: Data) -> dict[str, list[str]]:
    """Returns the variables that name the account where a block does not, by the argument of the block."""
    return {row["field"]: row["environment"] for row in data.terraform.get("place", ()) if "environment" in row}
