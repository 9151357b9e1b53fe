"""``skyinfra port-forward | open``: ports of nodes as programs of this machine see them."""

from __future__ import annotations

import html
import re
import sys
import tempfile
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyinfra.blobs.store import in_words
from skyinfra.cli.options import Fleet, OnNode, OnProfile, exit_code, write
from skyinfra.errors import InvalidField, MissingDependency, counted
from skyinfra.notebook import serve_jupyter
from skyinfra.program.views import FILES_FOLDER
from skyinfra.terminal import tables
from skyinfra.terminal.progress import asked, connected

if TYPE_CHECKING:
    from skyinfra.client import Pool, Questions
    from skyinfra.engine.forwarding import Forward

_POLL_S = 0.5
_HERE = "127.0.0.1"
_LARGEST = 65535

app = typer.Typer()


# Ports ----------------------------------------------------------------------------------------------------------------


@app.command("port-forward")
def port_forward(
    fleet: Fleet,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node.")],
    ports: Annotated[
        list[str],
        typer.Argument(metavar="[LOCAL:]PORT...", help="Ports of the node, and of this machine; LOCAL 0 is any."),
    ],
) -> None:
    """Lead ports of this machine's loopback to ports of a node's, through the head's one port, until interrupted."""
    pairs = [_pair(each) for each in ports]
    with asked(fleet) as pool:
        name = pool.named(node, "NODE")[0]
        forwards = [(_forward(pool, name, remote, local), remote) for local, remote in pairs]
        for forward, remote in forwards:
            tables.say(f"{_HERE}:{forward.port} is port {remote} of {name} until you press Ctrl-C.")
        try:
            while True:
                time.sleep(_POLL_S)
        finally:
            for forward, remote in forwards:
                tables.say(f"{_HERE}:{forward.port} to port {remote} of {name}: {_said(forward)}", to_stderr=True)


def _pair(text: str) -> tuple[int, int]:
    """Returns the port of this machine and that of the node. Raises `InvalidField`."""
    local, colon, remote = text.rpartition(":")
    given = [remote, local if colon else remote]
    if not all(re.fullmatch("[0-9]{1,5}", each) and int(each) <= _LARGEST for each in given) or int(remote) == 0:
        raise InvalidField(
            "expected PORT or LOCAL:PORT",
            field="PORT",
            given=text,
            hint="Such as 8888, or 9000:8888 for port 9000 here.",
        )
    return int(given[1]), int(remote)


def _forward(pool: Questions, node: str, remote: int, local: int) -> Forward:
    reported: set[str] = set()

    def report(error: Exception) -> None:
        # A browser tries again and again.
        if str(error) not in reported:
            reported.add(str(error))
            tables.say(f"a connection to port {remote} of {node} was refused: {error}", to_stderr=True)

    return pool.forward(node, remote, local=local, on_failure=report)


def _said(forward: Forward) -> str:
    sent, received = in_words(forward.traffic.sent), in_words(forward.traffic.received)
    broken = f", {forward.broken} of them refused or broken" if forward.broken else ""
    return f"{counted(forward.connections, 'connection')}{broken}; {sent} there, {received} back"


# Jupyter --------------------------------------------------------------------------------------------------------------


@app.command()
def jupyter(
    fleet: Fleet,
    node: OnNode = None,
    profile: OnProfile = None,
    port: Annotated[int, typer.Option(min=0, max=_LARGEST, help="Of this machine; 0 is any.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open it, where a person watches; else its address is printed.")] = True,
) -> None:
    """Run Jupyter on a slot, which is its own until this command ends, and open it in the browser of this machine.

    Its files are those of `sky.files()` of the node, and stay there.
    """

    from skyinfra.client import run_script

    with connected(fleet) as pool, tempfile.TemporaryDirectory(prefix="skyinfra-") as folder:
        shown = _Jupyter(pool, port, Path(folder) if browser and sys.stdout.isatty() else None)
        tables.say(f"waiting for a slot of {pool.manifest.fleet}", to_stderr=True)
        slots, script = pool.select(node=node, profile=profile), Path(serve_jupyter.__file__)
        try:
            code = run_script(slots, script, [FILES_FOLDER], on_line=shown.take)
        finally:
            shown.end()
    if code == serve_jupyter.MISSING:
        raise MissingDependency(
            f"the nodes of {pool.manifest.fleet} have no Jupyter",
            hint='Add it to the declaration of the pool, image=sky.Image(pip=["jupyterlab"]), and deploy. A local '
            "fleet has the packages that this skyinfra has: pip install jupyterlab.",
        )
    raise typer.Exit(exit_code(code))


class _Jupyter:
    """Shows the Jupyter that a slot of *pool* runs, at *port* of this machine; in the browser by way of *folder*."""

    def __init__(self, pool: Pool, port: int, folder: Path | None) -> None:
        self._pool, self._port, self._folder = pool, port, folder
        self._node = ""

    def take(self, stream: str, line: str) -> None:
        """Takes a line of the program's output: what it says for people, or where it listens."""
        found = serve_jupyter.read(line) if stream == "stdout" else None
        if found is None:
            write("stderr", f"{line}\n")
            return
        self._node, remote, path = found
        forward = _forward(self._pool, self._node, remote, self._port)
        # Where its slot dies it starts again on another one, beside the port that led to the first.
        self._port = 0
        address = f"http://{_HERE}:{forward.port}{path}"
        tables.say(f"Jupyter on {self._node} is at {address} until you press Ctrl-C.")
        if self._folder is not None:
            _show(address, self._folder)

    def end(self) -> None:
        """Says what stays."""
        if self._node:
            tables.say(
                f"Jupyter and its kernels end; its files stay on {self._node}, for tasks in sky.files()", to_stderr=True
            )


def _show(address: str, folder: Path) -> None:
    """Opens *address*, which holds a token, in the browser; other accounts see the arguments of programs."""
    page = folder / "jupyter.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">\n', encoding="utf-8")
    page.chmod(0o600)
    webbrowser.open(page.as_uri())
