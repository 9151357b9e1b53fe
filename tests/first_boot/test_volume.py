"""The volume of the head: made once, found again by the next head, never overwritten."""

from __future__ import annotations

import os
import pwd
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from devices import small_disks
from devices.small_disks import run, uuid
from first_boots.boots import FirstBoot, program, step
from support import ROOT

from skyinfra.bootstrap import places
from skyinfra.first_boot.disks import Volume
from skyinfra.first_boot.programs import Failed, signatures
from skyinfra.protocol.nodeconfig import VOLUME_PLACEHOLDER

ID = "vol-0123456789abcdef0"
SIZE = 16 * 2**20
NOBODY = "nobody"


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_disks.use_programs(tmp_path, monkeypatch)


def volume_of(tmp_path: Path, disk: Path | str) -> Volume:
    """The volume as a machine has it, of a user that there is everywhere."""
    devices = tmp_path / "by-id"
    devices.mkdir(exist_ok=True)
    link = devices / f"nvme-{ID.replace('-', '')}"
    link.unlink(missing_ok=True)
    link.symlink_to(disk)
    places = [f"{devices}/nvme-{{}}", f"{devices}/xvdf"]
    folder = tmp_path / "var"
    folder.mkdir(exist_ok=True)
    me = pwd.getpwuid(os.getuid()).pw_name
    return Volume(ID, places, str(tmp_path / "state"), str(folder), ["jobs", "kept"], me)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A file in the place of a disk. To mount it is noted, and not done."""
    file = tmp_path / "disk"
    small_disks.blank(file, SIZE)
    program(tmp_path / "bin", "mount", f'echo mount "$@" >>{tmp_path}/calls')
    return file


def test_a_new_volume_gets_a_file_system_and_keeps_it(tmp_path: Path, disk: Path) -> None:
    volume = volume_of(tmp_path, disk)
    assert signatures(str(disk)) == [] and not volume.done()
    volume.do()
    assert signatures(str(disk)) == ["skyinfra-head ext4"]
    made = uuid(disk)
    volume.do()
    assert uuid(disk) == made
    mounted = [f"mount -o noatime,nosuid,nodev {disk} {volume.mount}"]
    assert (tmp_path / "calls").read_text().splitlines() == mounted * 2
    for part in ("jobs", "kept"):
        link = Path(volume.folder, part)
        assert link.is_symlink() and link.resolve() == Path(volume.mount, part)
        assert link.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("cut", ["mkfs.ext4", "e2label", "mount"])
def test_a_power_cut_at_any_moment_is_mended(tmp_path: Path, disk: Path, cut: str) -> None:
    """The program is the last that runs: it has done its work, and nobody has noticed."""
    volume, real = volume_of(tmp_path, disk), shutil.which(cut)
    instead = "exit 1" if cut == "mount" else f'{real} "$@"; exit 1'
    program(tmp_path / "bin", cut, instead)
    with pytest.raises(Failed, match=cut):
        volume.do()
    left = {"mkfs.ext4": ["skyinfra-new ext4"], "e2label": ["skyinfra-head ext4"], "mount": ["skyinfra-head ext4"]}
    assert signatures(str(disk)) == left[cut]
    before = uuid(disk)
    program(tmp_path / "bin", cut, "true" if cut == "mount" else f'exec {real} "$@"')
    volume.do()
    assert signatures(str(disk)) == ["skyinfra-head ext4"]
    # One that was finished may be in use since.
    assert (uuid(disk) == before) is (cut != "mkfs.ext4")


def test_half_a_file_system_is_made_anew(tmp_path: Path, disk: Path) -> None:
    run("mkfs.ext4", "-q", "-F", "-L", "skyinfra-new", str(disk))
    with disk.open("r+b") as stream:
        stream.write(bytes(4096))  # the superblock is what mkfs writes last
    volume_of(tmp_path, disk).do()
    assert signatures(str(disk)) == ["skyinfra-head ext4"]


@pytest.mark.parametrize(
    ("made", "holds"),
    [
        (["mkfs.ext4", "-q", "-F", "-L", "mine"], "mine ext4"),
        (["mkfs.ext4", "-q", "-F"], "ext4"),
        (["mkswap", "-q"], "swap"),
    ],
    ids=["label", "none", "swap"],
)
def test_what_was_not_made_here_is_never_overwritten(tmp_path: Path, disk: Path, made: list[str], holds: str) -> None:
    run(*made, str(disk))
    content = disk.read_bytes()
    with pytest.raises(Failed, match=rf"{disk} \({ID}\) holds {holds}, not made here: nothing is overwritten"):
        volume_of(tmp_path, disk).do()
    assert disk.read_bytes() == content and not (tmp_path / "calls").exists()


def test_a_disk_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path, disk: Path) -> None:
    program(tmp_path / "bin", "wipefs", "exit 1")
    with pytest.raises(Failed, match="cannot be read"):
        volume_of(tmp_path, disk).do()
    assert disk.read_bytes() == bytes(SIZE)


def test_the_example_of_the_module_keeps_the_jobs_there_as_well(tmp_path: Path, disk: Path) -> None:
    """What its user data do, in folders of the test."""
    volume = volume_of(tmp_path, disk)
    user_data = yaml.safe_load((ROOT / "modules/aws/examples/single/head.yaml").read_text())
    (script,) = [each["content"] for each in user_data["write_files"] if each["path"].endswith("/skyinfra-volume")]
    for given, here in (
        (VOLUME_PLACEHOLDER, ID),
        ("/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_", f"{tmp_path}/by-id/nvme-"),
        (places.STATE, volume.mount),
        ("/etc/skyinfra", volume.folder),
    ):
        assert given in script
        script = script.replace(given, here)
    run("sh", "-c", script)
    assert signatures(str(disk)) == ["skyinfra-head ext4"]
    made = uuid(disk)
    run("sh", "-c", script)
    assert uuid(disk) == made
    for part in volume.parts:
        assert Path(volume.folder, part).resolve() == Path(volume.mount, part)
        assert Path(volume.mount, part).stat().st_mode & 0o777 == 0o700
    # What `skyinfra render` writes finds the same jobs.
    volume.do()
    assert uuid(disk) == made


def as_step(volume: Volume, **more: float) -> dict[str, object]:
    return step("volume", name="volume of the head", **more, **vars(volume))  # type: ignore[arg-type]


def test_a_volume_that_comes_late_is_waited_for(tmp_path: Path, disk: Path) -> None:
    volume = volume_of(tmp_path, disk)
    (place,) = (tmp_path / "by-id").iterdir()
    place.rename(tmp_path / "not-yet")
    boot = FirstBoot(tmp_path / "boot")
    boot.write(as_step(volume, attempts=100, timeout_s=50))

    def come() -> None:
        while not (boot.log.exists() and '"failed"' in boot.log.read_text()):
            time.sleep(0.05)
        (tmp_path / "not-yet").rename(place)

    arrival = threading.Thread(target=come)
    arrival.start()
    assert boot.run().returncode == 0, boot.log.read_text()
    arrival.join()
    first, *between, last = [line["state"] for line in boot.lines()]
    assert (first, set(between), last) == ("started", {"failed"}, "done")
    assert signatures(str(disk)) == ["skyinfra-head ext4"]


def test_a_volume_that_never_comes_is_named(tmp_path: Path, disk: Path) -> None:
    volume = volume_of(tmp_path, disk)
    (place,) = (tmp_path / "by-id").iterdir()
    place.unlink()
    boot = FirstBoot(tmp_path / "boot")
    boot.write(as_step(volume))
    assert boot.run().returncode == 1
    said = boot.lines()[-1]["error"]
    assert said.startswith(f"the volume {ID} with the jobs of the head is not attached: there is no {place}. ")
    assert "Apply again, which attaches it" in said
    # On the older machines it has no id.
    (tmp_path / "by-id" / "xvdf").symlink_to(disk)
    assert boot.run().returncode == 0


# With the kernel's own file systems ----------------------------------------------------------------------------------


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A file, and the disk that it is."""
    with small_disks.loop(tmp_path / "disk", SIZE, tmp_path / "state") as device:
        yield tmp_path / "disk", device


def test_the_next_head_finds_the_jobs_and_owns_them(tmp_path: Path, loop: tuple[Path, str]) -> None:
    file, device = loop
    volume = volume_of(tmp_path, device)
    try:
        volume.do()
    except Failed as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    assert volume.done()
    job = Path(volume.folder, "jobs", "1")
    job.mkdir(mode=0o700)
    (job / "job.json").write_text("mine")
    (job / "link").symlink_to(file)
    size = shutil.disk_usage(volume.mount).total
    volume.do()
    run("umount", volume.mount)
    assert not volume.done() and not (Path(volume.folder) / "jobs").exists()

    # Another machine, where the user has another number, and the volume has grown.
    os.truncate(file, 2 * SIZE)
    run("losetup", "--set-capacity", device)
    shutil.rmtree(volume.folder)
    Path(volume.folder).mkdir()
    volume = replace(volume, user=NOBODY)
    volume.do()
    assert volume.done()
    assert (job / "job.json").read_text() == "mine"
    owner = pwd.getpwnam(NOBODY).pw_uid
    found = [Path(volume.mount, "jobs"), *Path(volume.mount, "jobs").rglob("*")]
    assert {path.lstat().st_uid for path in found} == {owner} and file.stat().st_uid == 0
    assert shutil.disk_usage(volume.mount).total > 1.5 * size
    assert Path(volume.mount).stat().st_uid == 0 and "nosuid,nodev" in run("findmnt", "-no", "OPTIONS", volume.mount)
