"""One virtual machine under emulation: a kernel of its own, which enforces what it does not for containers here."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from namespaces.network import METADATA, Link

from booted_nodes.image import Unavailable
from booted_nodes.metadata import Metadata

# Program and Debian package, besides those of the bed.
PROGRAMS = {"mke2fs": "e2fsprogs", "qemu-system-x86_64": "qemu-system-x86"}
# By which cloud-init knows a machine of AWS's.
_UUID = "ec2b0a7d-0000-4000-8000-000000000000"
_MAC = "02:00:00:00:00:01"
_DISK = "4G"
_MEMORY_MIB = 1536
_VOLUME_BYTES = 64 * 2**20
# The disk that is attached besides, and the name that its machine knows it by.
VOLUME = "vol-0123456789abcdef0"
_SERIAL = VOLUME.replace("-", "")
_UDEV = f'ENV{{ID_SERIAL}}=="{_SERIAL}", SYMLINK+="disk/by-id/nvme-Amazon_Elastic_Block_Store_{_SERIAL}"\n'
_NETWORK = """\
[Match]
MACAddress={mac}
[Network]
Address={address}/24
Gateway={gateway}
[Route]
Destination={metadata}/32
Scope=link
"""


class VirtualMachine:
    """*layers*: folders of its image, the upper ones first. *folder*: where its disk is made."""

    def __init__(self, name: str, *, folder: Path, layers: Sequence[Path], link: Link, gateway: str) -> None:
        if platform.machine() != "x86_64":
            raise Unavailable("the virtual machine is one of x86_64")
        self.name = name
        self.volume: Path | None = None
        self.link = link
        self.address = link.address
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._kernel, self._initrd = self._make_disk(layers, gateway)
        link.hand_on("tap0")
        self.metadata = Metadata(link.listen(METADATA, 80), f"i-{link.namespace.encode().hex():0>17.17}", link.address)

    def start(self) -> None:
        """Switches it on."""
        disk = f"file={self._folder / 'disk'},if=virtio,format=raw,cache=unsafe"
        command = ["ip", "netns", "exec", self.link.namespace, "qemu-system-x86_64", "-nodefaults", "-display", "none"]
        command += ["-machine", "q35", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max", "-smp", "2"]
        command += ["-m", str(_MEMORY_MIB), "-kernel", str(self._kernel), "-initrd", str(self._initrd)]
        command += ["-append", "root=/dev/vda rw console=ttyS0 panic=-1", "-drive", disk, "-serial", "stdio"]
        if self.volume is not None:
            file = self.volume / "disk"
            file.touch()
            os.truncate(file, _VOLUME_BYTES)
            command += ["-drive", f"file={file},if=none,id=volume,format=raw", "-device"]
            # Behind the disk with the system, which is the first one that the kernel finds.
            command += [f"virtio-blk-pci,drive=volume,serial={_SERIAL},addr=0x10"]
        command += ["-netdev", "tap,id=net,ifname=tap0,script=no,downscript=no"]
        command += ["-device", f"virtio-net-pci,netdev=net,mac={_MAC}", "-device", "virtio-rng-pci", "-no-reboot"]
        command += ["-smbios", f"type=1,manufacturer=Amazon EC2,product=p5.4xlarge,uuid={_UUID},serial={_UUID}"]
        with (self._folder / "console").open("wb") as console:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)

    def close(self) -> None:
        """Removes all of it, in whatever state it is."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.metadata.close()

    @property
    def running(self) -> bool:
        """Whether it is on."""
        return self._process is not None and self._process.poll() is None

    def status(self) -> dict[str, Any]:
        """Nobody reads its disk while it is on."""
        return {}

    def report(self) -> str:
        """What it has printed on its console last."""
        return (self._folder / "console").read_text(errors="replace")[-6000:]

    def _make_disk(self, layers: Sequence[Path], gateway: str) -> tuple[Path, Path]:
        """The disk, with a network that needs nobody; its kernel and what that starts with are beside it."""
        for name in ("root", "upper", "work"):
            (self._folder / name).mkdir(parents=True)
        upper, root = self._folder / "upper", self._folder / "root"
        network = upper / "etc/systemd/network/10-machine.network"
        network.parent.mkdir(parents=True)
        network.write_text(_NETWORK.format(mac=_MAC, address=self.address, gateway=gateway, metadata=METADATA))
        rules = upper / "etc/udev/rules.d/90-volume.rules"
        rules.parent.mkdir(parents=True)
        rules.write_text(_UDEV)
        lower = ":".join(map(str, layers))
        options = f"lowerdir={lower},upperdir={upper},workdir={self._folder / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True)
        try:
            made = ["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(root), str(self._folder / "disk"), _DISK]
            subprocess.run(made, check=True, capture_output=True)
        finally:
            subprocess.run(["umount", "--lazy", str(root)], check=False)
        boot = next(layer / "boot" for layer in layers if (layer / "boot").is_dir() and any((layer / "boot").iterdir()))
        with contextlib.suppress(StopIteration):
            return next(boot.glob("vmlinuz-*")), next(boot.glob("initrd.img-*"))
        raise Unavailable(f"{boot} has no kernel")
