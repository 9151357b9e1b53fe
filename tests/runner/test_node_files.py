"""Files that clients put on nodes and get from there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_fleets.running_node import RunningNode
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.tasks import Task

pytestmark = pytest.mark.xdist_group("node_files")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningNode, RunningNode]]:
    folder = tmp_path_factory.mktemp("fleet")
    made: list[RunningNode] = []
    try:
        for name, scheduler in (("n1", "127.0.0.1:0"), ("n2", None)):
            scheduler = scheduler or made[0].directory.scheduler_file.read_text().strip()
            config = NodeConfig(1, "demo", "mig", name, "local", not made, scheduler, simulate=True, cpu_slots=1)
            made.append(RunningNode(folder / name, config))
            made[-1].boot()
        yield made[0], made[1]
    finally:
        for node in made:
            node.stop()


def test_files_and_folders_go_to_every_node_and_come_back(nodes, tmp_path):
    data = tmp_path / "data"
    (data / "deeper").mkdir(parents=True)
    (data / "large.bin").write_bytes(os.urandom(9 * 2**20))
    (data / "deeper" / "run.sh").write_text("#!/bin/sh\n")
    (data / "deeper" / "run.sh").chmod(0o755)

    def list_files() -> list[str]:
        root = sky.files()
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def append(text: str) -> None:
        with (sky.files() / "inputs" / "deeper" / "run.sh").open("a") as file:
            file.write(text)

    with nodes[0].pool(nodes[1]) as pool:
        assert pool.put(data, "inputs") == "inputs"
        assert pool.put(data / "deeper" / "run.sh") == "run.sh"
        assert Task(list_files) @ pool == [["inputs/deeper/run.sh", "inputs/large.bin", "run.sh"]] * 2
        for node in nodes:
            assert (node.path / "files" / "inputs" / "large.bin").read_bytes() == (data / "large.bin").read_bytes()
            assert os.access(node.path / "files" / "run.sh", os.X_OK)
        Task(append, ("echo\n",)) >> pool.select(node="n2")
        # A node's file is its own: what is put again is what it was.
        assert (nodes[0].path / "files" / "run.sh").read_text() == "#!/bin/sh\n"
        back = pool.get("inputs", tmp_path / "back", node="n2")
        assert (back / "large.bin").read_bytes() == (data / "large.bin").read_bytes()
        assert (back / "deeper" / "run.sh").read_text() == "#!/bin/sh\necho\n"
        assert os.access(back / "deeper" / "run.sh", os.X_OK)
        assert pool.select(node="n2").get("inputs/deeper/run.sh", tmp_path) == tmp_path / "run.sh"
        pool.put(data, "inputs")
        assert (nodes[1].path / "files" / "inputs" / "deeper" / "run.sh").read_text() == "#!/bin/sh\n"
        assert not list(tmp_path.rglob(".*"))


def test_a_path_that_leads_up_is_put_under_its_name(nodes, tmp_path, monkeypatch):
    for folder in ("code", "data/raw"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/raw/words.txt").write_text("words")
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.syspath_prepend(tmp_path)
    with nodes[0].pool(nodes[1]) as pool:
        assert pool.put("../data/raw") == "raw"
    assert (nodes[1].path / "files/raw/words.txt").read_text() == "words"


def test_what_cannot_be_put_or_fetched_is_said(nodes, tmp_path):
    (nodes[0].path / "files").mkdir(exist_ok=True)
    (nodes[0].path / "files" / "out").symlink_to("/etc")
    with nodes[0].pool(nodes[1]) as pool:
        for remote in ("/etc/passwd", "../secret", "."):
            with pytest.raises(sky.InvalidField, match="remote: a path below the folder"):
                pool.put(__file__, remote)
            with pytest.raises(sky.InvalidField, match="remote: a path below the folder"):
                pool.get(remote, tmp_path / "x")
        with pytest.raises(sky.InvalidField, match=r"node: several nodes have files\nName one of: n1, n2"):
            pool.get("x", tmp_path)
        with pytest.raises(sky.NodeError, match=r"n1: .*no such file or folder \(given: 'x'\)"):
            pool.get("x", tmp_path, node="n1")
        for path in ("out/passwd", "out"):
            with pytest.raises(sky.NodeError, match="leads out of the folder for files"):
                pool.get(path, tmp_path, node="n1")
        with pytest.raises(sky.InvalidInclude, match="is not there"):
            pool.put(tmp_path / "none")
        secret = tmp_path / "state.json"
        secret.write_text(pool.manifest.secret)
        with pytest.raises(sky.InvalidInclude, match=r"state\.json: holds the secret"):
            pool.put(secret)
        assert not (tmp_path / "passwd").exists()
    with pytest.raises(sky.NotInTask):
        sky.files()


def test_data_go_whole_whatever_their_folders_are_named(nodes, tmp_path):
    goes = ("env/a.wav", "venv/pyvenv.cfg", ".cache/x", "node_modules/y", "a/__pycache__/z.pyc", ".vscode/w")
    stays = (".env", "terraform.tfstate", "cdktf.out/x", ".terraform/x", "a/.skyinfra/x", ".git/config")
    for name in (*goes, *stays):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    with nodes[0].pool(nodes[1]) as pool:
        pool.put(tmp_path / "data", "whole")
    there = nodes[1].path / "files" / "whole"
    assert {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()} == set(goes)


def test_links_to_files_of_the_folder_come_back_as_files(nodes, tmp_path):
    files = nodes[0].path / "files"
    (files / "run" / "deep").mkdir(parents=True)
    (files / "run" / "step-2").write_text("2")
    (files / "beside").write_text("beside")
    (tmp_path / "secret").write_text("of this node")
    links = {"latest": "step-2", "up": "../beside", "out": tmp_path / "secret", "deeper": "deep", "none": "gone"}
    for name, leads in {**links, "round": "round"}.items():
        (files / "run" / name).symlink_to(leads)
    with nodes[0].pool(nodes[1]) as pool:
        got = pool.get("run", tmp_path / "back", node="n1")
    found = {path.name: path.read_text() for path in got.iterdir()}
    assert found == {"step-2": "2", "latest": "2", "up": "beside"}


def test_a_file_here_that_cannot_be_written_is_an_error_of_this_machine(nodes, tmp_path):
    with nodes[0].pool(nodes[1]) as pool:
        pool.put(__file__, "x.py")
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match=r"file/below"):
            pool.get("x.py", tmp_path / "file" / "below" / "x.py", node="n1")
        assert pool.get("x.py", tmp_path / "new" / "x.py", node="n1").read_text() == Path(__file__).read_text()


def test_a_job_sees_what_was_synced_and_keeps_a_large_result(nodes, tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("words")
    monkeypatch.chdir(tmp_path)

    def work() -> bytes:
        return sky.synced("words.txt").read_bytes() * 10**6

    with nodes[0].pool(nodes[1]) as pool:
        pool.sync("words.txt")
        job = pool.submit(work, detach="with-files")
        assert job.result(timeout=60) == b"words" * 10**6
        shutil.rmtree(nodes[0].path / "blobs")
        assert job.result(timeout=60) == b"words" * 10**6
        for node in nodes:
            shutil.rmtree(node.path / "blobs", ignore_errors=True)
        (tmp_path / "words.txt").write_text("other words")
        pool.sync()
        for node in nodes:
            shutil.rmtree(node.path / "blobs", ignore_errors=True)
        # The client sends again what the head has lost; what is another here by now it cannot send.
        assert pool.submit(work, detach="sent-again").result(timeout=60) == b"other words" * 10**6
        for node in nodes:
            shutil.rmtree(node.path / "blobs", ignore_errors=True)
        (tmp_path / "words.txt").write_text("yet other words")
        with pytest.raises(sky.TaskInputsLost, match="has changed here since"):
            pool.submit(work, detach="without")


def test_files_are_put_and_got_from_the_command_line(nodes, tmp_path, monkeypatch):
    def command(*arguments: str, code: int = 0):
        result = CliRunner().invoke(app, [*arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    monkeypatch.chdir(tmp_path)
    with nodes[0].pool(nodes[1]) as pool:
        Path("fleet.json").write_text(json.dumps(pool.manifest.to_json()))
    Path("vocab.txt").write_text("words")
    assert command("put", "fleet.json", "vocab.txt").stdout == "vocab.txt is vocab.txt on n1, n2\n"
    # A node that never booted is not there.
    manifest = json.loads(Path("fleet.json").read_text())
    manifest["nodes"].append({**manifest["nodes"][1], "name": "n3", "id": "n3"})
    Path("fleet.json").write_text(json.dumps(manifest))
    assert command("put", "fleet.json", "vocab.txt").stdout == "vocab.txt is vocab.txt on n1, n2\n"
    away = command("put", "fleet.json", "vocab.txt", "--node", "n3", code=1).exception
    assert isinstance(away, sky.NodeError) and "n3 is not connected" in str(away)
    answer = command("put", "fleet.json", "vocab.txt", "only/here.txt", "--node", "n2", "--json").stdout
    assert json.loads(answer)["nodes"] == ["n2"]
    assert [(node.path / "files/only/here.txt").exists() for node in nodes] == [False, True]
    assert command("get", "fleet.json", "only/here.txt", "back.txt", "--node", "n2").stdout == "back.txt\n"
    assert Path("back.txt").read_text() == "words"
    assert json.loads(command("get", "fleet.json", "only", "--node", "n2", "--json").stdout)["path"] == "only"
    for arguments, message in (
        (("get", "fleet.json", "vocab.txt"), "--node: several nodes have files"),
        (("get", "fleet.json", "vocab.txt", "--node", "n4"), "no node of that name"),
        (("get", "fleet.json", "../node.json", "--node", "n1"), "REMOTE: a path below"),
        (("put", "fleet.json", "nothing"), "PATH: is not there"),
    ):
        assert message in str(command(*arguments, code=1).exception)
