"""Checkpoints in a bucket, of a task whose fleet goes away: another fleet goes on where it was."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from checks.leaks import files_with

import skyinfra as sky
from skyinfra.client import open_pool

URL = "s3://runs/moved"


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from servers.buckets import BucketServer  # slots import this module, and need no server

    with BucketServer().serving() as server:
        yield server


@sky.compute(secrets=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def train(endpoint: str, steps: int, stays_at: int | None) -> tuple[int, list[int]]:
    """Returns at which step it began, and the steps that its state has seen."""
    os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
    checkpoints = sky.SpotCheckpointer(URL, keep=1)
    state, step = checkpoints.load_latest() or ([], 0)
    began = step
    while step < steps:
        state, step = [*state, step], step + 1
        checkpoints.save(state, step)
        while step == stays_at:
            time.sleep(0.1)
    return began, state


@pytest.mark.slow
def test_another_fleet_goes_on_where_one_was_taken_back(
    fleets, server: Any, monkeypatch: pytest.MonkeyPatch, wait_until
) -> None:
    key = f"k3y-{uuid.uuid4().hex}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key)
    first = fleets(nodes=("n0",))
    with open_pool(first.manifest, timeout=2, patience=2) as pool:
        pool.submit(train(server.url, 6, 3))
        wait_until(lambda: any("step-000000000003" in each and "whole" in each for each in server.names()))
        first.kill()
    second = fleets(nodes=("n0",))
    with open_pool(second.manifest) as pool:
        assert train(server.url, 6, None) >> pool == (3, [0, 1, 2, 3, 4, 5])
    # One is left, and the key is in no file of either fleet.
    assert [name.rpartition("/")[2] for name in server.names()] == ["data", "whole.json"]
    assert not [*files_with(key, first.root), *files_with(key, second.root)]
