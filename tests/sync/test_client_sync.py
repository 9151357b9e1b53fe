"""Code and data of the user on the nodes: what is sent, what tasks see of it, and what stays loaded."""

from __future__ import annotations

import codecs
import importlib
import os
import shutil
import subprocess
import sys
import traceback

import pytest
from local_fleets.synced_project import make_project, write_library

import skyinfra as sky
from skyinfra.blobs import store, transfer
from skyinfra.blobs.trees import Entry, Tree
from skyinfra.client import open_pool
from skyinfra.sync import sync
from skyinfra.sync.includes import Includes
from skyinfra.tasks import Task, included


@pytest.fixture
def pool(project, fleet):
    with open_pool(fleet.manifest, includes=["src/shiny", "data"]) as pool:
        yield pool


def first(pool, task):
    """The result of *task* on one slot, which is always the same."""
    return pool.broadcast(task, slots=pool.slots()[-1:])[0]


# What tasks see -----------------------------------------------------------------------------------------------------


def test_modules_are_imported_from_what_was_synced_and_stay_loaded(pool):
    import shiny

    assert [first(pool, shiny.count()) for _ in range(3)] == [1, 2, 3]
    assert first(pool, shiny.twice(shiny.Thing(4))) == (shiny.Thing(8), True)
    assert shiny.version() @ pool == [1] * 4


def test_changed_data_keeps_what_is_loaded(pool, project):
    import shiny

    assert first(pool, shiny.words()) == ("words 1", "beside 1")
    before = first(pool, shiny.count()), first(pool, Task(os.getpid))
    (project / "data" / "vocab.txt").write_text("words 2")
    (project / "src" / "shiny" / "beside.txt").write_text("beside 2")
    (project / "data" / "more.txt").write_text("more")
    pool.sync()
    assert first(pool, shiny.words()) == ("words 2", "beside 2")
    (project / "data" / "more.txt").unlink()
    pool.sync()
    assert first(pool, Task(list_data)) == ["vocab.txt"]
    assert (first(pool, shiny.count()), first(pool, Task(os.getpid))) == (before[0] + 1, before[1])


def list_data() -> list[str]:
    return sorted(os.listdir(sky.synced("data")))  # noqa: PTH208


def test_changed_code_is_loaded_anew_in_the_same_process(pool, project):
    import shiny

    pid = first(pool, Task(os.getpid))
    assert first(pool, shiny.count()) == 1
    write_library(project, 2)
    (project / "src" / "shiny" / "deeper.py").write_text("def double(x):\n    return 20 * x\n")
    assert first(pool, shiny.version()) == 1  # not synced yet
    pool.sync()
    assert first(pool, shiny.version()) == 2
    assert first(pool, shiny.count()) == 1
    assert first(pool, shiny.twice(shiny.Thing(1)))[0].x == 20
    assert first(pool, Task(os.getpid)) == pid


def test_objects_stay_with_their_code(pool, project):
    import shiny

    model = shiny.Model(10)
    assert [first(pool, model.add(shiny.Thing(1))) for _ in range(2)] == [(11, 1), (12, 1)]
    (project / "data" / "vocab.txt").write_text("words 2")
    pool.sync()
    assert first(pool, model.add(shiny.Thing(1))) == (13, 1)
    write_library(project, 2)
    pool.sync()
    assert first(pool, model.add(shiny.Thing(1))) == (11, 2)
    assert first(pool, model.release()) is True
    assert first(pool, model.release()) is False


def rank_reads() -> tuple[int, int, str]:
    import shiny

    return sky.gang().rank, shiny.VERSION, sky.synced("data/vocab.txt").read_text()


def test_the_ranks_of_a_gang_see_it_too(pool):
    import shiny

    found = pool.launch(rank_reads, nodes=1, per_node=2, framework="none")
    assert found == [(0, 1, "words 1"), (1, 1, "words 1")]
    assert pool.launch(shiny.version, nodes=1, per_node=1, framework="none") == [1]


def use_shiny() -> tuple[int, int]:
    import shiny

    return shiny.VERSION, shiny.count()


def test_two_clients_with_two_trees_take_turns_on_a_process(project, fleet, tmp_path, monkeypatch):
    make_project(tmp_path / "other", version=7)
    (project / "src" / "plugin.py").write_text("")
    by_name = Task(importlib.import_module, ("plug" + "in",))
    with open_pool(fleet.manifest, includes=["src"]) as one:
        assert first(one, by_name).__name__ == "plugin"
        monkeypatch.chdir(tmp_path / "other")
        with open_pool(fleet.manifest, includes=["src"]) as other, open_pool(fleet.manifest) as neither:
            assert first(one, Task(os.getpid)) == first(other, Task(os.getpid))
            for turn in (1, 2, 3):
                assert first(one, Task(use_shiny)) == (1, turn)
                assert first(other, Task(use_shiny)) == (7, turn)
                with pytest.raises(ModuleNotFoundError, match="plugin"):
                    first(neither, by_name)
                with pytest.raises(sky.NotSynced, match=r"x: was not synced\nThe client has synced nothing"):
                    first(neither, Task(sky.synced, ("x",)))


def environment(name: str) -> tuple[int, str | None, str | None]:
    importlib.import_module(name)
    return os.getpid(), os.environ.get("OF_AN_IMPORT"), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_what_an_import_sets_leaves_with_its_code_and_the_device_stays(project, fleet, monkeypatch):
    (project / "src" / "setting.py").write_text(
        "import os\nos.environ['OF_AN_IMPORT'] = '1'\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\ndef use(): return\n"
    )
    monkeypatch.syspath_prepend(str(project / "src"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    setting = importlib.import_module("setting")
    monkeypatch.delenv("OF_AN_IMPORT")
    with open_pool(fleet.manifest, includes=["src"]) as one, open_pool(fleet.manifest) as other:
        pid, variable, device = first(other, Task(environment, ("os",)))
        assert variable is None and device
        for _ in range(2):
            assert first(one, Task(setting.use)) is None
            assert first(one, Task(environment, ("setting",))) == (pid, "1", device)
            assert first(other, Task(environment, ("os",))) == (pid, None, device)
    del sys.modules["setting"]


@pytest.mark.parametrize("text", ["os.environ.pop('A_KEY')", "os.environ['A_KEY'].strip()"])
@pytest.mark.parametrize("secret", [False, True])
def test_what_a_task_is_given_is_kept_of_no_import(project, fleet, monkeypatch, text, secret):
    (project / "src" / "taking.py").write_text(
        f"import os\nKEY = {text} if 'A_KEY' in os.environ else None\n"
        "if KEY and 'strip' in open(__file__).read(): os.environ['A_KEY'] = KEY\ndef use(): return len(KEY or '')\n"
    )
    monkeypatch.syspath_prepend(str(project / "src"))
    sys.modules.pop("taking", None)
    importlib.invalidate_caches()
    taking = importlib.import_module("taking")
    monkeypatch.setenv("A_KEY", "value ")
    options = {"secrets": ["A_KEY"]} if secret else {"env": {"A_KEY": "value "}}
    with open_pool(fleet.manifest, includes=["src"]) as one, open_pool(fleet.manifest) as other:
        for _ in range(2):
            assert first(one, Task(taking.use).options(**options)) >= 5
            assert first(other, Task(os.getenv, ("A_KEY",))) is None
    del sys.modules["taking"]


def test_a_module_that_a_node_lacks_costs_no_process(project, fleet, monkeypatch):
    (project / "src" / "lacking.py").write_text(
        "import os\nif 'SKYINFRA_SLOT' in os.environ: raise ModuleNotFoundError('no such part')\ndef use(): return\n"
    )
    monkeypatch.syspath_prepend(str(project / "src"))
    lacking = importlib.import_module("lacking")
    with open_pool(fleet.manifest, includes=["src"]) as pool, open_pool(fleet.manifest) as other:
        before, _, _ = first(other, Task(environment, ("os",)))
        with pytest.raises(ModuleNotFoundError, match="no such part"):
            first(pool, Task(lacking.use))
        assert first(pool, Task(os.getpid)) == before
    del sys.modules["lacking"]


def test_code_that_cannot_be_loaded_beside_other_code_gets_a_process_of_its_own(project, fleet, monkeypatch, tmp_path):
    once = "import codecs, os\nif hasattr(codecs, 'once'): raise ValueError('twice')\ncodecs.once = True\n"
    monkeypatch.syspath_prepend(str(project / "src"))
    pids = []
    with open_pool(fleet.manifest) as pool:
        # A process that keeps objects of other tests would not be replaced.
        first(pool, Task(os.getpid).options(fresh=True))
    for version in (1, 2):
        text = f"{once}def use(): return {version}, os.getpid()\n"
        (project / "src" / "registering.py").write_text(text)
        sys.modules.pop("registering", None)
        importlib.invalidate_caches()
        codecs.__dict__.pop("once", None)
        registering = importlib.import_module("registering")
        with open_pool(fleet.manifest, includes=["src"]) as pool:
            number, pid = first(pool, Task(registering.use))
        assert number == version
        pids.append(pid)
    assert pids[0] != pids[1]
    del sys.modules["registering"], codecs.once


def test_a_traceback_shows_the_lines_of_synced_files(pool):
    import shiny

    with pytest.raises(LookupError) as caught:
        shiny.fail() >> pool
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise LookupError("as it should")  # this line' in shown
    assert f'File "{shiny.__file__}"' in shown, "that of this machine"


def test_programs_that_a_task_starts_see_it_too(pool):
    def start() -> str:
        code = "import shiny, skyinfra; print(shiny.VERSION, skyinfra.synced('data/vocab.txt').read_text())"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert first(pool, Task(start)) == "1 words 1\n"


def test_slots_of_a_node_share_its_files_and_a_dead_process_leaves_none(pool, fleet, wait_until):
    def identity() -> tuple[int, int, int]:
        found = os.stat(sky.synced("data/vocab.txt"))  # noqa: PTH116
        return found.st_ino, found.st_nlink, found.st_mode & 0o222

    same = pool.broadcast(Task(identity), slots=pool.select(node="n1").slots())
    assert same[0][0] == same[1][0]
    assert [mode for _, _, mode in same] == [0, 0]
    views = fleet.root / "n1" / "trees"
    before = {path.name for path in views.iterdir() if path.is_dir()}
    with pytest.raises(sky.TaskAttemptsExceeded):
        first(pool, Task(os._exit, (1,)))
    first(pool, Task(identity))
    left = {path.name for path in views.iterdir() if path.is_dir()}
    assert len(left) <= len(before)
    assert left != before


def test_the_same_call_finds_files_here(pool, project):
    assert sky.synced("data/vocab.txt") == project / "data" / "vocab.txt"
    assert sky.synced("src/shiny") == project / "src" / "shiny"
    for name in ("data/none.txt", "pyproject.toml", "/etc/passwd"):
        with pytest.raises(sky.NotSynced, match="includes="):
            sky.synced(name)
    for name in ("../n1", "/etc/passwd", "data/none.txt"):
        with pytest.raises(sky.NotSynced, match="not among the includes"):
            first(pool, Task(sky.synced, (name,)))


def test_own_modules_travel_under_their_names_with_what_they_import(pool, project, monkeypatch):
    (project / "helper.py").write_text("def f():\n    import late\n    return __name__, __file__, late.HERE\n")
    (project / "late.py").write_text("HERE = 'here'\n")
    monkeypatch.syspath_prepend(str(project))
    import helper  # type: ignore[import-not-found]

    name, file, here = pool.submit(helper.f).result(timeout=60)
    assert (name, here) == ("helper", "here")
    assert file.endswith("/helper.py") and not file.startswith(str(project))
    del sys.modules["helper"]


# What is sent -------------------------------------------------------------------------------------------------------


def test_unchanged_files_are_not_sent_again(project, fleets):
    fleet = fleets(nodes=("n0",), slots=1)
    for number in range(50):
        (project / "data" / f"{number}.txt").write_text(f"file {number}")
    with open_pool(fleet.manifest) as pool:
        first = pool.sync("src", "data")
        assert (first.files, first.sent_blobs) == (54, 55)  # and the listing
        assert pool.sync() == sync.Synced(first.tree, 54, first.bytes, 0, 0)
        (project / "data" / "7.txt").write_text("changed")
        again = pool.sync()
        assert again.sent_blobs == 2
        assert again.sent_bytes == 7 + int(again.tree.partition(":")[2])
    with open_pool(fleet.manifest) as pool:
        assert pool.sync("src", "data").sent_blobs == 0


def test_a_file_is_read_again_only_if_it_may_have_changed(project, monkeypatch):
    for path in (old := project / "data" / "vocab.txt", project / "src" / "shiny" / "beside.txt"):
        os.utime(path, (1, 1))
    read: list[str] = []
    kept = Includes._hash
    monkeypatch.setattr(Includes, "_hash", lambda self, path, file: read.append(path) or kept(self, path, file))
    include = Includes(project, "secret")
    include.add(["data", "src/shiny/beside.txt"])
    include.scan()
    include.scan()
    assert read == ["data/vocab.txt", "src/shiny/beside.txt"]
    old.write_text("words 2")
    include.scan()
    include.scan()  # it is so new that it may change within the same tick of the clock
    assert read[2:] == ["data/vocab.txt", "data/vocab.txt"]


def test_a_file_that_changes_while_it_is_synced(pool, project, monkeypatch):
    path = project / "data" / "vocab.txt"
    path.write_text("before it changes")
    kept, read = included._read, []

    def changing(file):
        if file == path and not read:
            path.write_text("after that")
            read.append(file)
        return kept(file)

    monkeypatch.setattr(included, "_read", changing)
    pool.sync()
    assert read
    assert first(pool, Task(read_vocabulary)) == "after that"

    def restless(file):
        path.write_text(f"restless {len(read)}")
        read.append(file)
        return kept(file)

    monkeypatch.setattr(included, "_read", restless)
    path.write_text("new")
    with pytest.raises(sky.InvalidInclude, match="changes faster than it can be sent"):
        pool.sync()
    assert first(pool, Task(read_vocabulary)) == "after that"


def read_vocabulary() -> str:
    return sky.synced("data/vocab.txt").read_text()


@pytest.mark.slow
def test_what_the_head_and_the_nodes_have_lost_is_sent_again(project, fleets):
    fleet = fleets(nodes=("n0", "n1"), slots=1)
    with open_pool(fleet.manifest, includes=["data"]) as pool:
        shutil.rmtree(fleet.root / "n0" / "blobs")
        assert Task(read_vocabulary) @ pool == ["words 1", "words 1"]
        (project / "data" / "vocab.txt").write_text("words 2")
        pool.sync()
        (project / "data" / "vocab.txt").write_text("words 3")
        shutil.rmtree(fleet.root / "n0" / "blobs")
        with pytest.raises(sky.TaskInputsLost, match=r"read_vocabulary needs .*\n.*pool.sync\(\)"):
            Task(read_vocabulary) >> pool
        pool.sync()
        assert Task(read_vocabulary) @ pool == ["words 3", "words 3"]


def test_a_path_that_was_refused_is_not_in_the_way_of_others(pool, project):
    (project / "notes.txt").write_text(pool.manifest.secret)
    with pytest.raises(sky.InvalidInclude, match="holds the secret of the fleet"):
        pool.sync("notes.txt")
    with pytest.raises(sky.InvalidInclude, match="is not there"):
        pool.sync("data", "nowhere")
    assert pool.sync("data").files > 0


@pytest.mark.parametrize("stray", ["data-more/x", "datax", "other"])
def test_files_besides_those_that_were_asked_for_are_refused(pool, tmp_path, stray):
    content = b"planted"
    digest = store.digest_of(content)
    tree = Tree({"data/x": Entry(digest, len(content)), stray: Entry(digest, len(content))})
    head = pool._fleet.connection.head
    blobs = [included.listing(tree), transfer.Blob(digest, len(content), lambda: transfer.chunked([content]))]
    pool._fleet.from_head(transfer.send(head, blobs))
    target = tmp_path / "here" / "data"
    with pytest.raises(sky.NodeFailed, match="is not below what was asked for"):
        pool._fleet.from_head(sync.fetch_files(head, tree.name, "data", target))
    assert not (tmp_path / "here").exists()
