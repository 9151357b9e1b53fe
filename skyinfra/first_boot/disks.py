"""The operations on disks; see `operations`."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path

from .programs import Failed, command, on_volumes, output, signatures

_OPTIONS = "noatime,nosuid,nodev"


@dataclass(frozen=True)
class Scratch:
    """The volumes of the instance store as one file system at *mount*. A machine that was stopped has empty ones."""

    devices: str
    mount: str
    label: str
    user: str

    def _volumes(self) -> list[str]:
        return sorted({os.path.realpath(path) for path in glob.glob(self.devices) if "-part" not in path})  # noqa: PTH207

    def done(self) -> bool:
        return not self._volumes() or os.path.ismount(self.mount)

    def do(self) -> None:
        volumes = self._volumes()
        Path(self.mount).mkdir(parents=True, exist_ok=True)
        mounted = [path for path in on_volumes("MOUNTPOINT", volumes) if path.startswith("/")]
        if mounted:
            # AWS's Deep Learning images have joined and mounted them already.
            folder = Path(mounted[0], "skyinfra")
            folder.mkdir(exist_ok=True)
            if folder.is_symlink():
                # Tasks own what is there: the link would give them the folder that it leads to.
                raise Failed(f"{folder} is a link: remove it")
            command("mount", "--bind", str(folder), self.mount)
        else:
            command("mount", "-o", _OPTIONS, self._found(volumes) or self._made(volumes), self.mount)
        shutil.chown(self.mount, self.user)

    def _found(self, volumes: list[str]) -> str:
        """Returns the volume that an earlier boot has made."""
        if len(volumes) > 1:
            output("vgchange", "-ay", self.label)
            output("mdadm", "--assemble", "--scan")
        return output("blkid", "-L", self.label)

    def _made(self, volumes: list[str]) -> str:
        # What a boot that was cut off has joined may have no file system yet.
        joined = output("readlink", "-e", f"/dev/{self.label}/scratch", f"/dev/md/{self.label}")
        held = on_volumes("FSTYPE", volumes)
        if signatures(joined) if joined else held:
            raise Failed(f"{', '.join(volumes)} hold {', '.join(held)} that is not mounted: nothing is overwritten")
        device = joined or (volumes[0] if len(volumes) == 1 else self._joined(volumes))
        command("mkfs.ext4", "-q", "-F", "-E", "nodiscard", "-m", "0", "-L", self.label, device)
        return device

    def _joined(self, volumes: list[str]) -> str:
        count = str(len(volumes))
        if shutil.which("vgcreate"):
            command("vgcreate", "-q", self.label, *volumes)
            stripes = ("-i", count, "-I", "256k", "-l", "100%FREE")
            command("lvcreate", "-q", "-y", "-n", "scratch", *stripes, self.label)
            return f"/dev/{self.label}/scratch"
        if shutil.which("mdadm"):
            device = f"/dev/md/{self.label}"
            command("mdadm", "--create", device, "--run", "--level=0", "--raid-devices", count, *volumes)
            return device
        raise Failed(f"{count} volumes, no lvm2 or mdadm")


@dataclass(frozen=True)
class Volume:
    """A volume that outlives this node: *volume*, by its id, at *mount*. *parts*: folders of it, linked in *folder*.

    *devices*: where a machine may have it; {} stands for the id as udev writes it. It gets a file system when it has
    none, and never another one.
    """

    volume: str
    devices: list[str]
    mount: str
    folder: str
    parts: list[str]
    user: str

    def done(self) -> bool:
        linked = [os.path.realpath(Path(self.folder, part)) == str(Path(self.mount, part)) for part in self.parts]
        return os.path.ismount(self.mount) and all(linked)

    def do(self) -> None:
        if not os.path.ismount(self.mount):
            self._mount(self._device())
        owner = pwd.getpwnam(self.user).pw_uid
        for part in self.parts:
            # Its top is root's: no task can have put a link there.
            kept, link = Path(self.mount, part), Path(self.folder, part)
            kept.mkdir(mode=0o700, exist_ok=True)
            if kept.stat().st_uid != owner:
                # Another image may have given the user another number. The folder itself comes last.
                command("chown", "-Rh", self.user, str(kept))
            if not link.is_symlink():
                link.symlink_to(kept)

    def _device(self) -> str:
        places = [place.format(self.volume.replace("-", "")) for place in self.devices]
        for place in places:
            if Path(place).exists():
                return os.path.realpath(place)
        raise Failed(
            f"the volume {self.volume} with the jobs of the head is not attached: there is no {places[0]}. "
            "Apply again, which attaches it."
        )

    def _mount(self, device: str) -> None:
        found = signed(device, "skyinfra-head")
        if found != ["skyinfra-head ext4"]:
            raise Failed(f"{device} ({self.volume}) holds {', '.join(found)}, not made here: nothing is overwritten")
        # What a power cut has left; where it cannot be mended, the mount says so. The volume may have grown as well.
        output("e2fsck", "-f", "-p", device)
        output("resize2fs", device)
        Path(self.mount).mkdir(parents=True, exist_ok=True)
        command("mount", "-o", _OPTIONS, device, self.mount)


def signed(device: str, label: str) -> list[str]:
    """Returns label and kind of what *device* holds; an empty one gets an ext4 of that *label*.

    A power cut may leave half a file system: a whole one gets its label last, and is not used before.
    """
    found = signatures(device)
    if found in ([], ["skyinfra-new ext4"]):
        command("mkfs.ext4", "-q", "-F", "-m", "0", "-L", "skyinfra-new", device)
        os.sync()
        command("e2label", device, label)
        os.sync()
        found = [f"{label} ext4"]
    return found
