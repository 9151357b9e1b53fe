"""The store of blobs, and what travels through the head."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed.protocol import dumps, loads
from hypothesis import given
from hypothesis import strategies as st
from local_fleets.local_peer import LocalPeer

import skyinfra as sky
from skyinfra.blobs import transfer
from skyinfra.blobs.store import BlobStore, Incoming, WrongContent, digest_of
from skyinfra.blobs.transfer import CHUNK, Blob, BlobsMissing, chunked
from skyinfra.blobs.trees import Entry, Tree, parse_name
from skyinfra.head.blobs import HeadBlobs


def head_of(store: BlobStore, *, near: bool = False) -> LocalPeer:
    """A head on another machine, or one that is *near*."""
    handlers = HeadBlobs(store).handlers
    return LocalPeer(handlers if near else {name: each for name, each in handlers.items() if "place" not in name})


def blob(data: bytes) -> Blob:
    return Blob(digest_of(data), len(data), lambda: chunked([data]))


def lies_about(data: bytes, claimed: bytes) -> Blob:
    return Blob(digest_of(claimed), len(claimed), lambda: chunked([data]))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


LARGE = os.urandom(2 * CHUNK + 5)


def test_what_is_there_is_not_sent_again(store):
    line = head_of(store)
    small = [blob(str(number).encode()) for number in range(100)]
    first = asyncio.run(transfer.send(line, [*small, blob(LARGE), blob(LARGE)]))
    assert (first.blobs, first.bytes) == (101, 190 + len(LARGE))
    assert store.received == first.bytes
    assert line.calls.count("blobs_add") == 1  # together
    assert line.calls.count("blobs_write") == 3
    line.calls.clear()
    second = asyncio.run(transfer.send(line, [*small, blob(LARGE), blob(b"new")]))
    assert (second.blobs, second.bytes) == (1, 3)
    assert line.calls == ["blobs_missing", "blobs_add"]


def test_a_blob_is_read_only_and_has_the_name_of_its_content(store):
    asyncio.run(transfer.send(head_of(store), [blob(LARGE), blob(b"x")]))
    assert files(store.folder) == sorted([digest_of(LARGE), digest_of(b"x")])
    assert store.path(digest_of(LARGE)).read_bytes() == LARGE
    assert store.path(digest_of(LARGE)).stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("size", [3, CHUNK + 3])
def test_what_is_not_what_its_digest_says_leaves_nothing(store, size):
    with pytest.raises(WrongContent):
        asyncio.run(transfer.send(head_of(store), [lies_about(b"a" * size, b"b" * size)]))
    assert files(store.folder) == []


def test_a_torn_upload_leaves_no_blob(store):
    """Its sender was killed between two chunks."""
    head = HeadBlobs(store)
    write = {"upload": "u", "digest": digest_of(LARGE), "size": len(LARGE)}
    asyncio.run(head.write(offset=0, data=LARGE[:CHUNK], **write))
    assert store.missing([digest_of(LARGE)]) == [digest_of(LARGE)]
    assert not asyncio.run(head.finish(upload="u"))
    assert files(store.folder) == []


@given(st.permutations(range(5)), st.sets(st.integers(0, 4)), st.booleans())
def test_parts_come_in_any_order_and_the_digest_is_that_of_the_whole(tmp_path_factory, order, again, damaged):
    store = BlobStore(tmp_path_factory.mktemp("blobs"))
    parts = [bytes([number]) * (number + 1) for number in range(5)]
    whole = b"".join(parts)
    incoming = store.begin(digest_of(whole), len(whole))
    for number in [*order, *again]:
        incoming.write(whole.index(parts[number]), parts[number])
    if damaged:
        incoming.write(3, b"?")
        with pytest.raises(WrongContent):
            incoming.finish()
        assert files(store.folder) == []
    else:
        incoming.finish()
        assert store.path(digest_of(whole)).read_bytes() == whole


def test_a_part_that_is_garbage_ends_no_process():
    """A PickleBuffer around it did, in Python before 3.11.9 and 3.12.3."""
    cycle: list[object] = [memoryview(bytes(2**20))]
    cycle += [transfer.beside(cycle[0]), cycle]
    del cycle
    gc.collect()


def test_large_parts_lie_beside_their_message():
    data = memoryview(bytearray(2**20))
    frames = dumps({"data": transfer.beside(data), "small": transfer.beside(b"x")})
    assert len(frames[0]) < 100
    data[0] = 7
    assert bytes(frames[-1][:1]) == b"\x07"
    found = loads(frames, deserialize=False)
    assert (found["data"], found["small"]) == (data, b"x")


def test_what_a_sender_has_left_goes_after_a_while(store, monkeypatch):
    head = HeadBlobs(store)
    write = {"digest": digest_of(LARGE), "size": len(LARGE), "offset": 0, "data": LARGE[:CHUNK]}
    asyncio.run(head.write(upload="gone", **write))
    clock = time.monotonic() + 1000
    monkeypatch.setattr("skyinfra.head.blobs.time", SimpleNamespace(monotonic=lambda: clock))
    asyncio.run(head.write(upload="there", **write))
    assert len(files(store.folder)) == 1
    # Of a process that has ended, nobody knows any more but the folder.
    (left,) = (store.folder / "incoming").glob(f"{digest_of(LARGE)}.*")
    os.utime(left, (1, 1))
    BlobStore(store.folder).add(digest_of(b"x"), b"x")
    assert files(store.folder) == [digest_of(b"x")]


def test_a_cancelled_upload_is_dropped(store):
    async def main() -> None:
        line = head_of(store)
        sending = asyncio.create_task(transfer.send(line, [blob(LARGE)]))
        while "blobs_write" not in line.calls:
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(main())
    assert files(store.folder) == []


def test_a_part_that_is_written_when_its_upload_is_dropped_leaves_nothing(store, monkeypatch):
    """The file of the upload is gone by then, and each part makes it where it is not there."""
    head, write = HeadBlobs(store), Incoming.write

    def late(incoming: Incoming, offset: int, data: bytes) -> None:
        head.drop("upload")
        write(incoming, offset, data)

    monkeypatch.setattr(Incoming, "write", late)
    asyncio.run(head.write("upload", digest_of(LARGE), len(LARGE), 0, LARGE))
    assert files(store.folder) == []


def test_blobs_are_fetched_once_and_verified(store, tmp_path):
    line = head_of(store)
    asyncio.run(transfer.send(line, [blob(LARGE), blob(b"x")]))
    node = BlobStore(tmp_path / "node")
    wanted = {digest_of(LARGE): len(LARGE), digest_of(b"x"): 1}
    line.calls.clear()
    assert asyncio.run(transfer.fetch(line, node, wanted)).blobs == 2
    assert line.calls.count("blobs_read") == 4
    assert asyncio.run(transfer.fetch(line, node, wanted)).blobs == 0
    assert node.path(digest_of(LARGE)).read_bytes() == LARGE
    assert bytes(asyncio.run(transfer.fetch_bytes(line, digest_of(LARGE), len(LARGE)))) == LARGE


def test_on_one_machine_large_ones_are_files_that_nobody_sends(store, tmp_path):
    line = head_of(store, near=True)
    assert asyncio.run(transfer.send(line, [blob(LARGE), blob(b"x")])).blobs == 2
    wanted = {digest_of(LARGE): len(LARGE), digest_of(b"x"): 1}
    node = BlobStore(tmp_path / "node")
    assert asyncio.run(transfer.fetch(line, node, wanted)).blobs == 2
    assert node.path(digest_of(LARGE)).read_bytes() == store.path(digest_of(LARGE)).read_bytes() == LARGE
    content = asyncio.run(transfer.fetch_bytes(line, digest_of(LARGE), len(LARGE)))
    # Who writes to it changes nothing, and it stays when the blob goes.
    content[0] ^= 1
    assert store.path(digest_of(LARGE)).read_bytes() == LARGE
    store.path(digest_of(LARGE)).unlink()
    assert content[1:] == LARGE[1:]
    with pytest.raises(BlobsMissing):
        asyncio.run(transfer.fetch_bytes(line, digest_of(LARGE), len(LARGE)))
    (name,) = asyncio.run(transfer.send_unnamed(line, [[LARGE[:7], memoryview(LARGE)[7:]]]))
    assert bytes(asyncio.run(transfer.fetch_bytes(line, name, len(LARGE)))) == LARGE
    assert not {"blobs_write", "blobs_finish"} & set(line.calls) and line.calls.count("blobs_read") == 1
    with pytest.raises(WrongContent):
        asyncio.run(transfer.send(line, [lies_about(LARGE, LARGE[1:] + b"?")]))
    assert {digest_of(b"x"), name} == set(files(store.folder))


def test_files_are_passed_where_both_have_the_same_ones_and_one_account(store, tmp_path, monkeypatch):
    folder, said, capacity = place = store.shown()
    assert store.shown() == place and oct((store.folder / "incoming/place.lock").stat().st_mode)[-3:] == "600"
    found = BlobStore.same(*place)
    assert found is not None and found is BlobStore.same(*place) and found.capacity == store.capacity
    for other in ((folder, "0" * 32), (str(tmp_path / "none"), said), (f"{folder}\0", said)):
        assert BlobStore.same(*other, capacity) is None
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert BlobStore.same(*place) is None
    line = head_of(store, near=True)
    asyncio.run(transfer.send(line, [blob(LARGE)]))
    assert asyncio.run(transfer.send_unnamed(line, [[LARGE]])) is None
    assert "blobs_finish" in line.calls and files(store.folder) == [digest_of(LARGE)]


def test_a_head_near_by_whose_disk_is_full_says_so(store, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    line = head_of(store, near=True)
    store.shown()
    monkeypatch.setattr(BlobStore, "adopt", full)
    for work in (transfer.send(line, [blob(LARGE)]), transfer.send_unnamed(line, [[LARGE]])):
        with pytest.raises(sky.StateDirectoryError, match="cannot be written: No space left") as caught:
            asyncio.run(work)
        assert caught.value.field == f"head: {store.folder}"
    assert files(store.folder) == []


@pytest.mark.parametrize("content", [b"y", LARGE], ids=["small", "large"])
def test_a_damaged_blob_of_the_head_is_found_and_removed(store, tmp_path, content):
    """A loss of power may leave one."""
    line = head_of(store)
    asyncio.run(transfer.send(line, [blob(content)]))
    path = store.path(digest_of(content))
    path.chmod(0o644)
    path.write_bytes(b"?" * len(content))
    with pytest.raises(BlobsMissing):
        asyncio.run(transfer.fetch(line, BlobStore(tmp_path / "node"), {digest_of(content): len(content)}))
    assert not path.exists()
    assert asyncio.run(transfer.send(line, [blob(content)])).blobs == 1


def test_what_the_head_has_not_is_said(store, tmp_path):
    missing = digest_of(b"never sent")
    for size in (10, CHUNK + 1):
        with pytest.raises(BlobsMissing) as caught:
            asyncio.run(transfer.fetch(head_of(store), BlobStore(tmp_path / "node"), {missing: size}))
        assert caught.value.digests == (missing,)
    assert files(tmp_path / "node") == []


def test_parts_that_come_at_once_make_room_once(tmp_path, monkeypatch):
    """The first two of an upload do, in two threads: what they removed counted twice, and the next ones had no end."""
    store = BlobStore(tmp_path / "blobs", capacity=1000)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **options: (time.sleep(0.001), unlink(path, **options)))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for number in range(20):
            data = number.to_bytes(2, "big") * 180
            begun = [threads.submit(store.begin, digest_of(data), len(data)) for _ in range(4)]
            first, *_ = (each.result() for each in begun)
            first.write(0, data)
            first.finish()
            assert sum(store.path(name).stat().st_size for name in files(store.folder)) <= 1000


def test_the_least_recently_used_ones_go(tmp_path):
    store = BlobStore(tmp_path / "blobs", capacity=250)
    a, b, c = (bytes([65 + i]) * 100 for i in range(3))
    for data in (a, b):
        store.add(digest_of(data), data)
    os.utime(store.path(digest_of(a)), (1, 1))
    os.utime(store.path(digest_of(b)), (1, 1))
    changed = store.path(digest_of(a)).stat().st_mtime_ns
    assert store.has(digest_of(a))
    assert store.path(digest_of(a)).stat().st_mtime_ns == changed  # what Python compiled goes by it
    store.add(digest_of(c), c)
    assert files(store.folder) == sorted([digest_of(a), digest_of(c)])


def test_what_is_larger_than_may_be_kept_is_refused_by_both_sizes(tmp_path):
    store = BlobStore(tmp_path / "blobs", capacity=CHUNK)
    with pytest.raises(sky.TaskTooLarge, match=r"head: .*blobs: 8\.0 MiB in one piece, of the 4\.0 MiB"):
        asyncio.run(transfer.send(head_of(store), [blob(LARGE)]))
    assert files(store.folder) == []


def test_a_full_disk_is_refused_with_what_to_do(store, monkeypatch):
    """Twice: where the room is known beforehand, and where it goes meanwhile."""

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(sky.StateDirectoryError, match=r"No space left.*\n.*disk_gb"):
        patch.setattr("skyinfra.blobs.store.os.pwrite", no_space)
        asyncio.run(transfer.send(head_of(store), [blob(LARGE)]))
    assert files(store.folder) == []
    full = SimpleNamespace(f_bavail=1, f_blocks=10**6, f_frsize=4096)
    monkeypatch.setattr("skyinfra.blobs.store.os.statvfs", lambda _: full)
    with pytest.raises(sky.StateDirectoryError, match=r"no room for 8\.0 MiB more.*\n.*disk_gb"):
        asyncio.run(transfer.send(head_of(store), [blob(LARGE)]))


def test_names_that_lead_elsewhere_are_no_digests(store):
    for name in ("../../etc/passwd", "a" * 63, "A" * 64, ""):
        with pytest.raises(ValueError, match="not a digest"):
            store.path(name)


# Trees --------------------------------------------------------------------------------------------------------------

part = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text not in (".", "..")
)
# One letter in front of each part keeps files and folders apart.
paths = st.lists(part, min_size=1, max_size=3).map(
    lambda parts: "/".join([*(f"d{each}" for each in parts[:-1]), f"f{parts[-1]}"])
)
entries = st.builds(
    Entry,
    st.binary().map(digest_of),
    st.integers(0, 2**50),
    st.booleans(),
)


@given(st.dictionaries(paths, entries), st.lists(part, unique=True))
def test_a_listing_is_read_as_it_was_written(found, roots):
    tree = Tree(found, tuple(roots))
    again = Tree.loads(tree.dumps())
    assert again == tree
    assert again.name == tree.name
    backwards = Tree(dict(reversed(found.items())), tuple(roots))
    assert backwards.name == tree.name
    assert backwards.code_name == tree.code_name


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", "a/./b", "a\0b"])
def test_a_listing_that_leads_out_of_its_folder_is_refused(path):
    with pytest.raises(sky.InvalidInclude):
        Tree.loads(Tree({path: Entry(digest_of(b""), 0)}).dumps())


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"no json",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 5000,
        b'{"version":1,"roots":[],"files":[]}',
        b'{"version":1,"roots":[1],"files":{}}',
        b'{"version":1,"roots":null,"files":{}}',
        b'{"version":1,"roots":[],"files":{"a":["../../x",0,0]}}',
        b'{"version":1,"roots":[],"files":{"a":["%s",-1,0]}}' % (b"0" * 64),
        b'{"version":1,"roots":[],"files":{"a":["%s",1]}}' % (b"0" * 64),
        b'{"version":2,"roots":[],"files":{}}',
    ],
)
def test_what_is_no_listing_is_refused(listing):
    with pytest.raises(sky.InvalidInclude):
        Tree.loads(listing)


@pytest.mark.parametrize("name", ["", ":", "a:1", f"{'0' * 64}", f"{'0' * 64}:x", f"../{'0' * 61}:1"])
def test_what_names_no_tree_is_refused(name):
    with pytest.raises(sky.InvalidInclude):
        parse_name(name)


def test_a_path_is_not_a_file_and_a_folder():
    with pytest.raises(sky.InvalidInclude, match="file and a folder"):
        Tree.loads(Tree({"a": Entry(digest_of(b""), 0), "a/b": Entry(digest_of(b""), 0)}).dumps())


def test_data_does_not_change_the_name_of_the_code():
    code, data = Entry(digest_of(b"1"), 1), Entry(digest_of(b"2"), 1)
    tree = Tree({"src/lib/a.py": code, "src/lib/words.txt": data, "top.py": code}, ("src", "."))
    other = Tree({"src/lib/a.py": code, "src/lib/words.txt": code, "top.py": code}, ("src", "."))
    changed = Tree({"src/lib/a.py": data, "src/lib/words.txt": data, "top.py": code}, ("src", "."))
    assert tree.name != other.name
    assert tree.code_name == other.code_name != changed.code_name
    assert tree.modules == {"lib", "src", "top"}
