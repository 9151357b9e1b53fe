"""``skyinfra open jupyter``: a real Jupyter on a slot, its token, and what stays when the command ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from local_fleets.running_node import RunningNode, until
from support import ROOT, missing, python_path
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli import forward
from skyinfra.cli.app import app
from skyinfra.notebook import serve_jupyter

_PACKAGES = ("jupyter_server==2.21.1", "ipykernel==7.4.0")


def manifest_of(node: RunningNode, folder: Path) -> Path:
    file = folder / "fleet.json"
    with node.pool() as pool:
        file.write_text(json.dumps(pool.manifest.to_json()))
    return file


def test_a_node_without_jupyter_says_how_to_get_it(make_node: Callable[..., RunningNode], tmp_path: Path) -> None:
    node = make_node(cpu_slots=1)
    node.boot()
    program = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if 'jupyter' in name or name == 'notebook' else find(name)\n"
        f"sys.argv = ['x', 'files']; runpy.run_path({serve_jupyter.__file__!r}, run_name='__main__')\n"
    )
    script = tmp_path / "serve.py"
    script.write_text(program)
    with pytest.MonkeyPatch.context() as patch:
        # Also where whoever runs the tests has it.
        patch.setattr(serve_jupyter, "__file__", str(script))
        done = CliRunner().invoke(app, ["open", "jupyter", str(manifest_of(node, tmp_path))])
    assert isinstance(done.exception, sky.MissingDependency), done.output
    assert 'sky.Image(pip=["jupyterlab"])' in str(done.exception)


def test_what_a_program_prints_is_no_address() -> None:
    line = json.dumps({"skyinfra_jupyter": ["n1", 8888, "/lab?token=a-b_c"]})
    assert serve_jupyter.read(line) == ("n1", 8888, "/lab?token=a-b_c")
    for other in (
        "hello",
        '{"skyinfra_jupyter": 1}',
        '{"skyinfra_jupyter": ["n1", 1]}',
        '{"skyinfra_jupyter": [',
        line.replace("8888", '"8888"'),
        line.replace("/lab", "/lab\\u001b[31m"),
        line.replace("/lab", "@evil.example/lab"),
        line.replace("a-b_c", 'a\\"><script>'),
    ):
        assert serve_jupyter.read(other) is None


def test_the_browser_is_not_given_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other accounts see the arguments that a program is started with."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    forward._show("http://127.0.0.1:1/lab?token=secret", tmp_path)
    [address] = opened
    assert address == (tmp_path / "jupyter.html").as_uri()
    assert (tmp_path / "jupyter.html").stat().st_mode & 0o777 == 0o600
    assert 'url=http://127.0.0.1:1/lab?token=secret"' in (tmp_path / "jupyter.html").read_text()


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Jupyter's server."""
    folder = tmp_path_factory.mktemp("jupyter")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(folder), *_PACKAGES]
    if subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt")], check=False).returncode != 0:
        missing("jupyter_server")
    return folder


def asked(address: str, path: str, token: str | None, **data: str) -> Any:
    parts = urlsplit(address)
    request = urllib.request.Request(f"http://{parts.netloc}{path}", data=json.dumps(data).encode() if data else None)
    if token:
        request.add_header("Authorization", f"token {token}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def words() -> dict[int, str]:
    found = {}
    for process in psutil.process_iter():
        try:
            found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


# Runs a cell as a notebook's page does, and prints what the cell prints.
_CELL = """
import json, sys, uuid, websocket
address, code = sys.argv[1:]
line = websocket.create_connection(address, timeout=60)
header = {"msg_id": uuid.uuid4().hex, "username": "me", "session": "s", "msg_type": "execute_request", "version": "5.3"}
content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
line.send(json.dumps(message))
while (told := json.loads(line.recv()))["msg_type"] != "stream":
    pass
print(told["content"]["text"], end="")
"""


def cell(jupyter: Path, address: str, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(jupyter)}
    command = [sys.executable, "-c", _CELL, address, code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
def test_it_runs_on_a_slot_until_the_command_ends(
    make_node: Callable[..., RunningNode], jupyter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(jupyter)]))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    node = make_node(cpu_slots=1)
    node.boot()
    process = subprocess.Popen(
        [sys.executable, "-m", "skyinfra.cli", "open", "jupyter", str(manifest_of(node, tmp_path)), "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.fullmatch(r"Jupyter on n1 is at (http://127.0.0.1:\d+/\?token=([\w-]{40,})) until .*\n", said)
        assert found, said + str(process.communicate(timeout=60))
        address, token = found.groups()
        assert asked(address, "/api/status", token)["kernels"] == 0
        for wrong in (None, token[:-1]):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                asked(address, "/api/status", wrong)
        kernel = asked(address, "/api/kernels", token, name="python3")["id"]
        pid = until(lambda: [each for each, text in words().items() if kernel in text], "the kernel runs")[0]
        # It has the slot, whose device the kernel sees.
        assert b"SKYINFRA_SLOT" in Path(f"/proc/{pid}/environ").read_bytes()
        channels = f"{address.partition('/?')[0].replace('http', 'ws')}/api/kernels/{kernel}/channels?token={token}"
        assert cell(jupyter, channels, "import os; print(6 * 7, os.getpid())") == f"42 {pid}\n"
        asked(address, "/api/contents", token, type="notebook")
        assert [file.name for file in (node.path / "files").glob("*.ipynb")] == ["Untitled.ipynb"]
        # The token is in no list of processes, and in no file but one that goes with it.
        assert not [text for text in words().values() if token in text]
        holding = [file for file in node.path.rglob("*") if file.is_file() and token.encode() in file.read_bytes()]
        assert {(file.parent.name, file.parent.stat().st_mode & 0o777) for file in holding} == {("runtime", 0o700)}
        above = [each.pid for each in psutil.Process(pid).parents() if "-m jupyter" in " ".join(each.cmdline())]
        assert above
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, rest
    assert "Jupyter and its kernels end; its files stay on n1" in rest
    assert token not in rest and "Traceback" not in rest

    def left() -> list[str]:
        return [text for each, text in words().items() if kernel in text or (each in above and "-m jupyter" in text)]

    until(lambda: not left(), "all ended")
    assert not [file for file in node.path.rglob("*") if file.is_file() and token.encode() in file.read_bytes()]
    assert (node.path / "files/Untitled.ipynb").is_file()
    with node.pool() as pool:
        assert pool.get("Untitled.ipynb", tmp_path / "mine.ipynb").is_file()


def test_one_that_nobody_uses_ends_on_a_node_that_does(
    make_node: Callable[..., RunningNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """skypilot#1306: a Jupyter in the background is never idle."""
    node = make_node(cpu_slots=1, idle_seconds=1800.0)
    monkeypatch.setenv("SKYINFRA_NODE_CONFIG", str(node.file))
    assert serve_jupyter._limits() == [
        "--ServerApp.shutdown_no_activity_timeout=1800",
        "--TerminalManager.cull_inactive_timeout=1800",
        "--MappingKernelManager.cull_idle_timeout=1800",
        "--MappingKernelManager.cull_interval=180",
        "--MappingKernelManager.cull_connected=True",
    ]
    node.configure(idle_seconds=0.0)
    assert serve_jupyter._limits() == []
    monkeypatch.delenv("SKYINFRA_NODE_CONFIG")
    assert serve_jupyter._limits() == []


@pytest.mark.slow
def test_a_jupyter_that_nobody_uses_ends_and_its_node_after_it(
    make_node: Callable[..., RunningNode], jupyter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(jupyter)]))
    node = make_node(cpu_slots=1, idle_seconds=5.0)
    node.boot()
    command = [
        sys.executable,
        "-m",
        "skyinfra.cli",
        "open",
        "jupyter",
        str(manifest_of(node, tmp_path)),
        "--no-browser",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        # The command stays; Jupyter looks once a minute whether it is used.
        process.communicate(timeout=240)
    until(lambda: node.directory.holder() is None, "the node has ended")
    assert node.status().state == "stopped"
