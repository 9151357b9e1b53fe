"""The instance stores of a node as one file system, with programs that write down what they are called with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from first_boots.boots import program

from skyinfra.first_boot.disks import Scratch
from skyinfra.first_boot.programs import Failed


def scratch_of(tmp_path: Path, count: int) -> tuple[Scratch, Path]:
    """Volumes that are files, and programs that write down what they are called with."""
    devices = tmp_path / "by-id"
    devices.mkdir()
    for index in range(count):
        volume = tmp_path / f"nvme{index}"
        volume.touch()
        for name in (f"store_{index}", f"store_{index}_1", f"store_{index}-part1"):
            (devices / name).symlink_to(volume)
    calls = tmp_path / "calls"
    for name in ("vgcreate", "lvcreate", "mkfs.ext4", "mount", "vgchange"):
        program(tmp_path / "bin", name, f'echo {name} "$@" >>{calls}')
    for name in ("lsblk", "blkid"):
        program(tmp_path / "bin", name, f'echo {name} "$@" >>{calls}; cat {tmp_path}/{name} 2>/dev/null; true')
    return Scratch(f"{devices}/store_*", str(tmp_path / "scratch"), "skyinfra", "root"), calls


@pytest.mark.parametrize("count", [0, 1, 3])
def test_instance_stores_become_one_file_system(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, calls = scratch_of(tmp_path, count)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert scratch.done() is (count == 0)
    if count == 0:
        return
    scratch.do()
    made = [line for line in calls.read_text().splitlines() if not line.startswith(("lsblk", "blkid", "vgchange"))]
    volumes = [f"{tmp_path}/nvme{index}" for index in range(count)]
    device = volumes[0] if count == 1 else "/dev/skyinfra/scratch"
    joined = [
        f"vgcreate -q skyinfra {' '.join(volumes)}",
        "lvcreate -q -y -n scratch -i 3 -I 256k -l 100%FREE skyinfra",
    ]
    assert made == [
        *(joined if count > 1 else []),
        f"mkfs.ext4 -q -F -E nodiscard -m 0 -L skyinfra {device}",
        f"mount -o noatime,nosuid,nodev {device} {scratch.mount}",
    ]


def test_what_holds_something_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, calls = scratch_of(tmp_path, 1)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    program(tmp_path / "bin", "lsblk", 'case "$*" in *FSTYPE*) echo xfs;; esac')
    with pytest.raises(Failed, match=r"hold xfs that is not mounted: nothing is overwritten"):
        scratch.do()
    assert "mkfs" not in calls.read_text()


def test_what_the_image_has_mounted_is_used_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, calls = scratch_of(tmp_path, 2)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "image").mkdir()
    program(tmp_path / "bin", "lsblk", f'case "$*" in *MOUNTPOINT*) echo; echo {tmp_path}/image;; esac')
    scratch.do()
    assert calls.read_text().splitlines() == [f"mount --bind {tmp_path}/image/skyinfra {scratch.mount}"]
    # It belongs to tasks from then on, and the next boot gives its owner what stands there.
    (tmp_path / "image" / "skyinfra").rmdir()
    (tmp_path / "image" / "skyinfra").symlink_to("/etc")
    with pytest.raises(Failed, match="/image/skyinfra is a link"):
        scratch.do()
    assert len(calls.read_text().splitlines()) == 1


def test_what_was_made_before_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, calls = scratch_of(tmp_path, 2)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "blkid").write_text("/dev/dm-0\n")
    scratch.do()
    lines = calls.read_text().splitlines()
    assert "vgchange -ay skyinfra" in lines and not [line for line in lines if line.startswith(("mkfs", "vgcreate"))]
    assert lines[-1] == f"mount -o noatime,nosuid,nodev /dev/dm-0 {scratch.mount}"


def test_what_was_joined_and_got_no_file_system_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, calls = scratch_of(tmp_path, 2)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    program(tmp_path / "bin", "lsblk", 'case "$*" in *FSTYPE*) echo LVM2_member;; esac')
    program(tmp_path / "bin", "readlink", f'[ "$2" = /dev/skyinfra/scratch ] && cat {tmp_path}/joined')
    program(tmp_path / "bin", "wipefs", f"[ $3 = /dev/dm-0 ] && cat {tmp_path}/signatures")
    (tmp_path / "joined").write_text("/dev/dm-0\n")
    # One that has a file system, which blkid does not find, stays.
    (tmp_path / "signatures").write_text("0x438,id,data,ext4\n")
    with pytest.raises(Failed, match="hold LVM2_member that is not mounted"):
        scratch.do()
    assert "mkfs" not in calls.read_text()
    (tmp_path / "signatures").write_text("")
    scratch.do()
    made = [line for line in calls.read_text().splitlines() if line.startswith(("mkfs", "vgcreate", "mount"))]
    assert made == [
        "mkfs.ext4 -q -F -E nodiscard -m 0 -L skyinfra /dev/dm-0",
        f"mount -o noatime,nosuid,nodev /dev/dm-0 {scratch.mount}",
    ]
