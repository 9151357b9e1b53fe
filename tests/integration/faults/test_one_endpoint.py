"""A fleet of which only the head's one port can be connected to: workers open every other connection themselves."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces.fleet import LAYOUT, READY_S, Fleet, links
from support import first_fast, missing
from terraform_projects.commands import until

import skyinfra as sky

pytestmark = [pytest.mark.xdist_group("faults-endpoint")]

MB = 2**20


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes; the second one cannot be connected to at all."""
    if shutil.which("nft") is None:
        missing("nft (nftables)")
    with links() as made:
        fleet = Fleet(tmp_path_factory.mktemp("endpoint"), made, nodes=2, closed=True)
        with contextlib.closing(fleet):
            fleet.settled()
            yield fleet


@sky.compute
def made(size: int) -> bytes:
    return bytes(size)


@sky.compute
def node() -> str:
    return sky.instance_info().node


@sky.compute
def pid() -> int:
    return os.getpid()


@sky.compute
def wrote(name: str, size: int) -> None:
    folder = Path(os.environ["SKYINFRA_NODE_DIR"], "files")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(bytes(size))


@sky.compute
def slept(file: str) -> None:
    Path(file).touch()
    while True:
        time.sleep(0.05)


@pytest.mark.parametrize("size", first_fast([20 * MB, 100, 9_000, MB]))
def test_results_of_every_size_come_from_a_node_that_nobody_can_connect_to(behind: Fleet, size: int) -> None:
    with behind.connect() as pool:
        there = pool.select(node="n1")
        assert len(there.slots()) == len(LAYOUT)
        futures = [there.submit(made(size)) for _ in range(6)]
        assert [len(each.result(READY_S)) for each in futures] == [size] * 6


def test_gathers_broadcasts_and_maps(behind: Fleet) -> None:
    with behind.connect() as pool:
        assert [len(each) for each in sky.gather(made(MB), made(20_000)) >> pool] == [MB, 20_000]
        assert sorted(node() @ pool) == ["n0"] * len(LAYOUT) + ["n1"] * len(LAYOUT)
        assert list(pool.map(made, [50_000] * 40)) == [bytes(50_000)] * 40


def test_a_cancelled_task_ends_by_itself_and_frees_its_slot(behind: Fleet, tmp_path: Path) -> None:
    with behind.connect() as pool:
        there = pool.select(node="n1")
        before = sorted(there.broadcast(pid()))
        future = there.submit(slept(str(tmp_path / "began")))
        until(lambda: (tmp_path / "began").exists(), seconds=READY_S)
        future.cancel()
        assert sorted(there.broadcast(pid())) == before


def test_jobs_with_large_results(behind: Fleet) -> None:
    with behind.connect() as pool:
        jobs = [pool.submit(made(5 * MB), detach=f"large-{index}") for index in range(behind.size)]
        assert [len(job.result(READY_S)) for job in jobs] == [5 * MB] * behind.size


def test_files_come_from_the_node(behind: Fleet, tmp_path: Path) -> None:
    with behind.connect() as pool:
        pool.select(node="n1").submit(wrote("made.bin", MB)).result(READY_S)
        assert pool.get("made.bin", tmp_path / "here", node="n1").stat().st_size == MB


def test_a_gang_between_nodes_is_refused_and_one_on_a_node_is_not(behind: Fleet) -> None:
    with behind.connect() as pool:
        assert len(pool.launch(os.getpid, nodes=1, per_node=2, framework="none")) == 2
        with pytest.raises(sky.NotSupported, match="nobody can connect to n1"):
            pool.launch(os.getpid, nodes=2, per_node=1, framework="none")


@pytest.mark.slow
def test_after_the_node_or_the_head_starts_anew(behind: Fleet) -> None:
    for each in reversed(behind.nodes):
        each.restart()
        behind.settled()
        with behind.connect() as pool:
            assert len(pool.select(node="n1").submit(made(MB)).result(READY_S)) == MB
        # The head has closed what the workers of before had left there.
        until(lambda: not half_closed(behind), seconds=READY_S, last=lambda: half_closed(behind))


def half_closed(fleet: Fleet) -> str:
    """The connections in the head's namespace whose other side is gone, with their processes."""
    command = ["ip", "netns", "exec", fleet.head.link.namespace, "ss", "-Htnp", "state", "close-wait"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
