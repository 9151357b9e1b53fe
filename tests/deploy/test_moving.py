"""Pools that move to another stack: with a real Terraform, from one state into another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyinfra.deploy.moving import move
from skyinfra.errors import NotSupported, PlaceChanged, PoolNotFound
from skyinfra.terraform.synthesized import SynthesizedStack

BUILT_IN = 'provider["terraform.io/builtin/terraform"]'
AWS = 'provider["registry.terraform.io/hashicorp/aws"].us-east-1'


def resource(pool: str, *, type: str = "terraform_data", provider: str = BUILT_IN, **attributes: Any) -> dict[str, Any]:
    instance = {"schema_version": 0, "attributes": {"id": pool, **attributes}, "sensitive_attributes": []}
    where = {"module": f"module.{pool}", "mode": "managed", "type": type, "name": "secret", "provider": provider}
    return {**where, "instances": [instance]}


def stack(folder: Path, name: str, *resources: dict[str, Any], pools: Any = (), **more: Any) -> SynthesizedStack:
    """A stack with a state of *resources*, in a project's folder."""
    made = folder / "cdktf.out" / "stacks" / name
    made.mkdir(parents=True)
    backend = {"local": {"path": f"../../../terraform.{name}.tfstate"}}
    (made / "cdk.tf.json").write_text(json.dumps({"terraform": {"backend": backend}}))
    if resources:
        state = {"version": 4, "terraform_version": "1.5.0", "serial": 3, "lineage": name, "outputs": {}}
        (folder / f"terraform.{name}.tfstate").write_text(json.dumps({**state, "resources": resources}))
    described = tuple({"name": pool, "provider": kind} for pool, kind in pools)
    return SynthesizedStack(name, made, described, more.pop("modules", {}), backend=backend, **more)


def test_a_pool_moves_and_the_others_stay(tmp_path: Path, terraform_program: str) -> None:
    old = stack(tmp_path, "old", resource("train", input="secret"), resource("serve"))
    new = stack(tmp_path, "new", resource("web"), pools=[("train", "aws"), ("web", "aws")])
    assert move(old, new, "train") == ("train",)
    assert [each.module for each in old.resources()] == ["serve"]
    assert {each.module: each.attributes.get("input") for each in new.resources()} == {"train": "secret", "web": None}


def test_all_pools_of_a_stack_move_to_one_that_was_never_deployed(tmp_path: Path, terraform_program: str) -> None:
    old = stack(tmp_path, "old", resource("train"), resource("serve"))
    new = stack(tmp_path, "new", pools=[("train", "aws"), ("serve", "aws")])
    assert move(old, new) == ("serve", "train")
    assert not old.resources() and {each.module for each in new.resources()} == {"train", "serve"}


def test_a_pool_that_cannot_be_moved_stays(tmp_path: Path) -> None:
    old = stack(
        tmp_path, "old", resource("train", type="aws_instance", provider=AWS, arn="arn:aws:ec2:us-east-1:1:i/a")
    )
    empty = stack(tmp_path, "empty")
    local = stack(tmp_path, "local", pools=[("train", "local")])
    taken = stack(tmp_path, "taken", resource("train"), pools=[("train", "aws")])
    elsewhere = stack(
        tmp_path,
        "elsewhere",
        pools=[("train", "aws")],
        modules={"train": {"providers": {"aws": "aws.us-west-2"}}},
        providers={"aws": [{"alias": "us-west-2", "region": "us-west-2"}]},
    )
    before = [each.address for each in old.resources()]
    for target, error in (
        (empty, PoolNotFound),
        (local, NotSupported),
        (taken, NotSupported),
        (elsewhere, PlaceChanged),
    ):
        with pytest.raises(error):
            move(old, target)
    with pytest.raises(PoolNotFound, match="has no such pool"):
        move(old, taken, "other")
    with pytest.raises(PoolNotFound, match="has no pools"):
        move(empty, taken)
    assert [each.address for each in old.resources()] == before
