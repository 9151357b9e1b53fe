"""Nodes as containers, for real: Terraform, Podman from Debian, the first boot, tasks, and nothing left."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from booted_nodes.podman import NO_PYTHON, NODE, PREPARED, WHEELS, Engine
from support import ROOT, module_source
from terraform_projects.commands import left, processes, skyinfra, status, until

import skyinfra as sky
from skyinfra.bootstrap import runner_wheel
from skyinfra.client import Pool, open_pool
from skyinfra.protocol.manifest import Manifest
from skyinfra.terraform.program import Terraform
from skyinfra.terraform.project import Project

pytestmark = pytest.mark.xdist_group("containers")

PROGRAM = """
import skyinfra as sky
from cdktf import App
app = App()
sky.FleetStack(app, "here", pools=[sky.ComputePool(
    name="cpu", nodes={nodes}, provider=sky.Container(engine="podman", image="{image}", {provider}),
    worker=sky.Worker(concurrency=2), {pool} image=sky.Image(wheelhouse="{wheels}", pip=["six"], {declared}))])
app.synth()
"""
MODULE = ROOT / "modules" / "container"


def declare(
    folder: Path, *, nodes: int | str = 2, image: str = NODE, provider: str = "", declared: str = "", pool: str = ""
) -> Path:
    here = folder / "project"
    here.mkdir(exist_ok=True)
    (here / "cdktf.json").write_text(json.dumps({"app": "python main.py"}))
    given = {"nodes": nodes, "image": image, "provider": provider, "declared": declared, "pool": pool}
    text = PROGRAM.format(**given, wheels=WHEELS)
    (here / "main.py").write_text(text)
    return here


def deploy(here: Path, *more: str) -> set[str]:
    """What was made, replaced, restarted or removed: the lines of the plan without the reasons."""
    said = skyinfra(here, "deploy", "--auto-approve", *more)
    return set(re.findall(r"^  ([-+~±] cpu .*)$", said.stderr + said.stdout, re.MULTILINE))


def made(engine: Engine) -> dict[str, str]:
    """The id of each container that runs, by the last part of its name, which is its node's."""
    lines = engine.run("ps", "--no-trunc", "--format", "{{.Names}} {{.ID}}").splitlines()
    return {name.rpartition("-")[2]: identity for name, identity in map(str.split, lines)}


def where() -> tuple[str, int]:
    return sky.instance_info().node, os.getuid()


def was_used() -> bool:
    return bool(json.loads(Path(os.environ["SKYINFRA_NODE_DIR"], "idle.json").read_text())["begun"])


def noise(size: int) -> bytes:
    return os.urandom(size)


def is_uploaded(pool: Pool) -> None:
    """Tasks run on every slot, as another user than root, and what they give is large."""
    found = sky.compute(where)() @ pool
    names = [node for node, _ in found]
    assert names == sorted(names) and len(names) == 2 * len(set(names))
    assert all(uid != 0 for _, uid in found)
    assert [len(each) for each in pool.map(noise, [20_000_000] * 2)] == [20_000_000] * 2


def test_two_containers_from_deploy_to_destroy(tmp_path: Path, clean: Engine) -> None:
    here = declare(tmp_path)
    deploy(here)
    try:
        manifest = Project.find(here).stack("here").fleet("cpu")
        # Of the host, where the head has another one.
        assert manifest.head.address == "127.0.0.1" and 20_000 <= manifest.head.port < 32_000
        with open_pool(manifest) as pool:
            is_uploaded(pool)
        is_private(clean, manifest)
        existing = made(clean)
        assert deploy(here) == set() and made(clean) == existing
    finally:
        skyinfra(here, "destroy", "--auto-approve")
    assert not left(here)
    until(lambda: not processes(here))


def is_private(engine: Engine, manifest: Manifest) -> None:
    """The secret is in no description, no log and no image of a node, and its user cannot read root's copy."""
    head = next(node.id for node in manifest.nodes if node.head)
    described = engine.run("container", "inspect", head) + engine.run("ps", "-a", "--format", "json", "--no-trunc")
    assert manifest.secret not in described + engine.run("logs", head)
    graph = Path(engine.run("info", "--format", "{{.Store.GraphRoot}}"))
    found = subprocess.run(["grep", "-rlF", manifest.secret, graph / "overlay"], capture_output=True, text=True)
    # /etc/skyinfra and /run/skyinfra of running containers are in memory, and stand below here while they run.
    assert all("/merged/" in path for path in found.stdout.splitlines()), found.stdout
    for path in ("/opt/skyinfra/delivered/secret", "/etc/skyinfra/secret"):
        refused = subprocess.run(["podman", "exec", "--user", "skyinfra", head, "cat", path], capture_output=True)
        assert refused.returncode != 0 and not refused.stdout


@pytest.mark.slow
def test_what_is_killed_comes_back_and_what_is_declared_changes_no_more(tmp_path: Path, clean: Engine) -> None:
    here = declare(tmp_path, nodes=1)
    deploy(here)
    try:
        manifest = Project.find(here).stack("here").fleet("cpu")
        with open_pool(manifest) as pool:
            assert pool.submit(sum, [3, 4], detach="over").result(timeout=60) == 7
        first = made(clean)
        declare(tmp_path, nodes=3)
        assert deploy(here) == {f"+ cpu {kind} cpu-{i}" for kind in ("node", "worker") for i in (1, 2)}
        declare(tmp_path, nodes=2)
        assert deploy(here) == {f"- cpu {kind} cpu-2" for kind in ("node", "worker")}
        existing = made(clean)
        assert existing["0"] == first["0"] and set(existing) == {"0", "1"}
        prefix = manifest.nodes[0].id.removesuffix("-0")
        # One that is killed, and a head of which nothing is left.
        clean.run("kill", f"{prefix}-1")
        assert deploy(here) == {"~ cpu worker cpu-1"} and made(clean) == existing
        clean.run("rm", "-f", "-v", f"{prefix}-0")
        assert deploy(here) == {"~ cpu head"} and made(clean)["1"] == existing["1"]
        with open_pool(Project.find(here).stack("here").fleet("cpu")) as pool:
            is_uploaded(pool)
            assert pool.job("over").result(timeout=60) == 7
        # Another variable: other containers in the same network, with the same volumes.
        declare(tmp_path, nodes=2, declared='env={"A": "1"}')
        changed = deploy(here)
        assert {"± cpu node cpu-0", "± cpu node cpu-1"} < changed and not any(c.startswith("+") for c in changed)
        with open_pool(Project.find(here).stack("here").fleet("cpu")) as pool:
            assert pool.job("over").result(timeout=60) == 7
            assert sky.compute(os.getenv)("A") @ pool == ["1"] * 4
        # Without the network and a container, too.
        clean.run("rm", "-f", "-v", "-a", "-t", "0")
        clean.run("network", "rm", "-f", prefix)
    finally:
        skyinfra(here, "destroy", "--auto-approve")
    assert not left(here)
    until(lambda: not processes(here))


@pytest.mark.slow
def test_a_fleet_without_head_and_client_ends_and_comes_back(tmp_path: Path, clean: Engine) -> None:
    here = declare(tmp_path, pool='stop_after_idle="10s",')
    deploy(here)
    try:
        manifest = Project.find(here).stack("here").fleet("cpu")
        with open_pool(manifest) as pool:
            assert pool.submit(sum, [3, 4], detach="over").result(timeout=60) == 7
            # A node that knows of no use waits for minutes for its fleet.
            until(lambda: all(sky.compute(was_used)() @ pool))
        clean.run("kill", next(node.id for node in manifest.nodes if node.head))
        # No engine starts one again that has ended by itself.
        until(lambda: not made(clean), seconds=180)
        assert "2 nodes ended without a deploy" in " ".join(skyinfra(here, "plan").stderr.split())
        assert deploy(here) == {"~ cpu head", "~ cpu worker cpu-1"}
        with open_pool(manifest) as pool:
            assert pool.job("over").result(timeout=60) == 7
            is_uploaded(pool)
    finally:
        skyinfra(here, "destroy", "--auto-approve")
    assert not left(here)
    until(lambda: not processes(here))


@pytest.mark.slow
def test_commands_and_orphans(tmp_path: Path, clean: Engine) -> None:
    here = declare(tmp_path, nodes=1)
    deploy(here)
    try:
        assert "cpu-0 (head)" in skyinfra(here, "status").stdout
        assert "pass" in skyinfra(here, "preflight").stdout
        assert "skyinfra)" in skyinfra(here, "exec", "here/cpu", "--", "id").stdout
        assert "ready" in skyinfra(here, "logs", "here/cpu").stdout
        assert "cpu-0" in skyinfra(here, "top", "here/cpu").stdout
        assert "wrong" not in skyinfra(here, "doctor", "here/cpu").stdout.replace("0 wrong", "")
        for command, words in (("ssh", "exec -it skyinfra-cpu-"), ("upgrade", "terraform_data.delivered")):
            refused = skyinfra(here, command, "here/cpu", check=False)
            assert refused.returncode != 0 and words in refused.stderr
        # What that hint says: other containers, with the runner that is compiled now.
        existing = made(clean)
        deploy(here, "--replace", "module.cpu.terraform_data.delivered")
        assert made(clean)["0"] != existing["0"]
        # Another name is another pool, and no module of the one before is declared, which ends its container.
        (here / "main.py").write_text((here / "main.py").read_text().replace('name="cpu"', 'name="box"'))
        assert "cpu-0 is destroyed, for its pool is not declared any more" in skyinfra(here, "plan").stderr
        deploy(here)
        assert re.fullmatch(r"skyinfra-box-\w+-0", clean.run("ps", "-a", "--format", "{{.Names}}").strip())
        (here / "main.py").write_text((here / "main.py").read_text().replace('"here"', '"there"'))
        shutil.rmtree(here / "cdktf.out")
        assert "skyinfra destroy here" in skyinfra(here, "plan").stderr
    finally:
        skyinfra(here, "destroy", "here", "--auto-approve")
    assert not left(here)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "more", "words"),
    [
        ({"image": "localhost/skyinfra-nowhere"}, {}, ["image: localhost/skyinfra-nowhere cannot be pulled"]),
        ({"image": NO_PYTHON}, {}, ["cpu-0 has ended", "no python3", "choose one that has it"]),
        ({"provider": 'network="absent"'}, {}, ["network: podman has no network absent", "podman network create"]),
        ({"provider": "port=%(port)s"}, {}, ["port: 127.0.0.1:%(port)s is taken", "sky.Container(port=...)"]),
        ({"declared": 'run=["echo it broke; exit 7"]'}, {}, ["cpu-0 has ", "it broke"]),
        ({}, {"CONTAINERS_STORAGE_CONF": "/dev/null/no"}, ["engine: podman does not answer", "podman ps"]),
        (
            {},
            {"CONTAINER_HOST": "ssh://elsewhere/run/podman.sock"},
            ["engine: podman speaks to ssh://elsewhere/run/podman.sock", "sky.Container(host="],
        ),
        ({}, {"PATH": "nowhere"}, ["engine: podman is not installed"]),
    ],
)
def test_what_cannot_be_says_why(
    tmp_path: Path, clean: Engine, fields: dict[str, str], more: dict[str, str], words: list[str], taken: int
) -> None:
    if fields.get("image") == NO_PYTHON:
        clean.image(NO_PYTHON, NODE, "rm /usr/bin/python3*")
    filled = {name: value % {"port": taken} for name, value in fields.items()}
    here = declare(tmp_path, nodes=1, **filled)
    if "PATH" in more:
        more = {"PATH": _path_without_podman(tmp_path)}
    failed = skyinfra(here, "deploy", "--auto-approve", check=False, **more)
    try:
        assert failed.returncode == 1
        for word in words:
            assert word % {"port": taken} in failed.stderr
    finally:
        skyinfra(here, "destroy", "--auto-approve")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine that has a listener."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def _path_without_podman(folder: Path) -> str:
    """The programs of this machine but podman."""
    programs = folder / "bin"
    programs.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            if program.name != "podman" and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    return str(programs)


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["podman", "docker"])
def test_an_engine_behind_a_socket(tmp_path: Path, clean: Engine, engine_name: str, service: Callable[[], str]) -> None:
    """Docker's own program speaks to Podman here: what an engine does with it is Podman's."""
    if shutil.which(engine_name) is None:
        pytest.skip(f"the program {engine_name} is not here")
    here = declare(tmp_path, provider=f'host="{service()}", port=21786')
    text = (here / "main.py").read_text().replace('engine="podman"', f'engine="{engine_name}"')
    (here / "main.py").write_text(text)
    deploy(here)
    try:
        manifest = Project.find(here).stack("here").fleet("cpu")
        assert str(manifest.head) == "tls://127.0.0.1:21786"
        with open_pool(manifest) as pool:
            is_uploaded(pool)
    finally:
        skyinfra(here, "destroy", "--auto-approve")


@pytest.fixture
def service(tmp_path: Path, clean: Engine) -> Iterator[Callable[[], str]]:
    """Starts Podman's service; the address of its socket."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> str:
        address = f"unix://{tmp_path}/podman.sock"
        command = ["podman", "system", "service", "--time", "0", address]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        until(lambda: (tmp_path / "podman.sock").exists())
        return address

    yield start
    for each in started:
        each.terminate()
        each.wait()


@pytest.mark.slow
@pytest.mark.parametrize("network", ["own", "host"])
def test_networks_that_are_named(tmp_path: Path, clean: Engine, network: str) -> None:
    if network == "own":
        clean.run("network", "create", "own")
    here = declare(tmp_path, provider=f'network="{network}"' + (", port=21787" if network == "host" else ""))
    deploy(here)
    try:
        with open_pool(Project.find(here).stack("here").fleet("cpu")) as pool:
            is_uploaded(pool)
    finally:
        skyinfra(here, "destroy", "--auto-approve")
        if network == "own":
            clean.run("network", "rm", "own")


@pytest.mark.slow
def test_the_example_with_a_prepared_image(tmp_path: Path, clean: Engine) -> None:
    """Without Python on the machine that applies, and at once: the image has the runner."""
    wheel = runner_wheel.wheel()
    (tmp_path / wheel.name).write_bytes(wheel.content)
    install = f"python3 -m venv /srv/runner && /srv/runner/bin/pip install -q --no-index -f /wheels /{wheel.name}"
    link = "ln -s /srv/runner/bin/skyinfra-runner /usr/local/bin/"
    clean.image(PREPARED, NODE, f"{install} && {link}", copied={str(tmp_path / wheel.name): f"/{wheel.name}"})
    text = (MODULE / "examples" / "prepared" / "main.tf").read_text()
    text = text.replace("../..", module_source("container")).replace("registry.example.com/skyinfra", PREPARED)
    (tmp_path / "main.tf").write_text(text)
    applied = Terraform(tmp_path)
    applied.prepare()
    with applied.planned(lambda event: None) as plan:
        applied.apply_plan(plan, lambda event: None)
    try:
        with open_pool(Manifest.read(applied.outputs()["fleet_cpu"])) as pool:
            assert sky.compute(len)([1, 2]) @ pool == [2] * 4
        with applied.planned(lambda event: None) as plan:
            assert plan.empty
    finally:
        with applied.planned(lambda event: None, destroy=True) as plan:
            applied.apply_plan(plan, lambda event: None)


@pytest.mark.slow
def test_another_number_of_containers_is_an_apply_and_every_plan_is_empty(tmp_path: Path, clean: Engine) -> None:
    here = declare(tmp_path, nodes="sky.Range(1, 3)")
    deploy(here)
    try:
        head = made(clean)
        assert set(head) == {"0"} and deploy(here) == set()
        for count in (3, 1):
            skyinfra(here, "scale", "here/cpu", str(count), "--auto-approve")
            existing = made(clean)
            assert len(existing) == count and existing["0"] == head["0"]
            assert "no changes" in skyinfra(here, "plan").stdout and deploy(here) == set()
            with open_pool(Project.find(here).stack("here").fleet("cpu")) as pool:
                assert len({node for node, _ in sky.compute(where)() @ pool}) == count
    finally:
        skyinfra(here, "destroy", "--auto-approve")
    assert not (here / "skyinfra.places.json").exists()


@pytest.mark.slow
def test_the_number_of_nodes_follows_the_work_and_every_plan_is_empty(tmp_path: Path, clean: Engine) -> None:
    here = declare(tmp_path, nodes="sky.Range(0, 3)", pool="idle_seconds=5,")
    deploy(here)
    try:
        existing = made(clean)
        assert set(existing) == {"0", "1", "2", "3"} and size(here)["nodes"] == 0 and deploy(here) == set()
        manifest = Project.find(here).stack("here").fleet("cpu")
        prefix = manifest.nodes[0].id.removesuffix("-0")
        with open_pool(manifest) as pool:
            calls = [pool.submit(waits, 2.0) for _ in range(60)]
            until(lambda: size(here)["nodes"] == 3, seconds=120)
            assert "no changes" in skyinfra(here, "plan").stdout
            # A runner that is killed is the same start.
            kill = "import os; os.kill(int(open('/var/lib/skyinfra/runner.pid').read()), 9)"
            clean.run("exec", f"{prefix}-2", "python3", "-c", kill)
            assert {call.result(timeout=300) for call in calls} == {"cpu-1", "cpu-2", "cpu-3"}
            until(lambda: size(here)["nodes"] == 0, seconds=120)
            assert made(clean) == existing and "no changes" in skyinfra(here, "plan").stdout
            # Another range reaches the head while it runs, and the last containers are made or go.
            declare(tmp_path, nodes="sky.Range(1, 2)", pool="idle_seconds=5,")
            assert deploy(here) == {"± cpu bounds[0]", "- cpu node cpu-3", "- cpu worker cpu-3"}
            del existing["3"]
            until(lambda: size(here)["nodes"] == 1, seconds=120)
            assert made(clean) == existing and size(here)["why"] == "1 is the least"
            # A host that starts again, and its containers with it: the node that there was comes back by itself.
            clean.run("restart", "-t", "5", f"{prefix}-1", f"{prefix}-2")
            until(lambda: size(here)["nodes"] == 1, seconds=120)
            assert pool.submit(waits, 0.0).result(timeout=120) in ("cpu-1", "cpu-2")
        # One that is removed while it waits is none that the manifest names.
        clean.run("rm", "-f", "-v", f"{prefix}-2")
        assert deploy(here) == {"~ cpu worker cpu-2"} and set(made(clean)) == {"0", "1", "2"}
    finally:
        skyinfra(here, "destroy", "--auto-approve")
    assert not left(here)


def waits(seconds: float) -> str:
    time.sleep(seconds)
    return sky.instance_info().node


def size(here: Path) -> dict[str, Any]:
    found: dict[str, Any] = status(here, "here")["pools"][0]["size"]
    return found
