"""Runs Jupyter on a slot: the text of this file is sent there, as a script whose argument is a folder of the node.

Jupyter listens at the node's loopback, with a token that is made here: Jupyter reads it from its environment, which its
own account alone can read, and the client from this program's output, which goes to nobody else and to no file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from skyinfra.protocol.instance import NODE_CONFIG, NODE_DIRECTORY, instance_info
from skyinfra.protocol.nodeconfig import NodeConfig

# The exit code where the node has no Jupyter.
MISSING = 78
# The first one that the node has, and its page.
_PROGRAMS = (("jupyterlab", "/lab"), ("notebook", "/tree"), ("jupyter_server", "/"))
_MARK = "skyinfra_jupyter"
_POLL_S = 0.05
_START_S = 120.0


def read(line: str) -> tuple[str, int, str] | None:
    """Returns the node, the port and the path with the token in the *line* that tells where Jupyter is, if it does."""
    if not line.startswith(f'{{"{_MARK}"'):
        return None
    try:
        node, port, path = json.loads(line)[_MARK]
    except (ValueError, TypeError, KeyError):
        return None
    whole = isinstance(port, int) and isinstance(node, str) and isinstance(path, str)
    return (node, port, path) if whole and re.fullmatch(r"/[a-z]*\?token=[\w-]+", path) else None


def main() -> int:
    """Runs it until it ends; returns its exit code."""
    found = [(name, page) for name, page in _PROGRAMS if importlib.util.find_spec(name) is not None]
    if not found:
        return MISSING
    name, page = found[0]
    slot = instance_info()
    root = Path(os.environ[NODE_DIRECTORY], sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    # The file that it leaves there has the token; the folder goes with this program.
    runtime = Path.cwd() / "runtime"
    runtime.mkdir(mode=0o700)
    print(f"Jupyter ({name}) starts on {slot.slot}; its files are in {root}", file=sys.stderr, flush=True)
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={_free_port()}", "--ServerApp.port_retries=0"]
    options += [f"--ServerApp.root_dir={root}", "--ServerApp.allow_remote_access=False", "--log-level=WARN"]
    # In containers of marketplaces tasks are root; what the token admits could be so anyway.
    options += ["--allow-root"] if os.geteuid() == 0 else []
    options += _limits()
    process = subprocess.Popen(
        [sys.executable, "-m", name, *options],
        cwd=root,
        env={**os.environ, "JUPYTER_TOKEN": token, "JUPYTER_RUNTIME_DIR": str(runtime)},
    )
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: process.terminate())
    port = _port(process, runtime)
    if port is not None:
        print(json.dumps({_MARK: [slot.node, port, f"{page}?token={token}"]}), flush=True)
    return process.wait()


def _limits() -> list[str]:
    """Returns the options by which Jupyter ends once nothing runs in it, on a node that ends when nobody uses it.

    https://jupyter-server.readthedocs.io/en/latest/other/full-config.html (2026-11-26).
    """
    file = os.environ.get(NODE_CONFIG)
    # A node of the version before, to which this text is sent, knows no such field.
    idle_s = int(getattr(NodeConfig.load(Path(file)), "idle_seconds", 0)) if file is not None else 0
    if not idle_s:
        return []
    kernels = {"cull_idle_timeout": idle_s, "cull_interval": max(1, idle_s // 10), "cull_connected": True}
    return [
        f"--ServerApp.shutdown_no_activity_timeout={idle_s}",
        f"--TerminalManager.cull_inactive_timeout={idle_s}",
        *(f"--MappingKernelManager.{name}={value}" for name, value in kernels.items()),
    ]


def _port(process: subprocess.Popen[bytes], runtime: Path) -> int | None:
    """Returns the port, once Jupyter has it and says so: another program could have taken it before."""
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        for file in runtime.glob("jpserver-*.json"):
            try:
                return int(json.loads(file.read_text(encoding="utf-8"))["port"])
            except (OSError, ValueError, KeyError):
                continue  # it is being written
        time.sleep(_POLL_S)
    if process.poll() is None:
        print(f"Jupyter has not started within {_START_S:g} s", file=sys.stderr, flush=True)
        process.terminate()
    return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
