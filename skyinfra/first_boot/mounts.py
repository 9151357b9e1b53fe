"""The operation on volumes that outlive the fleet; see `operations`. Only nodes of pools with some have it."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from .disks import _OPTIONS, signed
from .programs import Failed, command, output

# Of a file system that was made here.
_LABEL = "skyinfra-volume"
# Those of others that are mounted as they are.
_KNOWN = ("ext4", "xfs")


@dataclass(frozen=True)
class Mount:
    """The volume *name* at *mount*, where *user* may write.

    mounted: "disk": a disk, which gets a file system when it is empty, and is never overwritten; "virtiofs": a file
    system by its tag, the first of *devices*; "by the place": it is there. devices: where a machine may have a disk; {}
    stands for its id as udev writes it, which is number *index* of *ids*.
    """

    name: str
    mount: str
    user: str
    mounted: str
    devices: list[str]
    ids: str
    index: int

    def done(self) -> bool:
        return os.path.ismount(self.mount) and Path(self.mount).stat().st_uid == pwd.getpwnam(self.user).pw_uid

    def do(self) -> None:
        made = False
        if not os.path.ismount(self.mount):
            made = self._mount()
        if Path(self.mount).stat().st_uid != pwd.getpwnam(self.user).pw_uid:
            # Another image may have given the user another number. Files of others stay theirs.
            command("chown", *(["-Rh"] if made else []), self.user, self.mount)

    def _mount(self) -> bool:
        """Returns whether the file system is one that was made here."""
        folder = Path(self.mount)
        if self.mounted == "by the place":
            raise Failed(f"the volume {self.name} is not at {self.mount}, where this place mounts it: deploy again")
        if folder.is_symlink() or (folder.is_dir() and any(folder.iterdir())):
            raise Failed(f"{self.mount} has files, which the volume {self.name} would hide: mount it elsewhere")
        folder.mkdir(parents=True, exist_ok=True)
        if self.mounted == "virtiofs":
            command("mount", "-t", "virtiofs", "-o", _OPTIONS, self.devices[0], self.mount)
            return False
        device = self._device()
        kind = self._file_system(device)
        if kind.endswith("ext4"):
            # What a power cut has left; where it cannot be mended, the mount says so.
            output("e2fsck", "-p", device)
            if _grown(device):
                output("e2fsck", "-f", "-p", device)
                command("resize2fs", device)
        command("mount", "-o", _OPTIONS, device, self.mount)
        if kind.endswith("xfs"):
            command("xfs_growfs", self.mount)
        return kind == f"{_LABEL} ext4"

    def _device(self) -> str:
        id = self.ids.split()[self.index] if self.ids else ""
        places = [place.format(id.replace("-", "")) for place in self.devices]
        for place in places:
            if Path(place).exists():
                return os.path.realpath(place)
        raise Failed(f"the volume {self.name} {id} is not attached: there is no {' or '.join(places)}. Deploy again")

    def _file_system(self, device: str) -> str:
        """Returns the label and kind of the file system on *device*, which it makes on an empty one."""
        found = signed(device, _LABEL)
        if len(found) > 1 or found[0].split()[-1] not in _KNOWN:
            held = ", ".join(found)
            raise Failed(f"the volume {self.name} ({device}) holds {held}, and not one ext4 or xfs: nothing is changed")
        return found[0]


def _grown(device: str) -> bool:
    """Returns whether the ext4 on *device* leaves room: a check of all of it before that may take minutes."""
    said = dict(line.split(":", 1) for line in output("dumpe2fs", "-h", device).splitlines() if ":" in line)
    with open(device, "rb") as file:  # noqa: PTH123
        end = file.seek(0, os.SEEK_END)
    return end > 1.01 * int(said.get("Block count", 0)) * int(said.get("Block size", 0)) > 0


OPERATIONS = {"mount": Mount}
