"""The nodes of marketplaces, for real but for the marketplace: containers of Podman behind ports that are mapped.

Terraform applies against the mock of the provider; what its API is asked for is started with what was declared there.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import marketplaces
import pytest
from engine_bed import NODE, WHEELS, Engine
from fleet import skyinfra
from marketplaces import Marketplace
from mock_provider.bed import served
from mock_provider.world import World

import skyinfra as sky
from skyinfra.bootstrap import runner_wheel
from skyinfra.client import open_pool
from skyinfra.protocol.manifest import Manifest
from skyinfra.terraform.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("containers")]

PROGRAM = """
import skyinfra as sky
from cdktf import App
app = App()
sky.FleetStack(app, "market", pools=[sky.ComputePool(
    name="p", nodes=2, provider=sky.RunPod(image="{image}", wait_seconds=60), worker=sky.Worker(concurrency=2),
    image=sky.Image(wheelhouse="{wheels}", pip=["six"], runner="{runner}"))])
app.synth()
"""


class Rented:
    """What is rented in a world, as containers in a network whose host maps their ports."""

    def __init__(self, engine: Engine, world: World, kind: str) -> None:
        self.engine, self.world, self.kind = engine, world, kind
        engine.run("network", "create", "market")
        found = json.loads(engine.run("network", "inspect", "market"))
        self.host, self.subnet = (str(found[0]["subnets"][0][each]) for each in ("gateway", "subnet"))
        self.started: dict[str, str] = {}
        self.over = Event()

    def run(self) -> None:
        """Starts what is rented, until `over`."""
        while not self.over.wait(0.2):
            for file, asked in zip(self.world.standing(self.kind), self.world.asked(self.kind), strict=False):
                if file not in self.started:
                    self._start(asked)
                    self.started[file] = asked["name"]

    def _start(self, pod: dict[str, Any]) -> None:
        """As RunPod does with an image that has no entry of its own: its arguments, and a public port for each."""
        environment = [word for name, value in pod["env"].items() for word in ("--env", f"{name}={value}")]
        ports = [word for each in pod["ports"] or [] for word in ("--publish", each.partition("/")[0])]
        given = ["--env", f"RUNPOD_API_KEY={marketplaces.KEY}", "--network", "market", "--name", pod["name"]]
        given += ["--entrypoint", ""]
        self.engine.run("run", "-d", *given, *environment, *ports, pod["image"], *shlex.split(pod["args"]))
        self._close(pod["name"])

    def pod(self, server: Marketplace, path: str) -> Any:
        """What RunPod's API says of a pod."""
        for file, pod in self.world.standing(self.kind).items():
            if path == f"/v2/pods/{pod['id']}" and file in self.started:
                mapped = {"private": 8786, "public": self.port(pod["name"]), "type": "tcp", "ip": self.host}
                return {"id": pod["id"], "status": "RUNNING", "runtime": {"ports": [mapped]}}
        return {"status": "STARTING", "runtime": None}

    def port(self, name: str) -> int:
        return int(self.engine.run("port", name, "8786").rpartition(":")[2])

    def _close(self, name: str) -> None:
        """From this container no connection to another one can be opened: to the host alone, which maps ports."""
        pid = self.engine.run("container", "inspect", "--format", "{{.State.Pid}}", name)
        for rule in (
            f"-d {self.host} -j ACCEPT",
            f"-o eth0 -d {self.subnet} -p tcp --syn -j REJECT --reject-with tcp-reset",
        ):
            subprocess.run(["nsenter", "-t", pid, "-n", "iptables", "-A", "OUTPUT", *rule.split()], check=True)


@contextmanager
def files(folder: Path) -> Iterator[int]:
    """Serves *folder* to everybody; the port."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def noise(size: int) -> bytes:
    return bytes(size)


def seen() -> dict[str, str | None]:
    import os

    return {name: os.environ.get(name) for name in ("SKYINFRA_START", "RUNPOD_API_KEY", "HOME")}


def test_pods_of_runpod(tmp_path: Path, clean: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    here, wheel = tmp_path / "project", runner_wheel.wheel()
    for folder in (here, tmp_path / "files"):
        folder.mkdir()
    (tmp_path / "files" / wheel.name).write_bytes(wheel.content)
    with served(tmp_path / "bed", "runpod") as bed, files(tmp_path / "files") as port:
        rented = Rented(clean, bed.world, "runpod_pod")
        Thread(target=rented.run, daemon=True).start()
        with marketplaces.answering(rented.pod, bed.world) as market:
            address = f"http://{rented.host}:{port}/{wheel.name.replace('+', '%2B')}#sha256={wheel.sha256}"
            (here / "main.py").write_text(PROGRAM.format(image=NODE, wheels=WHEELS, runner=address))
            (here / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
            for name in ("TF_CLI_CONFIG_FILE", "TF_REATTACH_PROVIDERS"):
                monkeypatch.setenv(name, bed.environment[name])
            monkeypatch.setenv("RUNPOD_API_KEY", marketplaces.KEY)
            monkeypatch.setenv("RUNPOD_API_BASE_URL", market.url)
            try:
                skyinfra(here, "deploy", "--auto-approve")
                manifest = Project.find(here).stack("market").fleet("p")
                assert (manifest.head.address, manifest.head.port) == (rented.host, rented.port("market-p-0"))
                is_a_fleet(manifest)
            finally:
                rented.over.set()
                skyinfra(here, "destroy", "--auto-approve")
                clean.run("rm", "-f", "-a", "-v", "-t", "0")
                clean.run("network", "rm", "market")
        assert bed.world.standing() == {}


def is_a_fleet(manifest: Manifest) -> None:
    """Tasks run on every slot, and what is large comes back although the head cannot connect to the worker."""
    with open_pool(manifest) as pool:
        assert sky.compute(len)([1, 2]) @ pool == [2] * 4
        assert [len(each) for each in pool.map(noise, [3_000_000] * 8)] == [3_000_000] * 8
        for found in sky.compute(seen)() @ pool:
            assert found["SKYINFRA_START"] is None and found["RUNPOD_API_KEY"] is None
