"""Gangs of JAX on the CPU: ranks meet at their coordinator, compute together, and fail together.

JAX is in a folder that only the ranks of these tests see: no other test has it, nor has the virtual environment.
"""

from __future__ import annotations

import pytest
from support import ROOT, missing

import skyinfra as sky

pytestmark = pytest.mark.slow
JAX = ROOT / "build" / "jax"


@pytest.fixture
def variables() -> dict[str, str]:
    """The environment in which JAX can be imported, and uses the CPU."""
    if not JAX.is_dir():
        missing("JAX, which `make jax` brings,")
    return {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(JAX)}


def meet() -> int:
    """As docs/tasks.md says it; the rank, as JAX knows it."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    gang = sky.gang()
    jax.distributed.initialize(num_processes=gang.world_size, process_id=gang.rank)
    return int(jax.process_index())


def gather() -> tuple[int, int, list[float]]:
    rank = meet()
    import jax
    from jax.experimental import multihost_utils

    found = multihost_utils.process_allgather(jax.numpy.ones(2) * rank)
    jax.distributed.shutdown()
    return rank, jax.process_count(), found.sum(axis=1).tolist()


def gather_here() -> tuple[int, int, list[float]]:
    """As `gather`, where the plugin has initialized `jax.distributed`."""
    import jax
    from jax.experimental import multihost_utils

    found = multihost_utils.process_allgather(jax.numpy.ones(2) * jax.process_index())
    return int(jax.process_index()), jax.process_count(), found.sum(axis=1).tolist()


def fail() -> None:
    rank = meet()
    import jax
    from jax.experimental import multihost_utils

    if rank == 2:
        raise FloatingPointError("the loss is not a number")
    multihost_utils.process_allgather(jax.numpy.ones(2))


def launch(pool, target, **options):
    """A gang whose ranks share GPUs, as partitions do, which it warns of."""
    with pytest.warns(sky.GangWarning):
        return pool.launch(target, framework="jax", **options)


def test_ranks_meet_at_their_coordinator(pool, variables):
    assert launch(pool, gather, env=variables) == [(rank, 4, [0.0, 2.0, 4.0, 6.0]) for rank in range(4)]


def test_the_plugin_initializes_jax_distributed(pool, variables):
    given = {**variables, **sky.plugins.jax().variables, "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    assert launch(pool, gather_here, env=given) == [(rank, 4, [0.0, 2.0, 4.0, 6.0]) for rank in range(4)]


def test_a_rank_that_fails_ends_those_that_wait_for_it(pool, variables):
    with pytest.raises(FloatingPointError, match="the loss is not a number") as caught:
        launch(pool, fail, env=variables)
    assert caught.value.__notes__ == ["Raised by rank 2 of fail, on slot n1/0 of node n1."]
    assert launch(pool, gather, env=variables)[3][0] == 3
