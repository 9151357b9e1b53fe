"""The way to a head that has no address for clients: another program forwards a port of this machine to the head's.

OpenSSH's client with its configuration, agent and known hosts; AWS Session Manager; Identity-Aware Proxy of Google
Cloud. The program starts again when it ends, on the same port, and ends with this process, however that ends.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import replace

from skyinfra.errors import FleetUnreachable, MissingDependency
from skyinfra.protocol.manifest import Endpoint, Manifest, Via

_HERE = "127.0.0.1"
# A login by way of several hosts takes seconds.
_OPEN_S = 60.0
_POLL_S = 0.05
_AGAIN_S = 1.0
# For one packet to a head and back.
_PROBE_S = 1.5
_END_S = 5.0
_WORDS = 600
# Runs a program, and ends it when this shell's input ends: with the process that holds the other side.
_TIED = 'exec 3<&0; "$@" </dev/null 3<&- & p=$!; { read -r _ <&3; kill "$p" 2>/dev/null; } & wait "$p"'
_INSTALL = {
    "ssh": "install OpenSSH's client",
    "aws": "install the AWS CLI and its Session Manager plugin",
    "gcloud": "install the Google Cloud CLI",
}


def command(via: Via, head: Endpoint, port: int) -> list[str]:
    """Returns the program that forwards *port* of this machine to *head*."""
    if via.kind == "ssh":
        alive = ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        at = ["-p", str(via.port)] if via.port is not None else []
        forward = ["-L", f"{_HERE}:{port}:{head.address}:{head.port}"]
        # It asks nothing: nobody may be there to answer.
        quiet = ["-N", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes"]
        return ["ssh", *quiet, *alive, *forward, *at, "--", via.target]
    if via.kind == "ssm":
        region = [f"--region={via.region}"] if via.region else []
        ports = json.dumps({"portNumber": [str(head.port)], "localPortNumber": [str(port)]})
        document = ["--document-name", "AWS-StartPortForwardingSession", "--parameters", ports]
        return ["aws", "ssm", "start-session", f"--target={via.target}", *region, *document]
    place = [*([f"--zone={via.zone}"] if via.zone else []), *([f"--project={via.project}"] if via.project else [])]
    local = f"--local-host-port={_HERE}:{port}"
    return ["gcloud", "compute", "start-iap-tunnel", via.target, str(head.port), local, *place]


class Forwarding:
    """Forwards a port of this machine to the head of *manifest*, by way of *via*. `manifest`: with that port.

    Raises `MissingDependency` where the program is not installed, `FleetUnreachable` where it ends, or opens no port.
    """

    def __init__(self, manifest: Manifest, via: Via) -> None:
        self._via, self._fleet = via, manifest.fleet
        self.port = _free_port()
        self.manifest = replace(manifest, head=Endpoint(_HERE, self.port))
        self._command = command(via, manifest.head, self.port)
        if shutil.which(self._command[0]) is None:
            program = self._command[0]
            raise MissingDependency(
                f"{program}, by which the head of {self._fleet} is reached, is not installed", hint=_INSTALL[program]
            )
        self._closed = threading.Event()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep, name="skyinfra-forwarding", daemon=True)
        try:
            self._wait()
            self._thread.start()
        except BaseException:
            self._end(self._process)
            self._output.close()
            raise

    def close(self) -> None:
        """Ends the program."""
        self._closed.set()
        self._end(self._process)
        self._thread.join()
        self._end(self._process)
        self._output.close()

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        # A process group of its own: an interrupt at the terminal is for this program, which may have work to end.
        return subprocess.Popen(
            ["sh", "-c", _TIED, "sh", *self._command],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait(self) -> None:
        """Waits until the port is open."""
        deadline = time.monotonic() + _OPEN_S
        while not _answers(self.port):
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                ended = f"ended with exit code {code}" if code is not None else f"opened no port within {_OPEN_S:g} s"
                raise FleetUnreachable(
                    f"the head of {self._fleet} is reached by way of {self._via}, and `{self._command[0]}` {ended}: "
                    f"{self._said()}",
                    hint=f"Try it by hand: {shlex.join(self._command)}",
                )
            time.sleep(_POLL_S)

    def _said(self) -> str:
        self._output.seek(0)
        return self._output.read()[-_WORDS:].decode(errors="replace").strip() or "it said nothing"

    def _keep(self) -> None:
        """Starts the program again where it ends."""
        while not self._closed.is_set():
            self._process.wait()
            if not self._closed.wait(_AGAIN_S):
                self._end(self._process)
                self._process = self._start()


def forwarding(manifest: Manifest) -> Forwarding | None:
    """Returns the forwarding to the head of *manifest*; None where its address answers, or there is no other way."""
    head = manifest.head
    if manifest.via is None or _answers(head.port, head.address):
        return None
    return Forwarding(manifest, manifest.via)


def _free_port() -> int:
    with socket.create_server((_HERE, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _answers(port: int, address: str = _HERE) -> bool:
    try:
        socket.create_connection((address, port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True
