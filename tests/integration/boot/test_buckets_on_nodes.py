"""Folders of buckets on booted nodes: real systemd, rclone and FUSE, and servers that speak S3 and Cloud Storage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.google import on_google
from moto.server import ThreadedMotoServer
from servers.cloud_storage import cloud_storage
from support import missing
from tasks_on_nodes.booted import output_of
from terraform_projects.commands import until

import skyinfra as sky

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-first")]

PROGRAMS = ("rclone", "fusermount3")
# Whether a server speaks S3 or Cloud Storage, the variables by which rclone finds it, and the names of its objects.
Store = tuple[str, str, Callable[[], set[str]]]


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest, bed: Bed) -> Iterator[Store]:
    """A server in the network of the nodes, whose bucket has a file."""
    if request.param == "gs":
        with cloud_storage(bed.network.address) as made:
            made.make("a-bucket")
            made.put("a-bucket", "data/a.txt", b"first")
            at = f"GCE_METADATA_HOST={made.address} RCLONE_GCS_ENDPOINT=http://{made.address}/storage/v1/"
            yield "gs", at, lambda: {*made.sizes("a-bucket")}
        return
    server = ThreadedMotoServer(ip_address=bed.network.address, port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=url, **keys)
    client.create_bucket(Bucket="a-bucket")
    client.put_object(Bucket="a-bucket", Key="data/a.txt", Body=b"first")
    given = f"AWS_ACCESS_KEY_ID=k AWS_SECRET_ACCESS_KEY=s RCLONE_S3_PROVIDER=Minio RCLONE_S3_ENDPOINT={url}"
    yield "s3", given, lambda: {each["Key"] for each in client.list_objects_v2(Bucket="a-bucket")["Contents"]}
    server.stop()


def install(root: Path, variables: str) -> None:
    """Puts the programs of this machine there, as apt would, for a server that is not the cloud's."""
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is None or not Path("/dev/fuse").exists():
            missing("rclone, fuse3 and FUSE")
            raise AssertionError
        shutil.copy(found, root / "usr/bin" / (f"{name}.real" if name == "rclone" else name))
    # Debian's fuse3 has it, which older versions of rclone look for.
    (root / "usr/bin/fusermount").symlink_to("fusermount3")
    program = f'exec env {variables} /usr/bin/rclone.real "$@"'
    (root / "usr/bin/rclone").write_text(f"#!/bin/sh\n{program}\n")
    (root / "usr/bin/rclone").chmod(0o755)
    (root / "opt/skyinfra").mkdir(parents=True)
    (root / "opt/skyinfra/packages.json").write_text(json.dumps(["fuse3", "rclone"]))


def test_tasks_read_and_write_buckets_as_files(bed: Bed, fleet: Callable[..., Fleet], store: Store) -> None:
    scheme, variables, keys = store
    mounts = (
        sky.Mount(f"{scheme}://a-bucket/data", "/data"),
        sky.Mount(f"{scheme}://a-bucket/out", "/out", mode="write"),
        sky.Mount(f"{scheme}://a-bucket/state", "/state", mode="cached", cache_gb=1),
    )
    pool = bed.declare() if scheme == "s3" else bed.declare(provider=sky.GCP(flex_start_hours=1))
    made = fleet(pool.model_copy(update={"mounts": mounts}))
    if scheme == "gs":
        on_google(made.head, made)
    install(made.head.root, variables)
    made.head.real_devices = ("fuse",)
    made.boot()
    with made.connect() as pool:
        assert output_of("cat /data/a.txt; echo second > /out/b.txt; echo third > /state/c") >> pool == "first"
        assert "out/b.txt" in keys()
        until(lambda: "state/c" in keys())
        with pytest.raises(Exception, match="returned non-zero exit status"):
            output_of("touch /data/new 2>/dev/null") >> pool
        # The program of one is killed: systemd starts it again, and tasks that run after that see no difference.
        old = made.head.show("skyinfra-mount-0", "MainPID")
        made.head.execute("kill", "-9", old)
        until(lambda: made.head.show("skyinfra-mount-0", "ActiveState") == "active")
        until(lambda: made.head.show("skyinfra-mount-0", "MainPID") not in ("0", old))
        assert output_of("cat /data/a.txt") >> pool == "first"
    # What was closed just before the machine goes is uploaded while it shuts down.
    boots = made.head.boots
    with made.connect() as pool:
        output_of("echo last > /state/d") >> pool
    made.head.execute("systemctl", "reboot", check=False)
    until(lambda: made.head.boots == boots + 1)
    assert "state/d" in keys()
    made.wait(made.head)
    with made.connect() as pool:
        assert output_of("cat /data/a.txt /state/d") >> pool == "firstlast\n"
    assert not made.head.execute("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout
