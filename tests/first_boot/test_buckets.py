"""Folders of buckets on a node: rclone from Debian, real mounts, and servers that speak S3 and Cloud Storage."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import boto3
import pytest
from first_boots.boots import program
from local_fleets.client_fixtures import eventually
from moto.server import ThreadedMotoServer
from servers.cloud_storage import CloudStorage, cloud_storage
from support import missing

from skyinfra.first_boot.buckets import Bucket
from skyinfra.first_boot.programs import Failed

ME = pwd.getpwuid(os.getuid()).pw_name
NAME = "a-bucket"
RCLONE = shutil.which("rclone") or ""
# In the place of systemd: it runs what the unit says.
SYSTEMCTL = r"""
import os, pathlib, re, signal, subprocess, sys, time
verb, unit = sys.argv[1], pathlib.Path(sys.argv[0]).parents[1] / sys.argv[-1]
process = unit.with_suffix(".pid")

def active():
    # Of one that has ended and that nobody has waited for, it is empty.
    running = process.exists() and pathlib.Path("/proc", process.read_text(), "cmdline")
    return bool(running and running.exists() and running.read_bytes())

if verb == "is-active":
    print("active" if active() else "inactive")
if verb in ("stop", "restart"):
    text = unit.read_text()
    said = {name: re.findall(rf"^{name}=-?(.*)$", text, re.M) for name in ("ExecStartPre", "ExecStart", "ExecStop")}
    if process.exists():
        # Where the program has ended by itself, systemd runs these too, and gives no number.
        number = process.read_text() if active() else ""
        for command in said["ExecStop"]:
            command = command.replace("/var/cache", str(unit.parent)).replace("${MAINPID}", number)
            subprocess.check_call(command, shell=True, stderr=-3, timeout=20)
    if active():
        os.kill(int(process.read_text()), signal.SIGTERM)
        while active():
            time.sleep(0.05)
    if verb == "restart":
        subprocess.call(said["ExecStartPre"][0].split(), stderr=-3)
        environment = dict(each.split("=", 1) for each in re.search("^Environment=(.*)$", text, re.M)[1].split())
        [command] = said["ExecStart"]
        with (unit.parent / "rclone.log").open("ab") as log:
            command = command.replace("/var/cache", str(unit.parent)).split()
            started = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        process.write_text(str(started.pid))
        mount = command[3]
        while not os.path.ismount(mount):
            if started.poll() is not None:
                sys.exit(1)
            time.sleep(0.05)
"""

pytestmark = pytest.mark.xdist_group("buckets")


class S3:
    """A moto server at *address*."""

    scheme = "s3"

    def __init__(self, address: str) -> None:
        self.variables = f"RCLONE_S3_PROVIDER=Minio RCLONE_S3_ENDPOINT=http://{address}"
        keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=f"http://{address}", **keys)

    def make(self) -> None:
        self.client.create_bucket(Bucket=NAME)
        # moto tells the version "null" of an object in parts, and does not know it then.
        self.client.put_bucket_versioning(Bucket=NAME, VersioningConfiguration={"Status": "Enabled"})

    def remove(self) -> None:
        found = self.client.list_object_versions(Bucket=NAME)
        for each in (*found.get("Versions", ()), *found.get("DeleteMarkers", ())):
            self.client.delete_object(Bucket=NAME, Key=each["Key"], VersionId=each["VersionId"])
        self.client.delete_bucket(Bucket=NAME)

    def put(self, name: str, body: bytes) -> None:
        self.client.put_object(Bucket=NAME, Key=name, Body=body)

    def get(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=NAME, Key=name)["Body"].read())

    def sizes(self) -> dict[str, int]:
        """The objects of the bucket and their sizes."""
        found = self.client.list_objects_v2(Bucket=NAME).get("Contents", ())
        return {each["Key"]: each["Size"] for each in found}


class Google:
    """An emulator of Cloud Storage, whose nodes ask their metadata service who they are."""

    scheme = "gs"

    def __init__(self, store: CloudStorage) -> None:
        self.store = store
        self.variables = f"GCE_METADATA_HOST={store.address} RCLONE_GCS_ENDPOINT=http://{store.address}/storage/v1/"
        self.make = partial(store.make, NAME)
        self.remove = partial(store.remove, NAME)
        self.put = partial(store.put, NAME)
        self.get = partial(store.get, NAME)
        self.sizes = partial(store.sizes, NAME)


class Node:
    """A machine whose buckets are in *store*, as far as its mounts go."""

    def __init__(self, folder: Path, store: S3 | Google, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.mount = folder, folder / "data"
        self.log = folder / "rclone.log"
        self.scheme = store.scheme
        tools = folder / "bin"
        own = f"AWS_ACCESS_KEY_ID=k AWS_SECRET_ACCESS_KEY=s {store.variables} RCLONE_VFS_WRITE_BACK=1s"
        # The variables of this machine would name certificates that rclone does not read, and other credentials.
        program(tools, "rclone", f'exec env -u AWS_CA_BUNDLE -u GOOGLE_APPLICATION_CREDENTIALS {own} {RCLONE} "$@"')
        program(tools, "systemctl", f'exec {sys.executable} {tools}/systemctl.py "$@"')
        (tools / "systemctl.py").write_text(SYSTEMCTL)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    def bucket(self, mode: str = "read", source: str = f"{NAME}/data") -> Bucket:
        return Bucket(
            f"{self.scheme}://{source}", str(self.mount), mode, 1, ME, str(self.folder / "skyinfra-mount-0.service")
        )

    def systemctl(self, verb: str) -> None:
        subprocess.run(["systemctl", verb, "skyinfra-mount-0.service"], check=True)

    def kill(self, number: int) -> None:
        """Sends *number* to the program that mounts: 9 is what the kernel sends where memory is short."""
        pid = int((self.folder / "skyinfra-mount-0.pid").read_text())
        os.kill(pid, number)
        # It is no child of this process.
        eventually(lambda: not os.path.ismount(self.mount))

    def close(self) -> None:
        for _ in range(2):
            subprocess.run(["fusermount3", "-uz", str(self.mount)], capture_output=True, check=False)
        file = self.folder / "skyinfra-mount-0.pid"
        if file.exists():
            subprocess.run(["kill", "-9", file.read_text()], capture_output=True, check=False)


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> Iterator[S3 | Google]:
    if request.param == "gs":
        with cloud_storage() as made:
            yield Google(made)
        return
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield S3("{}:{}".format(*server.get_host_and_port()))
    server.stop()


@pytest.fixture
def kept(store: S3 | Google) -> Iterator[S3 | Google]:
    """The store, with a bucket that has some files."""
    store.make()
    for key in ("data/a.txt", "data/sub/b.txt", "other/c.txt"):
        store.put(key, key.encode())
    yield store
    store.remove()


Nodes = Callable[..., Node]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    if not RCLONE or not shutil.which("fusermount3"):
        missing("rclone and fuse3")
    if os.getuid() != 0 or not Path("/dev/fuse").exists():
        missing("FUSE, for root")
    made: list[Node] = []

    def make(store: S3 | Google) -> Node:
        made.append(Node(tmp_path, store, monkeypatch))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def node(nodes: Nodes, kept: S3 | Google) -> Node:
    return nodes(kept)


def test_files_are_read_and_nothing_is_written(node: Node, kept: S3 | Google) -> None:
    bucket = node.bucket()
    assert not bucket.done()
    bucket.do()
    assert bucket.done()
    assert sorted(each.name for each in node.mount.iterdir()) == ["a.txt", "sub"]
    assert (node.mount / "sub" / "b.txt").read_text() == "data/sub/b.txt"
    found = (node.mount / "a.txt").stat()
    assert (found.st_uid, oct(found.st_mode & 0o777)) == (os.getuid(), "0o644")
    with pytest.raises(OSError, match="Read-only file system"):
        (node.mount / "new").write_text("x")
    # What others put there is seen after some seconds.
    kept.put("data/later", b"x")
    eventually(lambda: (node.mount / "later").exists())
    assert kept.sizes().keys() == {"data/a.txt", "data/sub/b.txt", "other/c.txt", "data/later"}


def test_a_file_is_in_the_bucket_when_it_is_closed(node: Node, kept: S3 | Google) -> None:
    node.bucket("write").do()
    size = 40 * 2**20  # more than one part
    (node.mount / "run" / "1").mkdir(parents=True)
    with (node.mount / "run" / "1" / "model.bin").open("wb") as file:
        for _ in range(size // 2**20):
            file.write(bytes(2**20))
    assert kept.sizes()["data/run/1/model.bin"] == size
    (node.mount / "run" / "1" / "model.bin").rename(node.mount / "run" / "best.bin")
    assert {"data/run/best.bin": size}.items() <= kept.sizes().items() and "data/run/1/model.bin" not in kept.sizes()
    (node.mount / "run" / "best.bin").unlink()
    # What it tried at first is gone, too.
    assert kept.sizes().keys() == {"data/a.txt", "data/sub/b.txt", "other/c.txt"}
    # Without a copy on the disk there is nothing to add to.
    with pytest.raises(OSError), (node.mount / "a.txt").open("a") as file:
        file.write("more")
    assert kept.sizes()["data/a.txt"] == len("data/a.txt")


def test_a_file_that_the_bucket_does_not_take_fails_when_it_is_closed(node: Node, kept: S3 | Google) -> None:
    node.bucket("write").do()
    kept.remove()
    try:
        file = (node.mount / "model.bin").open("wb")
        file.write(b"x" * 1000)
        with pytest.raises(OSError):
            file.close()
    finally:
        kept.make()


def test_copies_are_uploaded_before_the_unit_ends(node: Node, kept: S3 | Google) -> None:
    node.bucket("cached").do()
    file = node.mount / "state"
    file.write_text("one")
    with file.open("r+") as stream:
        stream.seek(3)
        stream.write(" two")
    with file.open("a") as stream:
        stream.write(" three")
    # github.com/skypilot-org/skypilot/issues/8519, github.com/rclone/rclone/issues/7309
    node.systemctl("stop")
    assert kept.get("data/state") == b"one two three"
    assert not os.path.ismount(node.mount)


@pytest.mark.parametrize("number", [9, 15])
@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_mount_whose_program_is_ended_comes_back_with_what_was_not_uploaded(
    node: Node, kept: S3 | Google, tmp_path: Path, number: int
) -> None:
    bucket = node.bucket("cached")
    bucket.do()
    (node.mount / "state").write_text("one")
    # It notes what a file is a moment after that is closed.
    noted = next((tmp_path / "skyinfra-mount-0" / "vfsMeta").rglob("state"))
    eventually(lambda: '"Size": 3' in noted.read_text())
    node.kill(number)
    if number == 9:
        # github.com/rclone/rclone/issues/2982; the kernel says the other of a request that was on its way.
        with pytest.raises(OSError, match=r"endpoint is not connected|caused connection abort"):
            list(node.mount.iterdir())
    # Nothing uploads the copy before the unit runs again: one that waits for it first never does.
    assert not bucket.done()
    bucket.do()
    assert bucket.done()
    eventually(lambda: kept.sizes().get("data/state") == 3)
    # Until then it is not seen.
    eventually((node.mount / "state").exists)
    assert (node.mount / "state").read_text() == "one"


@pytest.mark.parametrize("mode", ["read", "write", "cached"])
def test_a_bucket_that_is_not_there_is_named(node: Node, mode: str) -> None:
    with pytest.raises(Failed, match=f"cannot list {node.scheme}://no-bucket/data: there is no such bucket"):
        node.bucket(mode, "no-bucket/data").do()
    assert not os.path.ismount(node.mount)


def test_a_prefix_without_files_is_none_to_read_and_one_to_write(node: Node, kept: S3 | Google) -> None:
    # github.com/GoogleCloudPlatform/gcsfuse/issues/377: mounted, and nothing is there.
    bucket = node.bucket("read", f"{NAME}/Data")
    with pytest.raises(Failed, match=f"{node.scheme}://{NAME}/Data has no files"):
        bucket.do()
    # The next attempt looks again.
    assert not bucket.done()
    kept.put("Data/x", b"x")
    bucket.do()
    assert bucket.done()
    node.close()
    node.bucket("write", f"{NAME}/new/run").do()
    (node.mount / "x").write_text("x")
    assert kept.sizes()["new/run/x"] == 1


def test_a_whole_bucket(node: Node) -> None:
    node.bucket("read", NAME).do()
    assert sorted(each.name for each in node.mount.iterdir()) == ["data", "other"]


def test_files_are_never_hidden(node: Node) -> None:
    node.mount.mkdir()
    (node.mount / "mine").touch()
    with pytest.raises(Failed, match=f"has files, which {node.scheme}://a-bucket/data would hide"):
        node.bucket().do()
    assert [each.name for each in node.mount.iterdir()] == ["mine"]


REFUSED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
EMPTY = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


@pytest.mark.parametrize("may", ["nothing", "list"])
def test_missing_rights_are_named_before_the_first_task(nodes: Nodes, may: str) -> None:
    # github.com/kahing/goofys/issues/186
    class Store(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200 if may == "list" else 403, EMPTY if may == "list" else REFUSED)

        def do_PUT(self) -> None:
            self.answer(403, REFUSED)

        def do_HEAD(self) -> None:
            self.answer(403, REFUSED)

        def answer(self, status: int, text: str) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        bucket = nodes(S3(f"127.0.0.1:{server.server_address[1]}")).bucket("write")
        verb = "write to" if may == "list" else "list"
        with pytest.raises(Failed, match=rf"cannot {verb} s3://a-bucket/data: .*it needs s3:ListBucket"):
            bucket.do()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("right", "verb"),
    [
        ("storage.objects.list", "list"),
        ("storage.objects.create", "write to"),
        ("storage.objects.delete", "delete from"),
    ],
)
@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_missing_rights_of_a_service_account_are_named(node: Node, kept: Google, right: str, verb: str) -> None:
    kept.store.may_not = right
    try:
        with pytest.raises(
            Failed, match=rf"service account of this machine cannot {verb} gs://a-bucket/data: .*{right}"
        ):
            node.bucket("write").do()
    finally:
        kept.store.may_not = ""


@pytest.mark.parametrize("mode", ["read", "cached"])
@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_a_service_account_that_may_reach_one_prefix_alone(node: Node, kept: Google, mode: str) -> None:
    # github.com/rclone/rclone/issues/2193, 3014: nothing asks for the bucket itself, and no file says who may read it.
    kept.store.below = "data/"
    try:
        node.bucket(mode).do()
        assert (node.mount / "sub" / "b.txt").read_text() == "data/sub/b.txt"
        if mode == "cached":
            (node.mount / "state").write_text("one")
            (node.mount / "state").rename(node.mount / "sub" / "moved")
            node.systemctl("stop")
            assert kept.get("data/sub/moved") == b"one"
        node.close()
        if mode == "cached":
            with pytest.raises(Failed, match=r"cannot write to gs://a-bucket/other: .*storage\.objects\.create"):
                node.bucket(mode, f"{NAME}/other").do()
        else:
            node.bucket(mode, f"{NAME}/other").do()
            with pytest.raises(OSError):
                (node.mount / "c.txt").read_text()
    finally:
        kept.store.below = ""


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("mode", ["read", "write", "cached"])
def test_systemd_takes_the_unit(tmp_path: Path, mode: str, scheme: str) -> None:
    if not shutil.which("systemd-analyze") or not RCLONE:
        missing("systemd-analyze and rclone")
    file = tmp_path / "skyinfra-mount-0.service"
    file.write_text(Bucket(f"{scheme}://{NAME}/a.b_c", "/data/x-y", mode, 7, ME, str(file))._text())
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert not [line for line in done.stderr.splitlines() if file.name in line], done.stderr
