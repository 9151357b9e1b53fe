"""Gangs of JAX: what its ranks read, how they meet, and the hosts of a TPU slice."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from tasks_on_nodes.gangs import environment, none

import skyinfra as sky
from skyinfra.client import open_pool, ranks
from skyinfra.protocol.gang import Work
from skyinfra.protocol.manifest import ManifestSlot
from skyinfra.submission.snapshot import Target


@pytest.mark.slow
def test_ranks_have_what_jax_reads(pool):
    found = pool.launch(environment, framework="jax", per_node=1, env={"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})
    assert [each["JAX_PROCESS_ID"] for each in found] == ["0", "1"]
    assert {each["JAX_NUM_PROCESSES"] for each in found} == {"2"}
    (address,) = {each["JAX_COORDINATOR_ADDRESS"] for each in found}
    assert address.startswith("127.0.0.1:")
    # Each sees one partition, and what the call says stands above our defaults.
    assert not any("JAX_LOCAL_DEVICE_IDS" in each for each in found)
    assert found[0]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


JAX = """
import os, socket, sys

class distributed:
    met = None

    def initialize(address, num_processes, process_id):
        place = address.rpartition(":")[0], int(address.rpartition(":")[2])
        if process_id == 0:
            with socket.create_server(place) as server:
                for _ in range(num_processes - 1):
                    server.accept()[0].sendall(b"!")
        else:
            while True:
                try:
                    with socket.create_connection(place) as found:
                        assert found.recv(1)
                    break
                except ConnectionRefusedError:
                    pass
        distributed.met = process_id, num_processes
"""


def met() -> tuple[int, int] | None:
    jax = sys.modules.get("jax")
    return jax.distributed.met if jax else None


@pytest.mark.slow
def test_the_plugin_of_jax_lets_ranks_meet_before_they_begin(pool, tmp_path):
    # JAX itself is what tests/client/test_client_jax.py has.
    (tmp_path / "jax.py").write_text(JAX)
    env = {"PYTHONPATH": str(tmp_path), **sky.plugins.jax().variables}
    assert pool.launch(met, framework="jax", per_node=1, env=env) == [(0, 2), (1, 2)]
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(5 if sys.modules['jax'].distributed.met else 6)\n")
    with pytest.raises(sky.GangFailed, match="exit code 5"):
        pool.launch(script, framework="jax", per_node=1, env=env)
    # Ranks of anything else do not.
    assert none(pool, met, per_node=1, env=env) == [None, None]


def test_a_gang_has_all_hosts_of_a_tpu_slice(pool):
    """The slots of this fleet are no hosts, but its manifest may say so."""
    slice_ = replace(pool.manifest, slots=(ManifestSlot(0, "host", "TPUv4-16"),))

    def nodes_of(nodes: int | None, framework: str, **where: str) -> int | None:
        return ranks.nodes_of(slice_, ranks.Launch(Work("f"), Target(**where), nodes, 1, framework))

    assert nodes_of(None, "jax") == nodes_of(2, "torch") == 2
    assert nodes_of(1, "none", node="n0") == 1 and nodes_of(None, "none") is None
    for nodes, where in ((1, {}), (3, {}), (None, {"node": "n1"}), (None, {"slot": "n1/0"})):
        with pytest.raises(sky.InvalidField, match="the 2 hosts of a TPU slice run one program"):
            nodes_of(nodes, "jax", **where)
    with open_pool(slice_) as hosts:
        with pytest.raises(sky.InvalidField, match="the 2 hosts"):
            hosts.launch(environment, framework="jax", nodes=1)
        assert len(hosts.launch(environment, framework="jax", per_node=1)) == 2
