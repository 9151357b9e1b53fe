"""Machines that a deploy has made and whose answer never came: looked for before another one is made in their place.

A cloud's answer that is lost leaves a machine that costs money and that no state has, so that the next apply makes one
more (hashicorp/terraform-provider-aws#19115, #23928). Clouds where two machines cannot have one name refuse that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from skyinfra.deploy.last_run import last_run
from skyinfra.errors import MissingDependency, ProjectError, StrayMachine, TerraformFailed, TerraformNotFound
from skyinfra.failover.live_places import at_place
from skyinfra.preflight.existing import Existing, is_asked, outside
from skyinfra.preflight.pool_inputs import log_in_otherwise, logins
from skyinfra.preflight.rest import Unanswered
from skyinfra.providers import machines_of, read
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

Pool = Mapping[str, Any]


def refuse_strays(stack: SynthesizedStack, say: Callable[[str], object]) -> None:
    """Raises `StrayMachine` where a pool whose deploy did not end has a machine outside of the state."""
    run = last_run(stack)
    if run is not None and run.running:
        return  # the machine may be that of the other deploy, which has the lock of the state
    found = list(strays(stack, say))
    if found:
        raise StrayMachine(
            "\n".join(
                [
                    "a deploy that did not end, or a deploy that runs elsewhere now, has made what no state has",
                    *(_line(*each) for each in found),
                ]
            ),
            hint="\n".join(
                [
                    f"See first that no other deploy of {stack.name} runs, on another machine or in CI: it may be what "
                    "that one makes. If none does:",
                    *dict.fromkeys(each.end for _, each in found),
                    "Then deploy again: nothing was made or changed now.",
                ]
            ),
        )


def stray_lines(stack: SynthesizedStack) -> list[str]:
    """Returns sentences on the machines that a deploy, which has just ended without an answer, left behind."""
    return [f"{_line(*each)}. {each[1].end}" for each in strays(stack, lambda _: None)]


def _line(fleet: str, stray: Existing) -> str:
    where = f" in {stray.where}" if stray.where else ""
    return f"{fleet}: the machine {stray.id}{where} is there, and in no state"


def strays(stack: SynthesizedStack, say: Callable[[str], object]) -> Iterator[tuple[str, Existing]]:
    """Yields the machines of *stack* that no state has, each with its fleet. say: is told where nobody can know.

    Asked is only of pools of which the state has a part, and fewer machines than declared.
    """
    if stack.runs_elsewhere:
        return  # its credentials are there
    try:
        resources = stack.resources()
    except (ProjectError, TerraformFailed, TerraformNotFound):
        return  # the plan says it
    for pool in stack.pools:
        for place in pool.get("places") or [{**pool, **_configured(stack, pool)}]:
            mine = [each for each in resources if each.call == place["module"]]
            if not _unfinished(pool, mine):
                continue
            fleet = f"{stack.name}/{pool['name']}"
            try:
                arguments = logins(read(place["provider"]), _block(stack, pool, place))
                if arguments and is_asked(place["provider"]):
                    raise Unanswered("credentials", log_in_otherwise(arguments))
                found = outside(stack.name, at_place(pool, place), mine)
            except (Unanswered, MissingDependency) as error:
                why = error.reason if isinstance(error, Unanswered) else error.message
                say(f"{fleet}: whether an earlier deploy has left a machine is not known: {why}")
                continue
            yield from ((fleet, each) for each in found or ())


def _block(stack: SynthesizedStack, pool: Pool, place: Pool) -> dict[str, Any]:
    """Returns the provider block of a *place*; of one of several, where it is the stack's own."""
    if "places" in pool:
        return stack.block(place["own"]) if place.get("own") else {}
    return stack.configuration(pool["name"])


def _configured(stack: SynthesizedStack, pool: Pool) -> dict[str, Any]:
    """Returns the module, and the region and account of the provider block, of a *pool* with one place."""
    found = stack.configuration(pool["name"])
    region = found.get("region") or pool.get("region")
    return {"module": stack.module_of(pool["name"]), "region": region, "account": found.get("profile")}


def _unfinished(pool: Pool, resources: Sequence[Resource]) -> bool:
    """Returns whether a deploy has begun with the pool there, and has not made all machines that Terraform makes."""
    machines = [each for each in resources if machines_of(each.type, each.attributes) and "group" not in each.type]
    begun = any(each.name == "secret" for each in resources)
    return begun and len(machines) < (1 if pool.get("head") else pool["nodes"])
