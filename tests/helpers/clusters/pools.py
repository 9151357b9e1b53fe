"""Pools that Slurm and Kubernetes can carry, and what is rendered of them."""

from __future__ import annotations

from typing import Any

import yaml

import skyinfra as sky
from skyinfra.bootstrap import clusters
from skyinfra.bootstrap.clusters import Declared
from skyinfra.compiler import compile_pool
from skyinfra.engine.credentials import Credentials
from skyinfra.stack import describe, module_inputs

WHEEL = "skyinfra-0.1.0+0123456789ab-py3-none-any.whl"
SECRET = "0123456789abcdef" * 4


def certificate() -> str:
    """One in PEM."""
    security = Credentials.derive(SECRET, role="client", name="test").security()
    return str(security.tls_ca_file)


ODD = {"PRICE": "$5 $$5 $(HOME) $$(HOME) `touch x` $(touch y) \\n \\\\ \"quoted\" 'é'\n", "PLAIN": "1"}


def declared(**fields: Any) -> Declared:
    given: dict[str, Any] = {"name": "mig", "nodes": 2, "provider": sky.AWS(), **fields}
    deployment = compile_pool(sky.ComputePool(**given), given.pop("stack", "lab"))
    return clusters.declared(deployment.stack, module_inputs(deployment, "."), describe(deployment), python="3.11")


def documents(pool: Declared) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(clusters.render(pool, "kubernetes", wheel=None if pool.runner else WHEEL)[1]))


def stateful_set(pool: Declared) -> dict[str, Any]:
    return next(each for each in documents(pool) if each["kind"] == "StatefulSet")


POOLS: dict[str, dict[str, Any]] = {
    "mixed": {"accelerator": "H100:8/3g.40gb+2g.20gb+1g.10gb+me", "vcpus": 4, "memory_gb": 32.5, "disk_gb": 100},
    "whole": {"accelerator": "L4", "image": sky.Image(runner="skyinfra==0.1.0", env=ODD)},
    "cpu": {"provider": sky.Local(), "worker": sky.Worker(concurrency=2)},
    "simulated": {"provider": sky.Local(simulate=True), "accelerator": "H100/3g.40gb"},
}
