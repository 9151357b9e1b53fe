"""The parts that the documents of ``--json`` share: pools, nodes, slots, offers, layouts and what they cost.

A shape is a dictionary of fields (``"name?"`` may be missing; ``"*"`` is any name), a list of one shape, a tuple of
alternatives, or a type; `tools.schemas` makes JSON Schemas of them.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

from skyinfra.deploy.last_run import LastRun
from skyinfra.offers import Offer, Price
from skyinfra.places.choices import Refused
from skyinfra.preflight.report import Line
from skyinfra.protocol.fleet import LayoutChange, NodeFailure, SizeState
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.readings import Progress, SlotReading
from skyinfra.providers import Machines
from skyinfra.recommendation.memory import Split
from skyinfra.recommendation.models import Model
from skyinfra.submission.fleet import RunningTask

Shape = Any


def fields(kind: Any, *without: str) -> dict[str, Shape]:
    """Returns the fields of a dataclass as a shape; those that an older version does not write may be missing."""
    hints = typing.get_type_hints(kind)
    return {
        f"{field.name}{'?' if field.metadata.get('later') else ''}": hints[field.name]
        for field in dataclasses.fields(kind)
        if field.name not in without
    }


PLACE = {"profile": str, "start": int, "size": int}
# One of the places of a pool that has several.
OF_POOL = {
    "place": str,
    "module": str,
    "provider": str,
    "region?": str,
    "zones": [str],
    "account?": str,
    "profile?": str,
    "own?": str,
    "machine_types": [str],
    "accelerator?": str,
    "accelerators_per_node?": int,
    "grouped?": bool,
    "head?": str,
    "hourly_cost?": float,
    "usd_per_hour?": float,
    "price_note": str,
}
POOL = {
    "name": str,
    "provider": str,
    "nodes": int,
    "min_nodes?": int,
    "scale?": [int],
    "machine_types": [str],
    "accelerator?": str | None,
    "accelerators_per_node?": int,
    "slots_per_node": int,
    "simulated": bool,
    "spot?": bool,
    "region?": str | None,
    "hourly_cost?": float | None,
    "price_note": str,
    "prices?": {"*": Price},
    "head?": str | None,
    "head_price?": Price | None,
    "preferences?": [str],
    "drain_seconds?": float,
    "follow?": Any,
    "budget?": {"usd": float, "action": str},
    "vcpus?": int,
    "memory_gb?": float,
    "max_hourly_cost?": float,
    "stop_after_idle?": str,
    "max_lifetime?": str,
    "layouts_follow?": bool,
    "replace_sick?": bool,
    "volumes?": [Any],
    "module?": str,
    "place?": str,
    "places?": [OF_POOL],
    "by_price?": bool,
}
# Times are those of ISO 8601, in UTC; usd is for all of it.
ON_SALE = {
    "id": str,
    "machine_type": str,
    "count": int,
    "zone": str,
    "begins": str,
    "ends": str,
    "hours": int,
    "usd": float,
    "usd_per_hour": float,
}
# A place of a pool, as `offers --for` shows it. checks: what its cloud says now; null where nobody asked.
CANDIDATE = {
    **OF_POOL,
    "selected": bool,
    "blocked_until": str | None,
    "state": str,
    "refused": ({**fields(Refused), "age_seconds": int}, None),
    "usd_per_hour_now": float | None,
    "checks": ([Line], None),
}
POOL_COST = {
    "pool": str,
    "region": str | None,
    "nodes": int,
    "machine_type": str,
    "free": bool,
    "price": Price | None,
    "head": ({"machine_type": str, "price": Price | None}, None),
    "dearest": ({"machine_type": str, **fields(Price)}, None),
    "usd_per_hour": float | None,
    "usd_per_30_days": float | None,
    "least?": {"nodes": int, "usd_per_hour": float | None, "usd_per_30_days": float | None},
    "note": str,
}
COST = {"usd_per_hour": float, "usd_per_30_days": float, "unknown": [str], "pools": [POOL_COST]}
RUNNING_COST = {"usd_per_hour": float, "unknown": [str], "machines": [Machines]}
CHANGES = {"stack": str, "changes": [{"action": str, "address": str}], "run?": str, "cost?": COST}
EXISTING = ({"resources": int, "text": str, "failed": [str], "cost": RUNNING_COST}, None)
# In place of a fleet that is not there, when it was kept last.
KEPT = {"at": float, "where": str, "fleet": Literal["gone", "unreachable"]}
# What is missing has no place and no fleet.
SLOT = {
    **{f"{name.rstrip('?')}?": shape for name, shape in fields(InstanceInfo).items()},
    "worker": int,
    "slot": str,
    "kind": str | None,
    "state": Literal["ready", "missing", "draining", "sick"],
    "waits_for?": [str],
    "tasks": [RunningTask],
    "sick": str | None,
}
GPU = {
    "gpu": int,
    "accelerator": str,
    "units": int,
    "partitions": [
        {
            "profile": str | None,
            "start": int | None,
            "size": int | None,
            "worker": int,
            "uuid": str | None,
            "tasks": [RunningTask],
        }
    ],
    "missing": int,
}
NODE = {
    "name": str,
    "id": str,
    "head": bool,
    "address": str,
    "machine_type": str | None,
    "state": str,
    "failed": NodeFailure | None,
    "drain_reason": str | None,
    "leaving": str | None,
    "sick": str | None,
    "unwatched": str | None,
    "stops": str | None,
    "silent_seconds": float | None,
    "behind": bool,
    "slots": [SLOT],
    "gpus": [GPU],
}
BUDGET = ({"usd": float, "action": str, "spent_usd": float | None, "fraction": float | None}, None)
# What something has cost, of which the price may not be known.
AMOUNT = {"hours": float, "usd": float | None}
SPENT = {
    "pool": str,
    "fleet": str,
    "source": Literal["head", "kept", None],
    "problem": str | None,
    "at": float | None,
    "free": bool,
    **AMOUNT,
    "estimated": bool,
    "nodes": [
        {
            "node": str,
            "machine_type": str,
            "price": Price | None,
            "source": str,
            "free": bool,
            "began": float,
            "ended": float | None,
            **AMOUNT,
            "estimated": bool,
        }
    ],
    "submitters": [{"submitter": str, "slot_hours": float, **AMOUNT}],
    "jobs": [{"kind": str, "name": str, "submitter": str, "slot_hours": float, **AMOUNT}],
    "idle": AMOUNT,
    "not_counted": [str],
    "unknown": [str],
    "budget": BUDGET,
}
FLEET = {
    "pool": str,
    "fleet": str,
    "deployed": Literal[True],
    "provider": str,
    "simulated": bool,
    "head": {"address": str, "port": int},
    "problem": str | None,
    "runner": str | None,
    "upgrade": str | None,
    "group_nodes": int,
    "replace_sick": bool,
    "spent": ({"text": str, **AMOUNT, "estimated": bool, "unknown": [str], "budget": BUDGET}, None),
    "follow": ({"among": [str], "idle_seconds": float, "keep": str, "changes": [LayoutChange]}, None),
    "size": (fields(SizeState, "slots", "lack", "said"), None),
    "nodes": [NODE],
}
ABSENT = {"pool": str, "fleet": str, "deployed": Literal[False], "existing": EXISTING, "standing": EXISTING}
BLOCK = (
    {
        "program": str | None,
        "pid": int | None,
        "began": str | None,
        "running": bool,
        "text": str,
        "cost": RUNNING_COST,
    },
    None,
)
STACK = {
    "stack": str,
    "pools": [(FLEET, ABSENT)],
    "incomplete": bool,
    "existing": EXISTING,
    "standing": EXISTING,
    "last_run": LastRun | None,
    "block": BLOCK,
}
ORPHAN = {
    "stack": str,
    "workspace": str | None,
    "state": str,
    "resources": int,
    "cost": RUNNING_COST,
    "problem": str | None,
}
OFFER = {
    **fields(Offer),
    "carries": str,
    "share_gb": float,
    "vendor": str,
    "mig_model": str | None,
    "partitioned_by": str | None,
    "deployable": bool,
    "not_deployable_because": str | None,
    "refused_because": str | None,
    "sold_on_demand": bool,
    "rdma": str | None,
    "selected": bool,
    "chosen": bool,
}
USE = {
    **fields(InstanceInfo),
    **fields(SlotReading, "slot"),
    "tasks": [{**fields(RunningTask), "progress": Progress | None}],
}
PICTURE = {
    "partitions": [
        {
            **PLACE,
            "memory_gb": int,
            "memory_slices": int | None,
            "compute_slices": int,
            "sm": int | None,
            "expected": bool,
        }
    ],
    "free": [{"start": int, "size": int}],
    "compute_slices": {"used": int, "total": int | None},
    "memory_slices": {"used": int, "total": int | None},
    "fitting": [str],
    "joinable": [str],
    "min_driver": str | None,
    "missing": {"*": int},
    "why": str | None,
    "instead": [str],
}
GPU_CHANGE = {
    "node": str,
    "gpu": int,
    **{name: [PLACE] for name in ("before", "after", "kept", "destroyed", "created", "stays", "goes", "comes")},
    "ends": {"*": [str]},
}
SOURCES = {"name": str | None, "profile_id": str | None, "starts": str | None}
MACHINES = {
    "nodes": int,
    "provider": str,
    "machine_type": str,
    "region": str | None,
    "accelerator": str,
    "price": Price,
    "gpus": [{"layout": str | None, "partitions": [PLACE]}],
}

CHOICE = {
    "nodes": int,
    "provider": str,
    "machine_type": str,
    "region": str | None,
    "accelerator": str,
    "slot": str | None,
    "memory_gb": float,
    "needs": float,
    "split": Split,
    "how": str,
    "copies": int,
    "price": Price,
    "spot": Price | None,
    "cost_per_hour": float,
    "cost_per_copy": float,
    "note": str,
    "source": str,
}
# What is not known of a model is left out.
MODEL = {f"{name}{'' if name in ('name', 'params', 'source') else '?'}": each for name, each in fields(Model).items()}
