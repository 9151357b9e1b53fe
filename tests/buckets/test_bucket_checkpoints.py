"""Checkpoints in a bucket: of a moto server, whose network fails at each request; see `servers.buckets`."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from servers.buckets import LEAST_PART, NAME, BucketServer

import skyinfra as sky
from skyinfra import CloudCredentialsRefused, CloudPermissionDenied, CloudRefused, InvalidField, MissingDependency
from skyinfra import buckets as room

URL = f"s3://{NAME}/team/run-7"
PREFIX = "team/run-7/"
# So that a small state travels in parts.
PART = 16 * LEAST_PART
SEVERAL_PARTS = bytes(PART + 2**10)


@pytest.fixture(scope="module")
def _server() -> Iterator[BucketServer]:
    with BucketServer().serving() as server:
        yield server


@pytest.fixture
def server(_server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BucketServer:
    _server.empty()
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", _server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-key-of-the-test")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # A network that is gone is not waited for.
    monkeypatch.setattr(room, "ATTEMPTS", 1)
    monkeypatch.setattr(room, "PART", PART)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Making one takes longer than a request.
    monkeypatch.setattr(room, "_connect", cache(room._connect))
    return _server


def folders(server: BucketServer) -> list[str]:
    """The checkpoints, whole or not, without the word that each has of its own."""
    found = {key.removeprefix(PREFIX).partition("/")[0] for key in server.names()}
    return sorted(name[:26] for name in found)


def test_the_last_checkpoint_is_loaded_and_old_ones_go(server: BucketServer, tmp_path: Path) -> None:
    checkpoints = sky.SpotCheckpointer(URL, keep=2)
    assert checkpoints.load_latest() is None
    for step in (1, 2, 10):
        saved = checkpoints.save({"step": step}, step)
    assert str(saved).startswith(f"{URL}/00000003-step-000000000010-")
    # Another process looks anew (marin#1632).
    assert sky.SpotCheckpointer(URL).load_latest() == ({"step": 10}, 10)
    assert folders(server) == ["00000002-step-000000000002", "00000003-step-000000000010"]
    # Training that begins anew is what was saved last.
    checkpoints.save({"step": 3}, 3)
    assert pickle.loads(pickle.dumps(checkpoints)).load_latest() == ({"step": 3}, 3)
    # Nothing of it stays here.
    assert list(tmp_path.iterdir()) == []


def test_no_object_is_written_twice(server: BucketServer) -> None:
    """Where a store renames by copying, the object may not be found (s3-connector-for-pytorch#295)."""
    checkpoints = sky.SpotCheckpointer(URL, keep=1)
    for _ in range(3):
        checkpoints.save("state", 5)
    written = [path for method, path, _ in server.requests if method in ("PUT", "POST")]
    assert len(written) == len(set(written)) == 6
    assert not [headers for _, _, headers in server.requests if "x_amz_copy_source" in headers]


def test_other_stores_get_no_header_that_they_do_not_know(server: BucketServer) -> None:
    """boto3 adds checksums since 1.36, which Cloud Storage, R2 and MinIO refuse (boto3#4400, qdrant#9568)."""
    sky.SpotCheckpointer(URL).save(SEVERAL_PARTS, 5)
    sky.SpotCheckpointer(URL).load_latest()
    sent = {name for _, _, headers in server.requests for name in headers}
    assert "content_md5" in sent
    assert not {name for name in sent if "checksum" in name or "trailer" in name}
    assert not [h for _, _, h in server.requests if "aws-chunked" in h.get("content_encoding", "")]


def test_cloud_storage_is_asked_in_the_same_language(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    checkpoints = sky.SpotCheckpointer(f"gs://{NAME}/team/run-7/")
    assert str(checkpoints.save([1], 4)).startswith("gs://runs/team/run-7/00000001-step-000000000004-")
    assert checkpoints.load_latest() == ([1], 4)
    assert checkpoints.path == "gs://runs/team/run-7"


def test_a_folder_is_a_checkpoint_too(server: BucketServer, tmp_path: Path) -> None:
    def save(state: dict[str, bytes], folder: Path) -> None:
        (folder / "empty" / "below").mkdir(parents=True)
        for name, content in state.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    def load(folder: Path) -> dict[str, bytes]:
        assert (folder / "empty" / "below").is_dir()
        return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}

    checkpoints = sky.SpotCheckpointer(URL, save=save, load=load, keep=1)
    state = {"rank 0/a.bin": b"a", "rank1": SEVERAL_PARTS, "whole.json": b"of the user", "none": b""}
    for _ in range(2):
        checkpoints.save(state, 5)
    assert checkpoints.load_latest() == (dict(sorted(state.items())), 5)
    assert folders(server) == ["00000002-step-000000000005"]
    # A link that leads nowhere would be lost.
    linking = sky.SpotCheckpointer(URL, save=lambda state, file: file.symlink_to("nowhere"), load=load)
    with pytest.raises(InvalidField, match="files and folders alone"):
        linking.save(1, 6)


def test_what_others_have_beside_it_stays(server: BucketServer) -> None:
    client = server.client
    others = [
        "team/run-7",
        "team/run-70/x",
        "team/run-7/notes.txt",
        "team/run-7/a/00000001-step-000000000001-0.pt/data",
    ]
    for key in others:
        client.put_object(Bucket=NAME, Key=key, Body=b"of others")
    client.create_multipart_upload(Bucket=NAME, Key="team/run-7/upload-of-others")
    checkpoints = sky.SpotCheckpointer(URL, keep=1)
    for step in range(3):
        checkpoints.save(step, step)
    assert [key for key in server.names() if "-step-00000000000" not in key.partition(PREFIX)[2][:26]] == sorted(others)
    assert server.unfinished() == ["team/run-7/upload-of-others"]


@pytest.mark.parametrize(
    "carried_out", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["not carried out", "answer lost"]
)
def test_an_end_at_any_request_leaves_a_whole_checkpoint(server: BucketServer, carried_out: bool) -> None:
    """Whatever was sent before is there, and nothing after: as a process that is killed, or a network that is cut."""
    checkpoints = sky.SpotCheckpointer(URL, keep=1)
    checkpoints.save("first", 1)
    server.heal()
    checkpoints.save(SEVERAL_PARTS, 2)
    whole = len(server.requests)
    assert whole > 10
    seen = set()
    for cut in range(1, whole + 1):
        server.empty()
        checkpoints.save("first", 1)
        server.heal()
        server.cut_at, server.answers_last = cut, carried_out
        with pytest.raises(CloudRefused):
            checkpoints.save(SEVERAL_PARTS, 2)
        server.heal()
        found = sky.SpotCheckpointer(URL).load_latest()
        assert found in (("first", 1), (SEVERAL_PARTS, 2)), cut
        seen.add(found[1])
        # The next one clears up: what is half there, and parts that cost money (hiero-block-node#1108).
        checkpoints.save("third", 3)
        assert sky.SpotCheckpointer(URL).load_latest() == ("third", 3)
        assert {name[9:] for name in folders(server)} == {"step-000000000003"}, cut
        assert server.unfinished() == []
    assert seen == {1, 2}


@pytest.mark.parametrize("cut", [pytest.param(2, marks=pytest.mark.slow), 5, pytest.param(8, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_leaves_a_whole_checkpoint(server: BucketServer, tmp_path: Path, cut: int) -> None:
    code = f"""
import os, signal, tempfile, skyinfra as sky, skyinfra.buckets as room
room.PART = {PART}
tempfile.tempdir = {str(tmp_path)!r}
sky.SpotCheckpointer({URL!r}, keep=1).save(bytes({len(SEVERAL_PARTS)}), 2)
"""
    sky.SpotCheckpointer(URL, keep=1).save("first", 1)
    server.heal()
    process = subprocess.Popen([sys.executable, "-c", code])
    server.hears = lambda number: process.kill() if number == cut else None
    process.wait(120)
    server.heal()
    assert process.returncode == -signal.SIGKILL
    assert sky.SpotCheckpointer(URL).load_latest() in (("first", 1), (SEVERAL_PARTS, 2))
    sky.SpotCheckpointer(URL, keep=1).save("third", 3)
    assert {name[9:] for name in folders(server)} == {"step-000000000003"}
    assert server.unfinished() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n != 5)) for n in range(1, 12)])
def test_a_request_whose_answer_is_lost_is_sent_again(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The fifth completes an upload in parts, which a store does once."""
    monkeypatch.setattr(room, "ATTEMPTS", 3)
    checkpoints = sky.SpotCheckpointer(URL, keep=1)
    checkpoints.save("first", 1)
    server.heal()
    server.lost = {number}
    checkpoints.save(SEVERAL_PARTS, 2)
    assert checkpoints.load_latest() == (SEVERAL_PARTS, 2)
    assert folders(server) == ["00000002-step-000000000002"]
    assert server.unfinished() == []


@pytest.mark.slow
def test_two_writers_at_once_leave_a_whole_checkpoint(server: BucketServer) -> None:
    """Both places answer after a partition: which one is loaded is open, half of one it is not."""
    ours, theirs = sky.SpotCheckpointer(URL, keep=1), sky.SpotCheckpointer(URL, keep=1)
    for moment in range(1, 12):
        server.empty()
        ours.save("first", 1)
        server.heal()
        server.hears = lambda number, moment=moment: theirs.save("theirs", 3) if number == moment else None
        # It may find that its files are gone, and says so.
        with contextlib.suppress(CloudRefused):
            ours.save(SEVERAL_PARTS, 2)
        server.heal()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert sky.SpotCheckpointer(URL).load_latest() in ((SEVERAL_PARTS, 2), ("theirs", 3)), moment
        ours.save("fourth", 4)
        assert {name[9:] for name in folders(server)} == {"step-000000000004"}
        assert server.unfinished() == []


def test_a_save_that_fails_leaves_what_was_there(server: BucketServer, tmp_path: Path) -> None:
    checkpoints = sky.SpotCheckpointer(URL)
    checkpoints.save("good", 1)
    before = server.names()
    # A byte that is another when it arrives: the store refuses it, in a small file and in a part.
    for state in ("bad", SEVERAL_PARTS):
        server.broken = lambda path: path.endswith("/data")
        with pytest.raises(CloudRefused, match=r"s3:PutObject on s3://runs/team/run-7/00000002-.*: BadDigest"):
            checkpoints.save(state, 2)
        server.heal()
        assert server.names() == before
        assert server.unfinished() == []

    def save(state: Any, file: Path) -> None:
        file.write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        sky.SpotCheckpointer(URL, save=save, load=Path.read_text).save(1, 2)
    assert server.names() == before
    assert list(tmp_path.iterdir()) == []
    assert checkpoints.load_latest() == ("good", 1)


def test_a_store_that_has_lost_what_it_took_is_not_believed(server: BucketServer) -> None:
    checkpoints = sky.SpotCheckpointer(URL, keep=1)
    checkpoints.save("good", 1)

    real = room.Objects.upload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.Objects, "upload", lambda self, files: real(self, dict(list(files.items())[1:])))
        with pytest.raises(CloudRefused, match=r"is not whole, and no upload has failed: data has no bytes"):
            checkpoints.save("bad", 2)
    assert not [path for method, path, _ in server.requests if method == "PUT" and "00000002" in path]
    assert checkpoints.load_latest() == ("good", 1)


def test_a_store_that_throttles_is_asked_again(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ATTEMPTS", 3)
    server.refuse = {1: "SlowDown", 4: "SlowDown"}
    checkpoints = sky.SpotCheckpointer(URL)
    checkpoints.save("state", 1)
    server.heal()
    server.ends_early = 2
    assert checkpoints.load_latest() == ("state", 1)
    assert server.ends_early == 0


def test_a_damaged_checkpoint_is_passed_over(server: BucketServer) -> None:
    checkpoints = sky.SpotCheckpointer(URL, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, step)
    second, third = (
        next(k for k in server.names() if f"step-{step:012}" in k and k.endswith("/data")) for step in (2, 3)
    )
    client = server.client
    client.put_object(Bucket=NAME, Key=third, Body=client.get_object(Bucket=NAME, Key=third)["Body"].read()[::-1])
    with pytest.warns(UserWarning, match=r"00000003-.* is damaged \(data is not what was saved\): 00000002-.*loaded"):
        assert checkpoints.load_latest() == (2, 2)
    client.delete_object(Bucket=NAME, Key=second)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert checkpoints.load_latest() == (1, 1)
    assert [str(each.message).partition(" is damaged ")[2][:20] for each in said] == [
        "(data is not what wa",
        "(data has no bytes, ",
    ]
    for key in server.names():
        if key.endswith("whole.json"):
            client.put_object(Bucket=NAME, Key=key, Body=b"[]")
    # Nothing is not what was saved: training from step 0 would be.
    with pytest.raises(FileNotFoundError, match=r"no checkpoint below s3://runs/team/run-7 is whole: 00000001-"):
        checkpoints.load_latest()
    # What is damaged is not counted among those that are kept.
    checkpoints.save(4, 4)
    assert folders(server) == ["00000004-step-000000000004"]


def test_one_that_goes_while_it_is_loaded_is_loaded_from_the_next(server: BucketServer) -> None:
    """Rank 1 loads while rank 0 saves."""
    checkpoints = sky.SpotCheckpointer(URL, keep=1)
    checkpoints.save("old", 1)
    real, once = room.Objects.download, []

    def download(self: room.Objects, name: str, file: Path, size: int) -> None:
        if not once:
            once.append(checkpoints.save("new", 2))
        real(self, name, file, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.Objects, "download", download)
        assert sky.SpotCheckpointer(URL).load_latest() == ("new", 2)


def test_refusals_name_the_action_and_the_object_and_no_secret(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    with pytest.raises(CloudRefused, match=r"s3:ListBucket on s3://no-such-bucket/x/: NoSuchBucket: ") as error:
        sky.SpotCheckpointer("s3://no-such-bucket/x").load_latest()
    said.append(str(error.value))
    server.heal()
    server.refuse = {2: "AccessDenied"}
    with pytest.raises(
        CloudPermissionDenied, match=r"s3:PutObject on s3://runs/team/run-7/00000001-.*/data: "
    ) as denied:
        sky.SpotCheckpointer(URL).save(1, 1)
    said.append(str(denied.value))
    # It arrives where there is no boto3.
    assert isinstance(pickle.loads(pickle.dumps(denied.value)), CloudPermissionDenied)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr(room, "_connect", room._connect.__wrapped__)
    with pytest.raises(CloudCredentialsRefused, match="NoCredentialsError"):
        sky.SpotCheckpointer(URL).load_latest()
    assert "the-secret-key" not in json.dumps(said)


def test_without_boto3_it_says_where_nodes_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    checkpoints = sky.SpotCheckpointer(URL)
    with pytest.raises(MissingDependency, match=r"through boto3, which is not installed\n.*Image\(pip=\[\"boto3\"\]\)"):
        checkpoints.load_latest()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("s3://runs", "needs a prefix"),
        ("gs://runs/", "needs a prefix"),
        ("s3://Runs/x", "expected s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"),
        ("s3://runs/a/../b", "expected s3://BUCKET/PREFIX"),
        ("s3://runs/a//b", "expected s3://BUCKET/PREFIX"),
        ("s3://key:secret@runs/a", "expected s3://BUCKET/PREFIX"),
        ("https://runs.s3.amazonaws.com/x", "expected s3://BUCKET/PREFIX"),
        (Path("s3://runs/x"), "expected s3://BUCKET/PREFIX"),
    ],
)
def test_what_is_no_prefix_of_a_bucket_is_refused(path: str | Path, why: str) -> None:
    with pytest.raises(InvalidField, match=why) as error:
        sky.SpotCheckpointer(path)
    assert "secret" not in str(error.value)
