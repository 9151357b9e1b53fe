"""Where the resources of a state are: provider, account and region, against the declaration and the credentials.

A provider that is asked in another account or region finds nothing, and Terraform takes that for a removal: it forgets
machines that run, and makes others. So a deploy is refused where a pool is declared in another place than its resources
are in, a destroy uses the provider that they were made by, and providers are given the account that the state names,
which they compare with the credentials themselves.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyinfra.deploy.orphans import ending_kinds, ending_modules
from skyinfra.errors import PlaceChanged, WrongAccount, counted
from skyinfra.providers import Data, kinds, machines_of, provider_of, read
from skyinfra.terraform.program import Plan
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

_ADDRESS = re.compile(r'provider\["(?P<source>[^"]+)"\](?:\.(?P<alias>\S+))?$')
# The document of a stack: what a program of cdktf or cdktn writes, and Terraform reads.
_DOCUMENT = "cdk.tf.json"

_REGION = r"[a-z]+(-[a-z0-9]+)+"

# The fields that say where a resource is, and their values: ``{"region": "us-east-1", "account_id": "..."}``.
Place = dict[str, str]


@dataclass(frozen=True)
class _Made:
    """A resource of a cloud, with the data of its provider and the alias of the provider block that made it."""

    resource: Resource
    data: Data
    alias: str

    @property
    def name(self) -> str:
        """The name of its Terraform provider."""
        return str(self.data.terraform["name"])

    def place(self, *, alias: str | None) -> Place:
        """Returns where it is: by what the cloud has said of it, else by the alias of its provider block.

        alias: of the block that its pool has now: the same one says nothing.
        """
        declared = self.data.configuration_of(self.alias) if self.alias != alias else {}
        found = {}
        for row in self.data.terraform.get("place", ()):
            value = (
                _value(row, self.resource.attributes) if "attribute" in row else _part(row, declared.get(row["field"]))
            )
            if value is not None:
                found[row["field"]] = value
        return found


def _value(row: Mapping[str, Any], attributes: Mapping[str, Any]) -> str | None:
    """Returns the value that the attribute of a *row* of `place` has in the state; None where it says none."""
    return _part(row, attributes.get(row.get("attribute", "")))


def _part(row: Mapping[str, Any], given: object) -> str | None:
    if not isinstance(given, str) or not given:
        return None
    match = re.match(row.get("pattern", "(.+)"), given)
    return match[1] if match else None


def _made(resources: Iterable[Resource]) -> list[_Made]:
    by_source = {data.terraform["source"]: data for data in map(read, kinds()) if "source" in data.terraform}
    found = [(each, match) for each in resources if (match := _ADDRESS.search(each.provider)) is not None]
    return [
        _Made(each, by_source[match["source"]], match["alias"] or "")
        for each, match in found
        if match["source"] in by_source
    ]


def refuse_moved(stack: SynthesizedStack, resources: Sequence[Resource]) -> None:
    """Raises `PlaceChanged` where a pool of *stack* is declared in another place than one of its *resources* is in."""
    made, left = _made(resources), _left(stack, resources)
    for pool, kind in ((each["name"], each["provider"]) for each in stack.pools):
        if former := left.get(stack.module_of(pool)):
            raise PlaceChanged(
                f"the pool has nodes of the provider {former!r}, which no other module ends: they would run on",
                field=f"{pool}.provider",
                given=kind,
                hint=_ways(stack, pool),
            )
        for each in made:
            if each.resource.call != stack.module_of(pool):
                continue
            reference = stack.modules.get(pool, {}).get("providers", {}).get(each.name, "")
            there = each.place(alias=reference.partition(".")[2])
            here = _declared(stack, pool, each.data)
            for field, value in there.items():
                if here.get(field, value) != value:
                    raise _moved(stack, pool, field, value, here[field], made)


def _moved(
    stack: SynthesizedStack, pool: str, field: str, there: str, here: str, made: Sequence[_Made]
) -> PlaceChanged | WrongAccount:
    mine = [each.resource for each in made if each.resource.call == stack.module_of(pool)]
    machines = [each for each in mine if machines_of(each.type, each.attributes) is not None]
    what = counted(len(machines), "machine") if machines else counted(len(mine), "resource")
    cls = WrongAccount if field == "account_id" else PlaceChanged
    return cls(
        f"the pool has {what} in {there}: declared elsewhere, Terraform would not find them, and forget them",
        field=f"{pool}.provider.{field}",
        given=here,
        hint=_ways(stack, pool),
    )


def _ways(stack: SynthesizedStack, pool: str) -> str:
    return (
        f"Nothing was changed. Destroy them first: skyinfra destroy {stack.name}\n"
        f"Or give the pool another name with its new place: a deploy makes that one, and destroys {pool}."
    )


def _left(stack: SynthesizedStack, resources: Iterable[Resource]) -> dict[str, str]:
    """Returns the provider of each module whose nodes its own program ends, and that *stack* does not declare so."""
    declared = {stack.module_of(each["name"]): each["provider"] for each in stack.pools}
    return {call: kind for call, kind in ending_kinds(resources).items() if declared.get(call) != kind}


def _declared(stack: SynthesizedStack, pool: str, data: Data) -> Place:
    """Returns where the provider block of a *pool* looks, with the variables of the environment that it takes."""
    configuration = stack.configuration(pool)
    found = {}
    for row in data.terraform.get("place", ()):
        names = (row.get("argument"), row["field"], row.get("declared"))
        value = next((configuration[name] for name in names if configuration.get(name)), None)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if value is None:
            variables = (os.environ.get(name) for name in row.get("environment", ()))
            value = next(filter(None, variables), None)
        if "declared" in row:
            # By its name, or in another form than the state has it.
            value = _part(row, value)
        # A reference to something else is known to Terraform alone.
        if isinstance(value, str) and "${" not in value:
            found[row["field"]] = value
    return found


@contextmanager
def kept_in_place(
    stack: SynthesizedStack, resources: Sequence[Resource], *, destroy: bool, gone: bool = False
) -> Iterator[None]:
    """As long as the block runs, the configuration of *stack* has what keeps Terraform from forgetting *resources*.

    Provider blocks that made resources and are not declared any more; in each block the account that its resources
    are in, where the provider compares that with its credentials; of a destroy, the blocks that made the resources in
    place of those that are declared now. Modules that end the nodes of pools that are not declared any more. gone: the
    account may be gone as well, and is not compared.
    """
    file = stack.folder / _DOCUMENT
    made, left = _made(resources), _left(stack, resources)
    if not (made or left) or not file.exists():
        yield
        return
    before = file.read_text(encoding="utf-8")
    document = json.loads(before)
    if destroy:
        _use_former(document, made)
    _add_missing(document, resources)
    _add_ending(document, ending_modules(stack.folder, left), destroy=destroy)
    if not gone:
        _add_accounts(document, made)
    try:
        file.write_text(json.dumps(document, indent=2), encoding="utf-8")
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def _use_former(document: dict[str, Any], made: Sequence[_Made]) -> None:
    """Gives the modules of pools the providers that have made their resources."""
    for each in made:
        given = document.get("module", {}).get(each.resource.call, {}).get("providers", {})
        if each.alias and each.name in given:
            given[each.name] = f"{each.name}.{each.alias}"


def _add_ending(document: dict[str, Any], modules: Mapping[str, Any], *, destroy: bool) -> None:
    """Adds *modules* that end what they have made, and of a deploy make nothing."""
    for name, block in modules.items():
        declared = document.setdefault("module", {})
        declared[name] = block if destroy else declared.get(name, {**block, "count": 0})


def _add_missing(document: dict[str, Any], resources: Sequence[Resource]) -> None:
    """Adds the provider blocks that are in the state and not in *document*."""
    for found in map(provider_of, dict.fromkeys(each.provider for each in resources)):
        if found is None:
            continue
        blocks, block = document.setdefault("provider", {}).setdefault(found.name, []), found.configuration()
        if any(each.get("alias") == found.alias for each in blocks):
            continue
        if not re.fullmatch(_REGION, block.get("region", "a-b")):
            continue  # a block of the project's own
        if not _has_profile(block.get("profile")):
            del block["profile"]
        blocks.append(block)
        required = document.setdefault("terraform", {}).setdefault("required_providers", {})
        required.setdefault(found.name, {"source": found.source, "version": found.version})


def _has_profile(name: str | None) -> bool:
    """Returns whether the shared AWS configuration of this machine has the profile; true where none is named."""
    if name is None:
        return True
    variables = {"AWS_CONFIG_FILE": "config", "AWS_SHARED_CREDENTIALS_FILE": "credentials"}
    files = [Path(os.environ.get(key) or f"~/.aws/{file}").expanduser() for key, file in variables.items()]
    found = configparser.RawConfigParser(strict=False)
    try:
        found.read(files)
    except (configparser.Error, UnicodeDecodeError):
        return True  # the provider says what is wrong with it
    return found.has_section(name) or found.has_section(f"profile {name}")


def _add_accounts(document: dict[str, Any], made: Sequence[_Made]) -> None:
    """Gives each provider block the account that its resources are in, where it names none itself and takes one."""
    accounts: dict[tuple[str, str, str], set[tuple[str, bool]]] = defaultdict(set)
    conflicts: dict[str, list[str]] = {}
    for each in made:
        given = document.get("module", {}).get(each.resource.call, {}).get("providers", {})
        alias = str(given.get(each.name, f"{each.name}.{each.alias}")).partition(".")[2]
        for row in each.data.terraform.get("place", ()):
            if "argument" in row and (value := _value(row, each.resource.attributes)):
                accounts[each.name, alias, row["argument"]].add((value, row["argument"] != row["field"]))
                conflicts[each.name] = row.get("conflicts", [])
    for (name, alias, argument), values in accounts.items():
        for block in document.get("provider", {}).get(name, ()):
            if any(block.get(other) for other in conflicts[name]):
                continue
            # Of two accounts neither is the one.
            if block.get("alias", "") == alias and argument not in block and len(values) == 1:
                [(value, listed)] = values
                block[argument] = [value] if listed else value


def accounts(resources: Sequence[Resource]) -> str:
    """Says in which accounts, or their like, *resources* are; empty where their clouds name none."""
    rows = {
        (row["field"], value)
        for each in _made(resources)
        for row in each.data.terraform.get("place", ())
        if "argument" in row and (value := _value(row, each.resource.attributes))
    }
    return " ".join(f"The resources of the stack are in the {field} {value}." for field, value in sorted(rows))


def refuse_gone(stack: SynthesizedStack, resources: Sequence[Resource], plan: Plan, *, destroy: bool) -> None:
    """Raises `WrongAccount` where *plan*, of a deploy or a destroy, finds no machine of a pool, nor all of the rest.

    That is how credentials of another account look where the provider has no account to compare. What is taken back,
    was removed by hand, or has ended itself is a machine, which takes along what is attached to it, and leaves the
    rest. Machines that are all that a pool has are not judged.
    """
    found = _made(resources)
    made = [each.resource for each in found if each.resource.type not in each.data.terraform.get("attached", ())]
    gone = set(plan.gone)
    if plan.run is not None:
        # The text of a run elsewhere does not name all that was not found, but what is made again.
        gone |= {address for action, address in plan.changes if action == "create"}
    elif destroy:
        # Of a destroy Terraform says nothing about what it has not found; it does not destroy that.
        gone = {each.address for each in made} - {address for _, address in plan.changes}
    for module in dict.fromkeys(each.call for each in made if each.module):
        mine = [each for each in made if each.call == module]
        machines = [each for each in mine if machines_of(each.type, each.attributes) is not None]
        others = [each for each in mine if each not in machines]
        lost = [each for each in mine if each.address in gone]
        if machines and all(each in lost for each in machines) and any(each in lost for each in others):
            verb = "destroy" if destroy else "deploy"
            raise WrongAccount(
                f"of the pool {mine[0].module} the cloud finds none of {counted(len(machines), 'machine')}, and "
                f"{len(lost)} of its {counted(len(mine), 'resource')} not at all: "
                "these credentials are probably of another account",
                hint="Nothing was changed. Use the credentials that made them. Where they were removed by other means, "
                f"say so: skyinfra {verb} {stack.name} --gone",
            )
