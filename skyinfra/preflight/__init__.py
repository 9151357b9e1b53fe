"""Preflight: whether a cloud offers this account the resources of a synthesized stack.

An explicit step with live look-ups; nothing else needs it, and synthesizing never asks a cloud.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from skyinfra.preflight.report import Line, Report, Result
from skyinfra.providers import kinds, read
from skyinfra.terraform.synthesized import SynthesizedStack

__all__ = ["Line", "Report", "Result", "preflight"]


def preflight(
    stack: SynthesizedStack,
    *,
    session: Any = None,
    workers: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Checks the resources of the pools of *stack*, as the data file of each provider says; creates nothing.

    session: a boto3 session to ask AWS with; None takes the credentials that Terraform would. workers: how many
    questions at a time. environment: with the keys of other providers; None is that of the process. Raises
    `MissingDependency` where boto3 is needed and not there.
    """
    from skyinfra.preflight import clouds

    by_module: dict[str, list[dict[str, Any]]] = {}
    asked, lines = [], {}
    for pool in stack.pools:
        table = read(pool["provider"]).preflight if pool["provider"] in kinds() else None
        if table is None:
            lines[pool["name"]] = [_unknown(pool)]
        elif table.nothing:
            lines[pool["name"]] = [Line(pool["name"], pool["provider"], "pass", f"nothing to check: {table.nothing}")]
        elif table.module:
            by_module.setdefault(table.module, []).append(pool)
        else:
            asked.append(pool)
    for module, pools in by_module.items():
        lines |= importlib.import_module(module).check(stack, pools, session=session, workers=workers)
    lines |= clouds.check_pools(clouds.with_existing(stack, asked), environment=environment)
    return Report(stack.name, tuple(line for pool in stack.pools for line in lines[pool["name"]]))


def _unknown(pool: dict[str, Any]) -> Line:
    found = f"preflight does not know how to ask {pool['provider']}"
    return Line(pool["name"], pool["provider"], "warn", found, "See in its console whether it has the machines.")
