"""Fleets of booted nodes: what is declared, compiled, filled as Terraform fills it, booted and connected to."""

from __future__ import annotations

import gzip
import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from namespaces import network as bed_network
from terraform_projects.commands import until

import skyinfra as sky
from booted_nodes import image as bed_image
from booted_nodes.machine import DRIVER_FOLDER, Hardware, Machine, end_cgroup, hierarchies
from booted_nodes.virtual import PROGRAMS as VIRTUAL_PROGRAMS
from booted_nodes.virtual import VOLUME, VirtualMachine
from skyinfra.bootstrap import runner_wheel, user_data
from skyinfra.client import Pool
from skyinfra.compiler import compile_pool
from skyinfra.protocol.nodeconfig import (
    BUCKET_PLACEHOLDER,
    HEAD_PLACEHOLDER,
    NODE_PLACEHOLDER,
    VOLUME_PLACEHOLDER,
)

PREFIX = "skb"
PORT = 8786
STACK = "bed"
LAYOUT = {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}
# Five nodes on two busy cores take their time.
BOOT_S = 300.0


class Bed:
    """What the booted nodes of one test session share: image, packages, network. `close` leaves nothing behind.

    Raises `bed_image.Unavailable` where nodes cannot be booted here.
    """

    def __init__(self, driver: Path) -> None:
        bed_image.install_programs()
        self._left = ExitStack()
        self.driver = driver
        try:
            sweep()
            runner = runner_wheel.wheel()
            with ThreadPoolExecutor() as pool:
                wheelhouse = pool.submit(bed_image.wheelhouse, runner)
                rootfs = bed_image.rootfs()
            self.folder = self._scratch()
            try:
                self.network = bed_network.Network(f"{PREFIX}{os.getpid()}")
            except OSError as error:
                raise bed_image.Unavailable(f"this machine allows no bridge: {error}") from None
            self._left.callback(self.network.close)
            self.packages = self.folder / "packages"
            self.packages.mkdir()
            (self.packages / runner.name).write_bytes(runner.content)
            for wheel in wheelhouse.result().glob("*.whl"):
                (self.packages / wheel.name).symlink_to(wheel)
            self.index = self._serve()
            self._layers = [rootfs]
        except BaseException:
            self._left.close()
            raise

    def declare(
        self,
        nodes: int = 1,
        accelerator: sky.Accelerator | None = None,
        *,
        provider: sky.AWS | sky.GCP | None = None,
        **image: Any,
    ) -> sky.ComputePool:
        """Nodes of AWS, each with one H100 in a mixed layout, unless it is said otherwise. *image*: `sky.Image`."""
        return sky.ComputePool(
            name="mig",
            nodes=nodes,
            provider=provider or sky.AWS(region="us-east-1"),
            accelerator=accelerator or sky.accelerators.H100(count=1, mig=LAYOUT),
            image=sky.Image(wheelhouse=self.index, **image),
        )

    def fleet(self, pool: sky.ComputePool, gpus: str = "h100_80gb", **hardware: bool) -> Fleet:
        """The fleet that *pool* declares, not booted. *gpus*: models of the fake driver; *hardware*: see `Hardware`."""
        return Fleet(self, pool, {"FAKE_NVML_GPUS": gpus}, hardware)

    def machine(
        self,
        name: str,
        variables: dict[str, str],
        *,
        link: bed_network.Link | None = None,
        image: Path | None = None,
        **hardware: bool,
    ) -> Machine:
        """A machine of that *image*, off and without user data. *link*: that of the one before it."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        variables = {**variables, "FAKE_NVML_SEED": name}
        layer = folder / "image"
        bed_image.driver_layer(layer, self.driver, {**variables, "FAKE_NVML_STATE": f"{DRIVER_FOLDER}/state"})
        return Machine(
            name,
            folder=folder / "machine",
            layers=[layer, *([image] if image else self._layers)],
            link=link or self.network.link(),
            hardware=Hardware(self.driver / "fake-nvml-ctl", variables, **hardware),
        )

    def virtual_machine(self, name: str) -> VirtualMachine:
        """A virtual machine without GPUs, off and without user data. Raises `bed_image.Unavailable`."""
        bed_image.install_programs(VIRTUAL_PROGRAMS)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        layers = [bed_image.virtual_rootfs()]
        link = self.network.link()
        return VirtualMachine(name, folder=folder, layers=layers, link=link, gateway=self.network.address)

    def close(self) -> None:
        self._left.close()

    def _scratch(self) -> Path:
        """A folder in memory: the disks of nodes can stand there whatever this machine's own disk is."""
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._left.callback(shutil.rmtree, folder, ignore_errors=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,size=4g", "skyinfra-bed", str(folder)], check=True)
        self._left.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=False)
        return folder

    def _serve(self) -> str:
        """Serves the packages; the URL."""
        handler = partial(_Files, directory=str(self.packages))
        server = ThreadingHTTPServer((self.network.address, 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        self._left.callback(thread.join)
        self._left.callback(server.server_close)
        self._left.callback(server.shutdown)
        return f"http://{self.network.address}:{server.server_address[1]}/"


class Fleet:
    """The nodes of one pool: ``nodes[0]`` is the head, which may be a machine besides them. `close` ends them."""

    def __init__(self, bed: Bed, pool: sky.ComputePool, variables: dict[str, str], hardware: dict[str, bool]) -> None:
        deployment = compile_pool(pool, STACK)
        self.slots = deployment.slots
        self.secret = secrets.token_hex(36)
        self.bucket = Bucket(bed, self.secret)
        self._manifest = bed.folder / f"{secrets.token_hex(4)}.json"
        self._pool = pool
        self._another_head = partial(bed.machine, variables=variables, **hardware)
        texts = user_data(deployment)
        self.bucket.put_versions({**(texts.versions or {}), "wheel": self.bucket.wheel})
        # The hosts of a slice have its name until they find their own.
        selected = deployment.selection
        names = [f"{pool.name}-{index}" for index in range(pool.nodes) for _ in range(selected.hosts)]
        self._apart = selected.separate_head
        names[:0] = [f"{pool.name}-head"] if self._apart else []
        self.nodes: list[Any] = []
        try:
            for name in names:
                virtual = hardware.get("virtual")
                self.nodes.append(bed.virtual_machine(name) if virtual else bed.machine(name, variables, **hardware))
            scheduler = f"{self.head.address}:{PORT}"
            for machine in self.nodes:
                text = texts.head if machine is self.head else texts.worker
                machine.metadata.user_data = filled(
                    text,
                    {
                        HEAD_PLACEHOLDER: scheduler,
                        NODE_PLACEHOLDER: machine.name,
                        BUCKET_PLACEHOLDER: self.bucket.url,
                        VOLUME_PLACEHOLDER: VOLUME,
                    },
                )
            self.head.volume = Path(tempfile.mkdtemp(prefix="volume-", dir=bed.folder))
            self.head.volume.chmod(0o755)
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> Any:
        return self.nodes[0]

    def boot(self, *, ready: bool = True) -> Fleet:
        """Switches every node on, and waits until each serves its slots."""
        for machine in self.nodes:
            machine.start()
        if ready:
            for machine in self.nodes:
                self.wait(machine)
        return self

    def replace_head(self) -> None:
        """Another machine in the place of the head, off: with its address, user data and volume, and nothing else."""
        old = self.head
        old.close()
        self.nodes[0] = new = self._another_head(old.name, link=old.link)
        new.metadata.user_data, new.volume = old.metadata.user_data, old.volume

    def wait(self, machine: Machine, state: str = "ready", *, seconds: float = BOOT_S) -> dict[str, Any]:
        """The status of the node once it is *state*; fails with what the node logged where it is not in time."""
        try:
            return until(lambda: (s := machine.status()) and s.get("state") == state and s, seconds=seconds) or {}
        except AssertionError:
            raise AssertionError(f"{machine.name} is not {state} within {seconds} s\n{machine.report()}") from None

    def connect(self) -> Pool:
        """A client as a person has it who has the manifest in a file."""
        self._manifest.write_text(json.dumps(self.manifest()))
        return sky.connect(self._manifest)

    def manifest(self) -> dict[str, Any]:
        """What the output ``fleet`` of modules/aws says."""
        return {
            "version": 1,
            "stack": STACK,
            "pool": self._pool.name,
            "provider": "aws",
            "simulated": False,
            "head": {"address": self.head.address, "port": PORT},
            "nodes": [self._node(machine) for machine in (self.nodes[:1] if self._apart else self.nodes)],
            "group_nodes": len(self.nodes) - 1 if self._apart else 0,
            "slots": [{k: v for k, v in vars(slot).items() if v is not None} for slot in self.slots],
            "secret": self.secret,
        }

    def close(self) -> None:
        for machine in self.nodes:
            machine.close()

    def _node(self, machine: Machine) -> dict[str, Any]:
        return {
            "name": machine.name,
            "id": machine.metadata.tree["instance-id"],
            "address": machine.address,
            "zone": "us-east-1a",
            "machine_type": machine.metadata.tree["instance-type"],
            "head": machine is self.head,
        }


class Bucket:
    """What stands in the bucket of a fleet, in a folder of the bed's web server. ``wheel``: name and SHA-256."""

    def __init__(self, bed: Bed, secret: str) -> None:
        runner = runner_wheel.wheel()
        self.folder = bed.packages / secrets.token_hex(8)
        self.url = f"{bed.index}{self.folder.name}"
        self.wheel = {"name": runner.name, "sha256": runner.sha256}
        self.folder.mkdir()
        (self.folder / "secret").write_text(secret)
        (self.folder / runner.name).write_bytes(runner.content)

    def put_versions(self, versions: dict[str, Any]) -> None:
        (self.folder / "versions.json").write_text(json.dumps(versions))


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is logged."""


def filled(text: str, values: dict[str, str]) -> bytes:
    """User data as the instance gets them: as `replace` and `base64gzip` of modules/aws/main.tf make them."""
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    assert not re.findall(r"@SKYINFRA_\w+@", text)
    return gzip.compress(text.encode())


def sweep() -> None:
    """Ends the machines of beds whose process was killed, and removes what they have left."""

    def alive(name: str) -> bool:
        match = re.match(rf"{PREFIX}(\d+)", name)
        return match is not None and Path(f"/proc/{match.group(1)}").exists()

    for cgroup in [each for top in hierarchies() for each in top.glob(f"{PREFIX}[0-9]*")]:
        if not alive(cgroup.name):
            end_cgroup(cgroup)
    points = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for point in reversed(points):
        folder = next((part for part in Path(point).parts if re.match(rf"{PREFIX}\d+-", part)), None)
        if folder is not None and not alive(folder):
            subprocess.run(["umount", "--lazy", point], check=False)
    for folder in _left_folders():
        if not alive(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    bed_network.sweep(PREFIX, alive)


def _left_folders() -> Sequence[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*-*"))
