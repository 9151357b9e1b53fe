"""Preflight: whether a cloud offers this account the resources of a synthesized stack.

An explicit step with live look-ups; nothing else needs it, and synthesizing never asks a cloud.
"""

from __future__ import annotations

from typing import Any

from skyinfra.preflight.report import Line, Report, Result
from skyinfra.terraform.project import SynthesizedStack

__all__ = ["Line", "Report", "Result", "preflight"]


def preflight(stack: SynthesizedStack, *, session: Any = None, workers: int | None = None) -> Report:
    """Checks the resources of the pools of *stack*; creates nothing.

    session: a boto3 session to ask AWS with; None takes the credentials that Terraform would. workers: how many
    questions at a time. Raises `MissingDependency` where boto3 is needed and not there.
    """
    from skyinfra.preflight import aws
    from skyinfra.preflight.pool_inputs import read

    inputs = [read(stack, pool) for pool in stack.pools if pool["provider"] == "aws"]
    checked = aws.check_pools(inputs, session=session, workers=workers or aws.WORKERS) if inputs else {}
    lines = [line for pool in stack.pools for line in checked.get(pool["name"]) or [_unchecked(pool)]]
    return Report(stack.name, tuple(lines))


def _unchecked(pool: dict[str, Any]) -> Line:
    here = {
        "local": "processes on this machine",
        "container": "containers, whose engine the deploy asks",
        "ssh": "machines of yours, which the deploy asks",
    }
    if (kind := pool["provider"]) in here:
        return Line(pool["name"], kind, "pass", f"nothing to check: its nodes are {here[kind]}")
    found = f"preflight does not know how to ask {pool['provider']}"
    return Line(pool["name"], pool["provider"], "warn", found, "See in its console whether it has the machines.")
