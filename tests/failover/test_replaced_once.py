"""``skyinfra deploy --replace``: made anew once, also where a deploy of several places has several applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.cli import stacks
from skyinfra.terraform.project import Project
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
