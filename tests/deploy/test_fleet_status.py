"""What `skyinfra status` says of a stack: of all of its pools, or of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.deploy.fleet_status import stack_status
from skyinfra.terraform.synthesized import SynthesizedStack


def test_one_pool_of_several_and_none_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a state without resources has them.
    monkeypatch.setattr(SynthesizedStack, "fleets", lambda _: {})
    monkeypatch.setattr(SynthesizedStack, "resources", lambda _: ())
    pools = [sky.ComputePool(name=name, provider=sky.Local(simulate=True), accelerator="L4") for name in ("a", "b")]
    stack = synthesized(tmp_path, *pools)
    assert [each["pool"] for each in stack_status(stack)["pools"]] == ["a", "b"]
    [one] = stack_status(stack, "b")["pools"]
    assert (one["fleet"], one["deployed"]) == ("s/b", False)
    with pytest.raises(sky.PoolNotFound, match="Its pools: a, b"):
        stack_status(stack, "c")
