"""A head without a reachable address: another program forwards a port of this machine to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_fleets.client_fixtures import Fleet

import skyinfra as sky
from skyinfra import port_forward
from skyinfra.client import open_pool
from skyinfra.protocol.manifest import Endpoint, Manifest, Via

HEAD = Endpoint("10.0.0.5", 8786)
# Forwards as the programs do; what they print is that of OpenSSH 9, session-manager-plugin 1.2 and gcloud.
FORWARDER = """
import json, re, socket, sys, threading
words = sys.argv[1:]
text = " ".join(words)
if "-L" in words:
    _, here, _, port = words[words.index("-L") + 1].split(":")
elif "ssm" in words:
    ports = json.loads(words[words.index("--parameters") + 1])
    here, port = ports["localPortNumber"][0], ports["portNumber"][0]
    print(f"Starting session with SessionId: me-0a1b\\nPort {here} opened for sessionId me-0a1b.", flush=True)
else:
    here, port = re.search(r"local-host-port=127.0.0.1:(\\d+)", text)[1], words[3]
    print(f"Testing if tunnel connection works.\\nListening on port [{here}].", flush=True)
def copy(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
    except OSError:
        pass
    for each in (a, b):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
server = socket.create_server(("127.0.0.1", int(here)))
while True:
    client, _ = server.accept()
    there = socket.create_connection(("127.0.0.1", int(port)))
    for pair in ((client, there), (there, client)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
"""


@sky.compute
def seven() -> int:
    return 7


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for ``ssh``, ``aws`` and ``gcloud``; what they were called with is in `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "forwarder.py").write_text(textwrap.dedent(FORWARDER))
    for name in ("ssh", "aws", "gcloud"):
        text = f'#!/bin/sh\necho {name} "$@" >>{folder}/calls\nexec {sys.executable} {folder}/forwarder.py "$@"\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def forwarders(folder: Path) -> list[psutil.Process]:
    def words(process: psutil.Process) -> list[str]:
        try:
            return process.cmdline()
        except psutil.Error:
            return []

    return [each for each in psutil.process_iter() if f"{folder}/forwarder.py" in words(each)]


def behind(fleet: Fleet, via: Via) -> Manifest:
    """The manifest of *fleet* with an address of its head that leads nowhere (RFC 5737)."""
    return replace(fleet.manifest, head=Endpoint("192.0.2.1", fleet.manifest.head.port), via=via)


@pytest.mark.parametrize("kind", ["ssh", "ssm", "iap"])
def test_tasks_run_by_way_of_it(fleet: Fleet, programs: Path, kind: Any, wait_until: Callable[..., None]) -> None:
    with open_pool(behind(fleet, Via(kind, "there", region="eu-west-1", zone="z"))) as pool:
        assert seven() >> pool == 7
        assert len(forwarders(programs)) == 1
    wait_until(lambda: not forwarders(programs))


def test_an_address_that_answers_needs_no_other_way(fleet: Fleet, programs: Path) -> None:
    with open_pool(replace(fleet.manifest, via=Via("ssh", "there"))) as pool:
        assert seven() >> pool == 7
        assert not forwarders(programs)


def test_it_starts_again_where_it_ends(fleet: Fleet, programs: Path, wait_until: Callable[..., None]) -> None:
    with open_pool(behind(fleet, Via("ssh", "there"))) as pool:
        assert seven() >> pool == 7
        (first,) = forwarders(programs)
        first.send_signal(signal.SIGKILL)
        assert seven() >> pool == 7
        wait_until(lambda: [each.pid for each in forwarders(programs)] not in ([], [first.pid]))


def test_it_ends_with_the_client_however_that_ends(
    fleet: Fleet, programs: Path, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(behind(fleet, Via("ssh", "there")).to_json()))
    code = (
        f"import skyinfra as sky, time; p = sky.connect({str(tmp_path / 'manifest.json')!r}); "
        "print('here', flush=True); time.sleep(60)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.readline() == b"here\n"
    assert forwarders(programs)
    client.kill()
    client.wait()
    client.stdout.close()
    wait_until(lambda: not forwarders(programs))


def manifest_with(via: Via) -> Manifest:
    return Manifest(1, "s", "p", "aws", HEAD, (), (), "0123456789abcdef" * 4, via=via)


def test_what_the_program_says_is_told(programs: Path) -> None:
    (programs / "ssh").write_text("#!/bin/sh\necho 'Host key verification failed.' >&2\nexit 255\n")
    with pytest.raises(sky.FleetUnreachable, match=r"me@there \(ssh\).*exit code 255: Host key verification") as caught:
        port_forward.Forwarding(manifest_with(Via("ssh", "me@there")), Via("ssh", "me@there"))
    assert "Try it by hand: ssh -N" in str(caught.value)


def test_a_program_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sky.MissingDependency, match=r"aws(.|\n)*Session Manager plugin"):
        port_forward.Forwarding(manifest_with(Via("ssm", "i-1")), Via("ssm", "i-1"))


@pytest.mark.parametrize(
    ("via", "words"),
    [
        (Via("ssh", "me@gpu", port=2222), ["ssh", "-L", "127.0.0.1:4000:10.0.0.5:8786", "-p", "2222", "me@gpu"]),
        (
            Via("ssm", "i-0a1b", region="eu-west-1"),
            ["aws", "ssm", "start-session", "--target=i-0a1b", "--region=eu-west-1"],
        ),
        (
            Via("iap", "head", zone="europe-west4-a", project="mine"),
            ["gcloud", "compute", "start-iap-tunnel", "head", "8786", "--zone=europe-west4-a", "--project=mine"],
        ),
    ],
)
def test_the_commands(via: Via, words: list[str]) -> None:
    command = port_forward.command(via, HEAD, 4000)
    left = iter(command)
    assert all(word in left for word in words), command
    assert "4000" in " ".join(command)
