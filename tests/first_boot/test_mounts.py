"""Volumes that outlive a fleet, on a node: made once, mounted as they are, grown, and never overwritten."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from devices import small_disks
from devices.small_disks import run, uuid
from first_boots.boots import FirstBoot, program, step
from support import missing

from skyinfra.first_boot.mounts import Mount
from skyinfra.first_boot.programs import Failed, signatures

FIRST, SECOND = "vol-0123456789abcdef0", "vol-0fedcba9876543210"
SIZE = 16 * 2**20
NOBODY = "nobody"
ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_disks.use_programs(tmp_path, monkeypatch)


def volume_of(tmp_path: Path, disk: Path | str, index: int = 1) -> Mount:
    """The second of two volumes, as a machine of AWS has it."""
    devices = tmp_path / "by-id"
    devices.mkdir(exist_ok=True)
    link = devices / f"nvme-{(FIRST, SECOND)[index].replace('-', '')}"
    link.unlink(missing_ok=True)
    link.symlink_to(disk)
    places = [f"{devices}/nvme-{{}}", f"{devices}/xvdh"]
    return Mount("datasets", str(tmp_path / "data"), ME, "disk", places, f"{FIRST} {SECOND}", index)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A file in the place of a disk. To mount and grow it is noted, and not done."""
    file = tmp_path / "disk"
    small_disks.blank(file, SIZE)
    for name in ("mount", "resize2fs", "xfs_growfs"):
        program(tmp_path / "bin", name, f'echo {name} "$@" >>{tmp_path}/calls')
    return file


def calls(tmp_path: Path) -> list[str]:
    file = tmp_path / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_an_empty_disk_gets_a_file_system_once(tmp_path: Path, disk: Path) -> None:
    volume = volume_of(tmp_path, disk)
    assert signatures(str(disk)) == [] and not volume.done()
    volume.do()
    assert signatures(str(disk)) == ["skyinfra-volume ext4"]
    made = uuid(disk)
    volume.do()
    assert uuid(disk) == made
    mounted = [f"mount -o noatime,nosuid,nodev {disk} {volume.mount}"]
    assert calls(tmp_path) == mounted * 2
    # It grows where the disk has, before it is mounted.
    os.truncate(disk, 2 * SIZE)
    volume.do()
    assert calls(tmp_path) == [*mounted * 2, f"resize2fs {disk}", *mounted]


@pytest.mark.parametrize(
    ("made", "grown"),
    [
        (["mkfs.ext4", "-q", "-F", "-L", "mine"], []),
        (["mkfs.ext4", "-q", "-F"], []),
        (["mkfs.xfs", "-q", "-f"], ["xfs_growfs {mount}"]),
    ],
    ids=["label", "none", "xfs"],
)
def test_what_others_have_made_is_mounted_as_it_is(
    tmp_path: Path, disk: Path, made: list[str], grown: list[str]
) -> None:
    if not shutil.which(made[0]):
        missing(made[0])
    os.truncate(disk, 400 * 2**20)
    run(*made, str(disk))
    before, volume = uuid(disk), volume_of(tmp_path, disk)
    volume.do()
    assert uuid(disk) == before
    wanted = [each.format(mount=volume.mount) for each in grown]
    assert calls(tmp_path) == [f"mount -o noatime,nosuid,nodev {disk} {volume.mount}", *wanted]


# As sfdisk and cryptsetup write them; wipefs knows them by that.
PARTITION = bytes(446) + b"\x00\x20\x21\x00\x83\xfe\xff\xff\x00\x08\x00\x00\x00\x40\x00\x00" + bytes(48) + b"\x55\xaa"
LUKS = b"LUKS\xba\xbe\x00\x01" + bytes(160) + b"01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(("begin", "holds"), [(PARTITION, "dos"), (LUKS, "crypto_LUKS"), (None, "swap")])
def test_what_is_no_file_system_is_never_overwritten(
    tmp_path: Path, disk: Path, begin: bytes | None, holds: str
) -> None:
    if begin is None:
        run("mkswap", "-q", str(disk))
    else:
        with disk.open("r+b") as stream:
            stream.write(begin)
    content = disk.read_bytes()
    with pytest.raises(Failed, match=rf"the volume datasets \({disk}\) holds .*{holds}.*: nothing is changed"):
        volume_of(tmp_path, disk).do()
    assert disk.read_bytes() == content and calls(tmp_path) == []


@pytest.mark.parametrize("cut", ["mkfs.ext4", "e2label", "mount"])
def test_a_power_cut_at_any_moment_is_mended(tmp_path: Path, disk: Path, cut: str) -> None:
    volume, real = volume_of(tmp_path, disk), shutil.which(cut)
    program(tmp_path / "bin", cut, "exit 1" if cut == "mount" else f'{real} "$@"; exit 1')
    with pytest.raises(Failed, match=cut):
        volume.do()
    left = "skyinfra-new ext4" if cut == "mkfs.ext4" else "skyinfra-volume ext4"
    assert signatures(str(disk)) == [left]
    before = uuid(disk)
    program(tmp_path / "bin", cut, "true" if cut == "mount" else f'exec {real} "$@"')
    volume.do()
    assert signatures(str(disk)) == ["skyinfra-volume ext4"]
    # One that was finished may be in use since.
    assert (uuid(disk) == before) is (cut != "mkfs.ext4")


def test_a_disk_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path, disk: Path) -> None:
    program(tmp_path / "bin", "wipefs", "exit 1")
    with pytest.raises(Failed, match="cannot be read"):
        volume_of(tmp_path, disk).do()
    assert disk.read_bytes() == bytes(SIZE)


def test_files_below_the_path_are_not_hidden(tmp_path: Path, disk: Path) -> None:
    volume = volume_of(tmp_path, disk)
    Path(volume.mount).mkdir()
    Path(volume.mount, "mine").write_text("x")
    with pytest.raises(Failed, match=f"{volume.mount} has files, which the volume datasets would hide"):
        volume.do()
    assert signatures(str(disk)) == [] and calls(tmp_path) == []


def test_a_volume_that_comes_late_is_waited_for_and_one_that_never_comes_is_named(tmp_path: Path, disk: Path) -> None:
    volume = volume_of(tmp_path, disk)
    (place,) = (tmp_path / "by-id").iterdir()
    place.rename(tmp_path / "not-yet")
    boot = FirstBoot(tmp_path / "boot")
    boot.write(step("mount", name="volume datasets") | {"arguments": vars(volume)})
    assert boot.run().returncode == 1
    said = boot.lines()[-1]["error"]
    assert said.startswith(f"the volume datasets {SECOND} is not attached: there is no {place} or ")
    # The machines of Xen have no ids.
    (tmp_path / "by-id" / "xvdh").symlink_to(disk)
    assert boot.run().returncode == 0
    assert signatures(str(disk)) == ["skyinfra-volume ext4"]


def test_file_systems_of_the_place(tmp_path: Path, disk: Path) -> None:
    volume = Mount("datasets", str(tmp_path / "data"), ME, "virtiofs", ["skyinfra-0"], "", 0)
    volume.do()
    assert calls(tmp_path) == [f"mount -t virtiofs -o noatime,nosuid,nodev skyinfra-0 {volume.mount}"]
    with pytest.raises(Failed, match=f"the volume datasets is not at {volume.mount}, where this place mounts it"):
        replace(volume, mounted="by the place").do()


# With the kernel's own file systems ----------------------------------------------------------------------------------


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A file, and the disk that it is."""
    with small_disks.loop(tmp_path / "disk", SIZE, tmp_path / "data") as device:
        yield tmp_path / "disk", device


def test_the_next_fleet_finds_the_files_owns_them_and_has_the_room(tmp_path: Path, loop: tuple[Path, str]) -> None:
    file, device = loop
    volume = volume_of(tmp_path, device)
    try:
        volume.do()
    except Failed as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    assert volume.done()
    (Path(volume.mount) / "model.pt").write_text("weights")
    size = shutil.disk_usage(volume.mount).total
    run("umount", volume.mount)
    assert not volume.done()

    # Another machine, where the user has another number, and the volume has grown.
    os.truncate(file, 2 * SIZE)
    run("losetup", "--set-capacity", device)
    volume = replace(volume, user=NOBODY)
    volume.do()
    assert volume.done()
    owner = pwd.getpwnam(NOBODY).pw_uid
    model = Path(volume.mount, "model.pt")
    assert model.read_text() == "weights" and {model.stat().st_uid, Path(volume.mount).stat().st_uid} == {owner}
    assert shutil.disk_usage(volume.mount).total > 1.5 * size
    assert "nosuid,nodev" in run("findmnt", "-no", "OPTIONS", volume.mount)


def test_files_of_others_keep_their_owners(tmp_path: Path, loop: tuple[Path, str]) -> None:
    _, device = loop
    run("mkfs.ext4", "-q", "-F", "-L", "mine", device)
    volume = replace(volume_of(tmp_path, device), user=NOBODY)
    try:
        volume.do()
    except Failed as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    assert volume.done() and Path(volume.mount, "lost+found").stat().st_uid == 0
