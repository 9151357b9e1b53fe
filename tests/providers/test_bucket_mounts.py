"""Folders of buckets that nodes mount: what is declared, where, and what reaches the nodes and their role."""

from __future__ import annotations

import json
from typing import Any

import pytest

import skyinfra as sky
from skyinfra.bootstrap import user_data
from skyinfra.bootstrap.files import written
from skyinfra.compiler import compile_pool, compile_pools, revision
from skyinfra.providers import kinds, read

DATA = sky.Mount("s3://my-bucket/data", "/data")
OUT = sky.Mount("s3://my-bucket/runs/1/", "/out", mode="write")
GOOGLE = sky.Mount("gs://my-bucket/data", "/data")


def pool(*mounts: sky.Mount, provider: Any = None, **fields: Any) -> Any:
    provider = provider or sky.AWS()
    declared = sky.ComputePool(name="p", provider=provider, accelerator="L4", mounts=list(mounts), **fields)
    return compile_pool(declared, "s")


def said(make: Any) -> str:
    with pytest.raises(sky.SkyinfraError) as caught:
        make()
    return " ".join(str(caught.value).split())


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "Mount.bucket: expected a bucket such as s3://my-bucket/data or gs://my-bucket/data": ("my-bucket/data", {}),
    "or gs://my-bucket/data (given: 'gcs://my-bucket/data')": ("gcs://my-bucket/data", {}),
    "no bucket has such a name (given: 'my_bucket')": ("s3://my_bucket/data", {}),
    "no bucket has such a name (given: 'My_Bucket')": ("gs://My_Bucket/data", {}),
    "cannot mount such a prefix (given: 'a b')": ("s3://my-bucket/a b", {}),
    "cannot mount such a prefix (given: '../x')": ("s3://my-bucket/../x", {}),
    "cannot mount such a prefix (given: 'a//b')": ("s3://my-bucket/a//b", {}),
    "cannot mount such a prefix (given: '50%')": ("s3://my-bucket/50%", {}),
    "cannot mount such a prefix (given: '${HOME}')": ("s3://my-bucket/${HOME}", {}),
    "Mount.path: expected an absolute path": ("s3://my-bucket", {"path": "data"}),
    "Mount.path: is of the system, or not seen by tasks": ("s3://my-bucket", {"path": "/home/me"}),
    'mode="read" keeps no copies': ("s3://my-bucket", {"cache_gb": 5}),
    "Mount.mode": ("s3://my-bucket", {"mode": "rw"}),
    "Mount.cache_gb": ("s3://my-bucket", {"mode": "cached", "cache_gb": 0}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_declared_wrong_is_named(message: str) -> None:
    bucket, fields = REFUSED[message]
    assert message in said(lambda: sky.Mount(bucket, **{"path": "/data", **fields}))


def test_paths_that_lie_in_each_other() -> None:
    for path in ("/data", "/data/more"):
        other = sky.Mount("s3://other-bucket", path)
        assert "lies in the path of another mount" in said(lambda other=other: pool(DATA, other))
    assert pool(DATA, sky.Mount("s3://other-bucket", "/data2"))
    cloud = sky.AWS(zones=["us-east-1a"])
    disk = sky.Volume(name="disk", provider=cloud, id="vol-1")
    for path in ("/data", "/data/x", "/data/x/y"):
        assert f"mounts: and the volume at {path} lie in each other" in said(
            lambda path=path: pool(DATA, provider=cloud, volumes={path: disk})
        )
    assert pool(DATA, provider=cloud, volumes={"/disk": disk})


def test_places_that_mount_none_say_so_before_anything_is_made() -> None:
    assert {kind: read(kind).traits.mounts for kind in kinds() if read(kind).traits.mounts} == {
        "aws": "s3",
        "gcp": "gs",
    }
    for provider in (sky.Local(simulate=True), sky.RunPod(), sky.Container()):
        text = said(lambda provider=provider: pool(DATA, provider=provider))
        assert "no bucket is mounted on" in text, text
        assert "Buckets are mounted on AWS (s3://) and Google Cloud (gs://)." in text
    assert "no bucket of gs:// is mounted on AWS" in said(lambda: pool(GOOGLE))
    assert "no bucket of s3:// is mounted on Google Cloud" in said(lambda: pool(DATA, provider=sky.GCP()))
    # A pool that may move is refused where one of its places cannot.
    with pytest.raises(sky.NotSupported, match="no bucket of s3:// is mounted on Google Cloud"):
        compile_pools([sky.ComputePool(provider=[sky.AWS(), sky.GCP()], accelerator="L4", mounts=[DATA])], "s")


def steps(made: Any) -> dict[str, dict[str, Any]]:
    document = json.loads(written(user_data(made).head)["/opt/skyinfra/steps.json"])
    return {each["name"]: each for each in document["steps"]}


def test_nodes_mount_them_before_their_runner_starts() -> None:
    made = steps(pool(DATA, OUT, sky.Mount("s3://other-bucket", "/state", mode="cached"), image=sky.Image(apt=["git"])))
    assert made["packages of the system"]["arguments"]["apt"] == ["git", "fuse3", "rclone"]
    names = list(made)
    assert names.index("packages of the system") < names.index("bucket at /data") < names.index("services")
    assert made["bucket at /data"]["arguments"] == {
        "url": "s3://my-bucket/data",
        "mount": "/data",
        "mode": "read",
        "cache_gb": 0,
        "user": "skyinfra",
        "unit": "/etc/systemd/system/skyinfra-mount-0.service",
    }
    assert made["bucket at /out"]["arguments"]["url"] == "s3://my-bucket/runs/1"
    other = steps(pool(GOOGLE, provider=sky.GCP()))
    assert other["bucket at /data"]["arguments"]["url"] == "gs://my-bucket/data"
    assert other["packages of the system"]["arguments"]["apt"] == ["fuse3", "rclone"]
    assert made["bucket at /state"]["arguments"]["cache_gb"] == 20
    assert made["bucket at /state"]["arguments"]["unit"].endswith("skyinfra-mount-2.service")
    files = written(user_data(pool(DATA)).head)
    assert "/opt/skyinfra/first_boot/buckets.py" in files and "/opt/skyinfra/first_boot/mounts.py" not in files
    assert "/opt/skyinfra/first_boot/buckets.py" not in written(user_data(pool()).head)


def test_the_role_may_do_what_is_declared_and_no_more() -> None:
    assert pool(DATA, OUT).selection.inputs["buckets"] == [
        {"bucket": "my-bucket", "prefix": "data", "write": False},
        {"bucket": "my-bucket", "prefix": "runs/1", "write": True},
    ]
    assert "buckets" not in pool().selection.inputs
    dotted = sky.Mount("gs://a_bucket.example.com", "/data", mode="cached")
    assert pool(dotted, provider=sky.GCP()).selection.inputs["buckets"] == [
        {"bucket": "a_bucket.example.com", "prefix": "", "write": True}
    ]
    assert "buckets" not in pool(provider=sky.GCP()).selection.inputs


def test_what_makes_the_nodes_anew() -> None:
    plain, mounted = revision(pool()), revision(pool(DATA))
    cached = sky.Mount("s3://my-bucket/data", "/data", mode="cached")
    every = [plain, mounted, revision(pool(cached)), revision(pool(sky.Mount("s3://my-bucket/data/", "/data2")))]
    assert len(set(every)) == 4
    # The same folder, written otherwise.
    assert revision(pool(sky.Mount("s3://my-bucket/data/", "/data"))) == mounted
