from __future__ import annotations

import os

import skyinfra as sky


@sky.compute
def double(x: int) -> int:
    """Doubles."""
    return 2 * x


@sky.compute
def where() -> tuple[str, str]:
    return sky.instance_info().slot, os.environ["CUDA_VISIBLE_DEVICES"]


def test_one_slot(pool):
    assert double(21) >> pool == 42


def test_every_slot_in_slot_order_with_its_own_device(pool):
    assert where() @ pool == [(f"n{n}/{i}", f"MIG-n{n}-{i}") for n in (0, 1) for i in (0, 1)]
