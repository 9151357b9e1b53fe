"""What jobs need of what was synced is there when they start, whatever became of the head's blobs."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from journals.samples import CALL, OUTCOME, wanted
from local_fleets.local_peer import LocalPeer

import skyinfra as sky
from skyinfra.blobs.store import BlobStore, digest_of
from skyinfra.blobs.trees import Entry, Tree
from skyinfra.head import queue
from skyinfra.head.jobs import Jobs
from skyinfra.head.journal import Journal
from skyinfra.head.kept_trees import KeptTrees
from skyinfra.protocol import services
from skyinfra.protocol.calls import Ending, Header
from skyinfra.protocol.rpc import Call

T = TypeVar("T")

CONTENT = {"a.py": b"A = 1\n", "data/b.txt": b"b", "data/same.txt": b"b", "empty": b""}


def synced(store: BlobStore, content: Mapping[str, bytes] = CONTENT) -> Tree:
    """A tree whose blobs a client has sent."""
    tree = Tree({path: Entry(digest_of(data), len(data)) for path, data in content.items()}, (".",))
    for data in (*content.values(), tree.dumps()):
        store.add(digest_of(data), data)
    return tree


def there(store: BlobStore, tree: Tree) -> bool:
    return not store.missing([*tree.blobs(), tree.name.partition(":")[0]])


def lose(store: BlobStore) -> None:
    """Others came, and all that was there went."""
    shutil.rmtree(store.folder)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def kept(tmp_path: Path, store: BlobStore) -> KeptTrees:
    return KeptTrees(tmp_path / "kept", store)


def test_what_is_held_comes_back_until_it_is_released(tmp_path: Path, store: BlobStore, kept: KeptTrees) -> None:
    tree, other = synced(store), synced(store, {"other": b"other", "empty": b""})
    for name in (tree.name, other.name, tree.name):
        kept.hold(name)
    # A link: it takes no room while the store has it as well.
    assert store.path(digest_of(b"b")).stat().st_nlink == 2
    lose(store)
    kept.restore(tree.name)
    assert there(store, tree) and not there(store, other)
    assert store.read(digest_of(b"b"), 0, 10) == b"b"
    kept.release({other.name})
    lose(store)
    kept.restore(tree.name)
    kept.restore(other.name)
    assert there(store, other) and not there(store, tree)
    kept.release(())
    assert list((tmp_path / "kept").iterdir()) == []


def test_what_is_held_is_on_the_disk(
    tmp_path: Path, store: BlobStore, kept: KeptTrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fsync = tmp_path / "kept", os.fsync
    # By whether the tree has its name already.
    noted: dict[bool, set[int]] = {False: set(), True: set()}

    def note(handle: int) -> None:
        noted[any(folder.glob("[!.]*"))].add(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    kept.hold(synced(store).name)
    (held,) = folder.iterdir()
    assert noted[False] >= {each.stat().st_ino for each in (held, *held.iterdir())}
    assert noted[True] == {each.stat().st_ino for each in (folder, tmp_path)}


def test_what_is_gone_already_cannot_be_held(tmp_path: Path, store: BlobStore, kept: KeptTrees) -> None:
    for missing in (digest_of(b"b"), None):
        tree = synced(store)
        store.path(missing or tree.name.partition(":")[0]).unlink()
        with pytest.raises(sky.TaskInputsLost, match="Sync them"):
            kept.hold(tree.name)
        assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize("name", ["../../etc:3", "x", "", f"{'a' * 64}:x"])
def test_no_name_leads_elsewhere(kept: KeptTrees, name: str) -> None:
    with pytest.raises(sky.InvalidInclude, match="names no tree"):
        kept.hold(name)


def test_without_links_it_is_a_copy(store: BlobStore, kept: KeptTrees, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    tree = synced(store)
    kept.hold(tree.name)
    lose(store)
    kept.restore(tree.name)
    assert there(store, tree)


class Slots:
    """Stands for a fleet of one slot; looks for the tree whenever a job starts."""

    def __init__(self, store: BlobStore, tree: Tree) -> None:
        self.store, self.tree = store, tree
        self.found: list[bool] = []
        self.go_on = asyncio.Event()

    def slots(self) -> list[dict[str, float]]:
        return [{"slot": 1.0}]

    def running(self) -> dict[str, tuple[str, float]]:
        return {}

    async def run(
        self, header: Header, call: bytes, resources: dict[str, int], waited: float = 0.0
    ) -> tuple[Ending, str | None]:
        self.found.append(there(self.store, self.tree))
        await self.go_on.wait()
        return Ending.of(OUTCOME), "n1/0"

    async def figures(self, slot: str, key: str) -> None:
        return None

    ended = False

    def leave(self, keys: list[str]) -> None:
        pass

    def in_service(self, slot: str) -> bool:
        return True

    def sent_to(self, key: str) -> str | None:
        return "n1/0"

    def on_closed_slot(self, key: str) -> bool:
        return False

    def release(self, key: str) -> None:
        pass

    async def all_stopped(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def submit(head: Jobs, name: str, tree: Tree) -> None:
    header = Header(f"{name}-1", "train", "", tree=tree.name).dumps().decode()
    wish = wanted(name, os.urandom(16).hex(), header=header)
    await ask(head, services.job_part, job=wish.id, offset=0, data=CALL)
    await ask(head, services.job_submit, submission=wish)


async def ask(head: Jobs, call: Call[..., T], **arguments: Any) -> T:
    return await call(LocalPeer(head.handlers), **arguments)


def test_jobs_start_with_their_files_also_after_a_restart_of_the_head(
    tmp_path: Path, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "kept"
    monkeypatch.setattr(queue, "_BACK_S", 0.0)  # no slot comes back with what ran there

    async def until_found(head: Jobs, fleet: Slots, count: int) -> None:
        while len(fleet.found) < count:
            head.check()
            await asyncio.sleep(0.005)

    async def first() -> None:
        tree, head = synced(store), Jobs(Journal(tmp_path / "jobs"))
        fleet = Slots(store, tree)
        await head.load()
        head.start(fleet)  # type: ignore[arg-type]
        await submit(head, "one", tree)
        await submit(head, "two", tree)
        await until_found(head, fleet, 1)
        lose(store)
        await head.stop()

    async def second() -> None:
        tree, head = Tree.loads((held / held.name.partition("-")[0]).read_bytes()), Jobs(Journal(tmp_path / "jobs"))
        fleet = Slots(store, tree)
        (folders / ".half").mkdir()
        await head.load()
        head.start(fleet)  # type: ignore[arg-type]
        await until_found(head, fleet, 1)
        lose(store)
        fleet.go_on.set()
        for each in ("one", "two"):
            await ask(head, services.job_wait, job=each, wait_s=10)
        assert fleet.found == [True, True]
        assert list(folders.iterdir()) == []
        await head.stop()

    asyncio.run(asyncio.wait_for(first(), 30))
    (held,) = folders.iterdir()
    asyncio.run(asyncio.wait_for(second(), 30))


def test_a_job_whose_files_are_gone_is_refused(tmp_path: Path, store: BlobStore) -> None:
    async def main() -> None:
        tree, head = synced(store), Jobs(Journal(tmp_path / "jobs"))
        lose(store)
        with pytest.raises(sky.TaskInputsLost):
            await submit(head, "one", tree)
        assert await ask(head, services.job_list) == []

    asyncio.run(main())
