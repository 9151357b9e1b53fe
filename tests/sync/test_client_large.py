"""Arguments and results that are too large for one message."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import shutil
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.blobs import payload
from skyinfra.blobs.store import BlobStore, digest_of
from skyinfra.client import open_pool
from skyinfra.tasks import Task

MEGABYTE = 2**20


class Array:
    """What numpy's arrays are for pickle: memory that may stay out of the stream."""

    def __init__(self, content) -> None:
        self.content = content

    def __reduce_ex__(self, protocol):
        return Array, (pickle.PickleBuffer(self.content),)

    @property
    def view(self) -> memoryview:
        return memoryview(self.content)

    def digest(self) -> str:
        return digest_of(self.view)


@sky.compute
def look(array: Array) -> tuple[int, str, bool]:
    return array.view.nbytes, array.digest(), array.view.readonly


@sky.compute
def make(megabytes: int, seed: int = 0) -> Array:
    return Array(bytearray(bytes([seed]) * megabytes * 2**20))


@sky.compute
def overwrite(array: Array) -> str:
    array.view[:5] = b"other"
    return array.digest()


def blobs_of(root: Path) -> set[str]:
    return {path.name for path in root.glob("*/*") if path.parent.name != "incoming"}


def test_large_memory_stays_where_it_is_when_it_is_packed():
    content = bytearray(8 * MEGABYTE)
    text = os.urandom(8 * MEGABYTE)
    packed = payload.pack({"array": Array(content), "text": text, "small": Array(b"x" * 1000)})
    assert [buffer.obj for buffer in packed.buffers] == [content, text]
    assert packed.buffers[1].obj is text
    assert [part.size for part in packed.parts[1:]] == [8 * MEGABYTE] * 2
    assert packed.parts[1].digest == digest_of(content)


def test_what_is_small_is_one_piece():
    packed = payload.pack([Array(bytearray(MEGABYTE)), Array(b"x" * MEGABYTE)])
    assert packed.small
    assert packed.buffers == []
    first, second = pickle.loads(packed.joined())
    assert (first.view.nbytes, second.view.nbytes) == (MEGABYTE, MEGABYTE)


def test_what_is_unpacked_is_mapped_and_private(tmp_path):
    store = BlobStore(tmp_path)
    packed = payload.pack([Array(bytearray(8 * MEGABYTE)), Array(bytes(8 * MEGABYTE)), b"text" * 2**20])
    for blob in packed.blobs():
        store.add(blob.digest, b"".join(blob.chunks()))
    first, second, text = payload.unpack(packed.parts, store)
    assert (first.view.readonly, second.view.readonly) == (False, True)
    assert text == b"text" * 2**20
    first.view[0] = 7
    assert second.view[0] == 0  # the same blob
    assert payload.unpack(packed.parts, store)[0].view[0] == 0


def test_there_and_back(pool):
    content = os.urandom(20 * MEGABYTE)
    assert look(Array(content)) >> pool == (len(content), digest_of(content), True)
    with pytest.warns(UserWarning, match=r"^argument 'array' of look, 20\.0 MiB, is in more than one call of look"):
        assert look(Array(bytearray(content))) >> pool == (len(content), digest_of(content), False)
    made = make(20, 3) >> pool
    assert made.view == bytes([3]) * 20 * MEGABYTE
    assert not made.view.readonly


def test_large_byte_strings_text_and_many_small_things(pool):
    for value in (os.urandom(9 * MEGABYTE), bytearray(9 * MEGABYTE), "é" * 5 * MEGABYTE, list(range(2_000_000))):
        assert pool.submit(lambda x: x, value).result(timeout=60) == value


def test_arrays_of_numpy(pool):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(3_000_000, dtype=numpy.float64).reshape(1000, 3000)

    def work(array, column_major):
        array += 1
        return array, numpy.asfortranarray(column_major), array[::2, ::3]

    plus, column_major, strided = pool.submit(work, array, numpy.asfortranarray(array)).result(timeout=60)
    assert (plus == array + 1).all()
    assert (column_major == array).all()
    assert column_major.flags.f_contiguous
    assert (strided == (array + 1)[::2, ::3]).all()
    plus += 1  # as an array that was made here
    assert array[0, 0] == 0


def test_every_slot_gets_it_and_it_is_sent_once(pool, fleet):
    look(Array(bytearray(1))) @ pool  # the files of this module are there
    before = {node: blobs_of(fleet.root / node / "blobs") for node in ("n0", "n1")}
    content = bytearray(os.urandom(10 * MEGABYTE))
    assert look(Array(content)) @ pool == [(len(content), digest_of(content), False)] * 4
    for node in ("n0", "n1"):
        new = blobs_of(fleet.root / node / "blobs") - before[node]
        assert len(new) <= 2, "the memory, and the stream unless it was there, for both slots"
        assert digest_of(content) in new


def test_what_one_slot_writes_another_does_not_see(pool):
    content = bytearray(6 * MEGABYTE)
    changed = hashlib.sha256(b"other" + bytes(6 * MEGABYTE - 5)).hexdigest()
    assert overwrite(Array(content)) @ pool == [changed] * 4
    assert look(Array(content)) @ pool == [(len(content), digest_of(content), False)] * 4


def test_a_task_gets_what_its_arguments_were_when_it_was_submitted(pool):
    content = bytearray(6 * MEGABYTE)
    was = digest_of(content)
    futures = []
    for number in range(1, 4):
        futures.append((pool.submit(look(Array(content))), was))
        content[0] = number
        was = digest_of(content)
    assert [future.result(timeout=60)[1] == expected for future, expected in futures] == [True] * 3


def test_coroutines_do_not_wait_for_large_arguments_to_be_sent(fleet):
    content = os.urandom(6 * MEGABYTE)

    async def main() -> list[str]:
        async with sky.connect_async(fleet.manifest) as pool:
            seen = [digest async for _, digest, _ in pool.map(look, [Array(content)] * 3)]
            return [*seen, (await (look(Array(content)) >> pool))[1], (await (make(6, 1) >> pool)).digest()]

    assert asyncio.run(main()) == [*[digest_of(content)] * 4, digest_of(b"\1" * 6 * MEGABYTE)]


def test_map_over_large_items(pool):
    items = (Array(bytes([number]) * 5 * MEGABYTE) for number in range(8))
    assert [digest for _, digest, _ in pool.map(look, items)] == [
        digest_of(bytes([number]) * 5 * MEGABYTE) for number in range(8)
    ]


@pytest.mark.slow
def test_what_the_head_has_lost_is_sent_again(fleets):
    fleet = fleets(nodes=("n0", "n1"), slots=1)
    content = bytearray(os.urandom(6 * MEGABYTE))
    with open_pool(fleet.manifest) as pool:
        busy = [pool.submit(wait_for, str(fleet.root / "go")) for _ in range(2)]
        future = pool.submit(look(Array(content)))
        lose(fleet.root / "n0" / "blobs")
        (fleet.root / "go").touch()
        assert future.result(timeout=60)[1] == digest_of(content)
        (fleet.root / "go").unlink()
        busy += [pool.submit(wait_for, str(fleet.root / "go")) for _ in range(2)]
        content[0] ^= 1
        future = pool.submit(look(Array(content)))
        content[0] ^= 2
        lose(fleet.root / "n0" / "blobs")
        (fleet.root / "go").touch()
        with pytest.raises(sky.TaskInputsLost, match="what look needs is not at the head, and has changed here"):
            future.result(timeout=60)
        assert [each.result(timeout=60) for each in busy] == [None] * 4


def lose(folder: Path) -> None:
    """Takes *folder* away in one step: a process may write there meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name("lost")))


def wait_for(path: str) -> None:
    import time

    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.02)


def test_what_is_larger_than_the_head_keeps_is_refused_both_ways(fleets):
    fleet = fleets(nodes=("n0",), slots=1, blobs={"capacity": 16 * MEGABYTE})
    with open_pool(fleet.manifest) as pool:
        with pytest.raises(sky.TaskTooLarge, match=r"the call of look: 20\.0 MiB in one piece, of the 16\.0 MiB"):
            look(Array(bytes(20 * MEGABYTE))) >> pool
        with pytest.raises(sky.TaskTooLarge, match=r"the result of make: 20\.0 MiB in one piece, of the 16\.0 MiB"):
            make(20) >> pool
        # More than that altogether, one after the other.
        for number in range(4):
            assert (make(6, number) >> pool).view[0] == number
        assert sum(path.stat().st_size for path in (fleet.root / "n0" / "blobs").glob("*/*")) <= 16 * MEGABYTE


def test_a_large_result_of_a_task_that_raises_is_its_exception(pool):
    def fail() -> None:
        raise ValueError(b"x" * 6 * 2**20)

    with pytest.raises(ValueError, match="x") as caught:
        pool.submit(Task(fail)).result(timeout=60)
    assert len(caught.value.args[0]) == 6 * MEGABYTE


def peak(pid: int) -> int:
    """The most memory that the process has had, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) // 1024


@pytest.mark.slow
def test_two_gigabytes_pass_a_head_that_keeps_a_few_chunks_in_memory(fleets):
    fleet = fleets(nodes=("n0", "n1"), slots=1)
    content = bytearray(2 * 2**30)
    content[::4096] = os.urandom(len(content) // 4096)
    with open_pool(fleet.manifest) as pool:
        on_n1 = pool.select(node="n1")
        assert look(Array(content)) >> on_n1 == (len(content), digest_of(content), False)
        del content
        made = make(768, 5) >> on_n1
        assert made.view.nbytes == 768 * 2**20
        assert bytes(made.view[-3:]) == b"\5\5\5"
    assert peak(fleet.process.pid) < 500
