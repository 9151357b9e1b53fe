"""``--replace``: made anew once, also where a deploy of several places has several applies; a plan shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from terraform_projects.synthesized import synthesized
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli import stacks
from skyinfra.cli.app import app
from skyinfra.deploy import apply
from skyinfra.terraform.program import Plan, Terraform
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack
from skyinfra.terraform.text import Event

ADDRESSES = ("module.cpu.terraform_data.a", "module.cpu.terraform_data.b", "module.cpu.terraform_data.c")


def test_what_an_attempt_has_replaced_is_not_replaced_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def carry_out(_: object, *, replace: Any, on_event: Any, **others: object) -> None:
        asked.append(list(replace))
        first, second, third = ADDRESSES
        # One as it is asked for, one in a module that the pool's calls; of the last one the creation fails.
        for address in (first, second.replace("cpu.", "cpu.module.hosts."), third):
            on_event(Event("done", address, "delete"))
            on_event(Event("failed" if address == third else "done", address, "create"))

    monkeypatch.setattr(stacks, "carry_out", carry_out)
    stack = synthesized(tmp_path, sky.ComputePool(name="cpu", provider=sky.Local()))
    failover = stacks.failover_of(stack, Project.find(tmp_path), auto_approve=True, replace=ADDRESSES)
    failover.attempt(stack)
    failover.attempt(stack, again=True)
    assert asked == [list(ADDRESSES), [ADDRESSES[2]]]


def test_a_plan_shows_what_a_deploy_would_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = synthesized(tmp_path, sky.ComputePool(name="cpu", provider=sky.Local()))
    asked: list[list[str]] = []

    @contextmanager
    def plan(_: object, *, replace: Any, **others: object) -> Iterator[Plan]:
        asked.append(list(replace))
        yield Plan(file=tmp_path / "plan", changes=(("replace", ADDRESSES[0]),))

    monkeypatch.setattr(apply, "_plan", plan)
    monkeypatch.setattr(stacks, "synthesize", lambda name, fresh: stack)
    monkeypatch.setattr(SynthesizedStack, "resources", lambda self: ())
    monkeypatch.setattr(SynthesizedStack, "fleets", lambda self: {})
    monkeypatch.setattr(SynthesizedStack, "prepared", lambda self, anew: Terraform(tmp_path))
    given = [word for address in ADDRESSES[:2] for word in ("--replace", address)]
    done = CliRunner().invoke(app, ["plan", *given, "--json"], catch_exceptions=False)
    assert done.exit_code == 0 and ADDRESSES[0] in done.stdout
    # As of a deploy, each also in the modules that the pool's calls.
    assert asked == [list(apply.wherever(ADDRESSES[:2]))] and set(ADDRESSES[:2]) < set(asked[0])
