"""The nodes of marketplaces, for real but for the marketplace: containers of Podman behind ports that are mapped.

Terraform applies against the mock of the provider; what its API is asked for is started with what was declared there.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from booted_nodes.podman import NODE, WHEELS, Engine
from cloud_modules import marketplaces
from cloud_modules.marketplaces import Marketplace
from mock_provider.bed import Bed, served
from mock_provider.world import World
from terraform_projects.commands import skyinfra, until

import skyinfra as sky
from skyinfra.bootstrap import runner_wheel
from skyinfra.client import open_pool
from skyinfra.compiler import compile_pool
from skyinfra.protocol.manifest import Manifest
from skyinfra.stack import module_inputs
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


# Where a container asks to be deleted, and its variables with its id and with the key that it has for itself alone.
PLACES = {
    "runpod_pod": ("https://rest.runpod.io/v1/pods/", "RUNPOD_POD_ID", "RUNPOD_API_KEY"),
    "vastai_instance": ("https://console.vast.ai/api/v0/instances/", "CONTAINER_ID", "CONTAINER_API_KEY"),
}


class Rented:
    """What is rented in a world, as containers in a network whose host maps their ports.

    api: where they ask to be deleted. refuses: so many of these requests. deleted: the answers to them.
    """

    def __init__(self, engine: Engine, world: World, kind: str) -> None:
        self.engine, self.world, self.kind = engine, world, kind
        engine.run("network", "create", "market")
        found = json.loads(engine.run("network", "inspect", "market"))
        self.host, self.subnet = (str(found[0]["subnets"][0][each]) for each in ("gateway", "subnet"))
        self.started: dict[str, str] = {}
        self.over = Event()
        self.api = ""
        self.refuses = 0
        self.deleted: list[int] = []

    def run(self) -> None:
        """Starts what is rented, until `over`."""
        while not self.over.wait(0.2):
            found = self.world.existing(self.kind)
            for (file, made), asked in zip(found.items(), self.world.asked(self.kind), strict=False):
                if file not in self.started:
                    self._start(asked, str(made["id"]))
                    self.started[file] = asked["name" if self.kind == "runpod_pod" else "label"]

    def _start(self, asked: dict[str, Any], number: str) -> None:
        """As RunPod does with an image that has no entry of its own: its arguments, and a public port for each. As
        Vast.ai does: an entry of its own, which runs `onstart` and stays."""
        pod = self.kind == "runpod_pod"
        name, variables = asked["name" if pod else "label"], dict(asked["env"])
        ports = asked["ports"] or [] if pod else [each.split()[1] for each in variables if each.startswith("-p ")]
        given = ["--network", "market", "--name", name, "--entrypoint", ""]
        for port in ports:
            given += ["--publish", port.partition("/")[0].rpartition(":")[2]]
        place, itself, own = PLACES[self.kind]
        for variable, value in {**variables, itself: number, own: f"k3y-of-{number}"}.items():
            given += [] if variable.startswith("-p ") else ["--env", f"{variable}={value}"]
        first = asked["args" if pod else "onstart"].replace(place, f"{self.api}/")
        command = shlex.split(first) if pod else ["sh", "-c", f"{first}\nexec sleep infinity"]
        self.engine.run("run", "-d", *given, asked["image"], *command)
        self._close(name)

    def answer(self, server: Marketplace, path: str) -> Any:
        """What the API says of a pod, or of an instance."""
        for file, made in self.world.existing(self.kind).items():
            if f"/{made['id']}" in path and file in self.started:
                port = self.port(self.started[file])
                if self.kind == "runpod_pod":
                    mapped = {"private": 8786, "public": port, "type": "tcp", "ip": self.host}
                    return {"id": made["id"], "status": "RUNNING", "runtime": {"ports": [mapped]}}
                ports = {"8786/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(port)}]}
                return {"instances": {"actual_status": "running", "public_ipaddr": self.host, "ports": ports}}
        return {"status": "STARTING", "runtime": None, "instances": {"actual_status": "loading"}}

    def delete(self, path: str, key: str | None) -> int:
        """The answer to DELETE, which the key of a container allows for itself alone."""
        for file, made in self.world.existing(self.kind).items():
            if path.strip("/") == str(made["id"]) and file in self.started:
                if self.refuses or key != f"Bearer k3y-of-{made['id']}":
                    self.refuses = max(0, self.refuses - 1)
                    return 403
                self.engine.run("rm", "-f", "-t", "0", self.started[file])
                (self.world.folder / file).unlink()
                return 204
        return 404

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


@dataclass(frozen=True)
class Market:
    """A marketplace: the bed of its provider, what is rented, and where nodes fetch the runner."""

    bed: Bed
    rented: Rented
    runner: str


@contextmanager
def files(folder: Path, rented: Rented) -> Iterator[int]:
    """Serves *folder* to everybody, and deletes what is *rented* for whoever may; the port."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_DELETE(self) -> None:
            rented.deleted.append(rented.delete(self.path, self.headers["Authorization"]))
            self.send_response(rented.deleted[-1])
            self.end_headers()

    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def seen() -> dict[str, str | None]:
    import os

    return {name: os.environ.get(name) for name in ("SKYINFRA_START", "RUNPOD_API_KEY", "CONTAINER_API_KEY")}


def own_keys() -> list[str]:
    """The keys of its container that a task finds: in root's file, and in what processes began with."""
    import re
    from pathlib import Path

    found = []
    for path in [
        Path("/opt/skyinfra/rented"),
        *Path("/proc").glob("[0-9]*/environ"),
        *Path("/proc").glob("[0-9]*/cmdline"),
    ]:
        with suppress(OSError):
            found += re.findall(rb"k3y-of-[\w-]+", path.read_bytes())
    return [str(each) for each in found]


@contextmanager
def market(folder: Path, engine: Engine, provider: str, kind: str, environment: tuple[str, str]) -> Iterator[Market]:
    """A marketplace in *folder*. environment: the variables with the key and the address of its API."""
    wheel = runner_wheel.wheel()
    (folder / "files").mkdir()
    (folder / "files" / wheel.name).write_bytes(wheel.content)
    with served(folder / "bed", provider) as bed:
        rented = Rented(engine, bed.world, kind)
        try:
            with files(folder / "files", rented) as port, marketplaces.answering(rented.answer, bed.world) as api:
                rented.api = f"http://{rented.host}:{port}"
                address = f"{rented.api}/{wheel.name.replace('+', '%2B')}#sha256={wheel.sha256}"
                Thread(target=rented.run, daemon=True).start()
                bed.environment |= dict(zip(environment, (marketplaces.KEY, api.url), strict=True))
                yield Market(bed, rented, address)
        finally:
            rented.over.set()
            engine.run("rm", "-f", "-a", "-v", "-t", "0")
            engine.run("network", "rm", "market")
        assert bed.world.existing() == {}


def test_pods_of_runpod(tmp_path: Path, clean: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "project"
    here.mkdir()
    api = ("RUNPOD_API_KEY", "RUNPOD_API_BASE_URL")
    with market(tmp_path, clean, "runpod", "runpod_pod", api) as made:
        (here / "main.py").write_text(PROGRAM.format(image=NODE, wheels=WHEELS, runner=made.runner))
        (here / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
        for name in ("TF_CLI_CONFIG_FILE", "TF_REATTACH_PROVIDERS", *api):
            monkeypatch.setenv(name, made.bed.environment[name])
        try:
            skyinfra(here, "deploy", "--auto-approve")
            is_a_fleet(Project.find(here).stack("market").fleet("p"), made.rented)
        finally:
            skyinfra(here, "destroy", "--auto-approve")


@contextmanager
def applied(made: Market, provider: str, idle_s: float = 0.0) -> Iterator[Manifest]:
    """A fleet of two nodes, which end themselves after *idle_s* without use.

    With the user data of nodes without a GPU, which Vast.ai has none of: there is no driver here.
    """
    # Nodes import this module, and have not what that one reads.
    from cloud_modules.cases import RUNPOD, VASTAI, root

    case = {"runpod": RUNPOD, "vastai": VASTAI}[provider]
    image = sky.Image(wheelhouse=WHEELS, pip=["six"], runner=made.runner)
    pool = sky.ComputePool(name="p", nodes=2, provider=sky.RunPod(), worker=sky.Worker(concurrency=2), image=image)
    if idle_s:
        pool = pool.model_copy(update={"stop_after_idle": "5m"})
    inputs = module_inputs(compile_pool(pool, "market"), ".")
    kept = ("node_count", "user_data_head", "user_data_worker", "user_data_revision", "versions", "slots")
    given = {name: inputs[name] for name in (*kept, *(["deletes_itself"] if idle_s else []))}
    for each in ("user_data_head", "user_data_worker") if idle_s else ():
        # Shorter than what may be declared.
        given[each], count = re.subn(r'("idle_seconds":)300\.0', rf"\g<1>{idle_s}", given[each])
        assert count == 1
    case.answers(made.bed.world)
    made.bed.write(root(case, **given, name="p", stack="market", image=NODE), "main.tf.json")
    made.bed.run("init", "-no-color")
    try:
        made.bed.apply()
        yield Manifest.read(made.bed.output("fleet"))
    finally:
        made.bed.destroy()


def test_instances_of_vastai(tmp_path: Path, clean: Engine) -> None:
    with (
        market(tmp_path, clean, "vastai", "vastai_instance", ("VASTAI_API_KEY", "VASTAI_API_URL")) as made,
        applied(made, "vastai") as manifest,
    ):
        is_a_fleet(manifest, made.rented)


@pytest.mark.parametrize(
    ("provider", "kind", "api"),
    [
        ("runpod", "runpod_pod", ("RUNPOD_API_KEY", "RUNPOD_API_BASE_URL")),
        ("vastai", "vastai_instance", ("VASTAI_API_KEY", "VASTAI_API_URL")),
    ],
)
def test_a_container_that_nobody_uses_deletes_itself(
    tmp_path: Path, clean: Engine, provider: str, kind: str, api: tuple[str, str]
) -> None:
    """By the key that it has for itself, which no task finds. What is refused is asked again."""
    with market(tmp_path, clean, provider, kind, api) as made, applied(made, provider, idle_s=8.0) as manifest:
        made.rented.refuses = 1
        with open_pool(manifest, timeout=300) as pool:
            assert sky.compute(own_keys)() @ pool == [[]] * 4
        until(lambda: made.bed.world.existing(kind) == {}, seconds=240)
        assert sorted(made.rented.deleted) == [204, 204, 403]
        assert clean.run("ps", "--all", "--quiet") == ""
        back = {
            address for address, action in made.bed.changes().items() if f".{kind}." in address and action == "create"
        }
        assert len(back) == 2


def is_a_fleet(manifest: Manifest, rented: Rented) -> None:
    """Tasks run on every slot, and what is large comes back although the head cannot connect to the worker."""
    assert (manifest.head.address, manifest.head.port) == (
        rented.host,
        rented.port(next(each for each in rented.started.values() if each.endswith("-0"))),
    )
    with open_pool(manifest, timeout=300) as pool:  # an apply ends before the head answers
        assert sky.compute(len)([1, 2]) @ pool == [2] * 4
        # None of this module, whose imports a node has not.
        assert [len(each) for each in pool.map(bytes, [3_000_000] * 8)] == [3_000_000] * 8
        for found in sky.compute(seen)() @ pool:
            assert set(found.values()) == {None}
