"""Machines that stand already: booted, with an SSH server, and with nothing of skyinfra's on them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from terraform_projects.commands import until

from booted_nodes import image as bed_image
from booted_nodes.fleet import Bed
from booted_nodes.machine import DRIVER_FOLDER, Machine

# What of a machine a fleet changes, as text: nothing of it may stay.
_TRACES = """
ls -d /etc/skyinfra* /opt/* /var/*/skyinfra* /run/skyinfra* /root/* /home/*/* 2>/dev/null
ls -R /etc/systemd/system /usr/local | grep -v '^total'
cut -d: -f1 /etc/passwd /etc/group | sort
systemctl list-units --all --plain --no-legend 'skyinfra*' | cut -d' ' -f1,2
ps -eo user,comm | grep -c skyinfra
true
"""
_PROGRAM = """
import json
import skyinfra as sky
from cdktf import App
app = App()
def host(via=None, **fields):
    return sky.Host(**fields, via=via and host(**via))
hosts = [host(**each) for each in json.loads('''{hosts}''')]
sky.FleetStack(app, "lab", pools=[sky.ComputePool(
    name="lab", nodes=len(hosts), provider=sky.SSH(hosts=hosts, wait_seconds=300), {accelerator}
    image=sky.Image(wheelhouse="{index}", {image}))])
app.synth()
"""


class Hosts:
    """Machines by name, with one key that logs in to all of them."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self._bed = bed
        self._folder = folder
        self._image = bed_image.login_rootfs()
        self.index = bed.index
        self.key = folder / "key"
        _make_key(self.key)
        self.machines: list[Machine] = []

    def start(self, name: str, gpus: str = "h100_80gb", devices: Sequence[str] = ()) -> Machine:
        """Another machine, switched on; it answers at its SSH port. *devices*: see `Machine`."""
        variables = {"FAKE_NVML_GPUS": gpus}
        machine = self._bed.machine(name, variables, image=self._image)
        machine.devices = devices
        self.machines.append(machine)
        ssh = machine.root / "etc/ssh"
        for old in ssh.glob("ssh_host_*"):
            old.unlink()
        # Two kinds: a client may take either.
        for kind in ("ed25519", "ecdsa"):
            _make_key(ssh / f"ssh_host_{kind}_key", kind)
        seen = {**variables, "FAKE_NVML_SEED": name, "FAKE_NVML_STATE": f"{DRIVER_FOLDER}/state"}
        words = " ".join(json.dumps(f"{key}={value}") for key, value in seen.items())
        (ssh / "sshd_config.d/driver.conf").write_text(f"SetEnv {words}\n")
        for home in ("root", *(f"home/{user}" for user in bed_image.USERS)):
            keys = machine.root / home / ".ssh"
            keys.mkdir(mode=0o700, exist_ok=True)
            owner = (machine.root / home).stat()
            (keys / "authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
            subprocess.run(["chown", "-R", f"{owner.st_uid}:{owner.st_gid}", str(keys)], check=True)
        machine.start()
        until(lambda: answers(machine.address), seconds=60)
        return machine

    def key_of(self, machine: Machine) -> str:
        """Its public host key."""
        return (machine.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().strip()

    def give_key(self, machine: Machine, other: Machine) -> None:
        """*machine* has the host key of the other one from now on, as one that was made with it."""
        for name in ("ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"):
            shutil.copy2(other.root / "etc/ssh" / name, machine.root / "etc/ssh" / name)
        machine.execute("systemctl", "restart", "ssh")
        until(lambda: answers(machine.address), seconds=60)

    def host(self, machine: Machine, user: str = "root", **fields: object) -> dict[str, object]:
        """The fields of its `sky.Host`."""
        return {
            "address": machine.address,
            "user": user,
            "host_key": self.key_of(machine),
            "key_file": str(self.key),
            **fields,
        }

    def project(self, *hosts: dict[str, object], accelerator: str = "", image: str = "") -> Path:
        """A project that declares a pool on *hosts*."""
        here = self._folder / "project"
        here.mkdir(exist_ok=True)
        (here / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
        declared = f'accelerator="{accelerator}",' if accelerator else ""
        text = _PROGRAM.format(hosts=json.dumps(hosts), accelerator=declared, image=image, index=self.index)
        (here / "main.py").write_text(text)
        return here

    def close(self) -> None:
        for machine in self.machines:
            machine.close()


def traces(machine: Machine) -> tuple[str, object]:
    """What a fleet changes on a machine, and how its GPUs stand."""
    gpus = [(gpu["current"], sorted((i["profile"], i["start"]) for i in gpu["instances"])) for gpu in machine.gpus()]
    return machine.execute("sh", "-c", _TRACES).stdout, gpus


def _make_key(path: Path, kind: str = "ed25519") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "bed", "-f", str(path)], check=True)


def answers(address: str) -> bool:
    """Whether an SSH server answers there."""
    try:
        with socket.create_connection((address, 22), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
