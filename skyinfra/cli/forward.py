"""``skyinfra port-forward | open``, and the hosts of ``skyinfra ssh --config``: nodes as programs of this machine see
them."""

from __future__ import annotations

import contextlib
import fcntl
import html
import json
import os
import pwd
import re
import shlex
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyinfra.blobs.store import in_words
from skyinfra.cli.options import Fleet, OnNode, OnProfile, exit_code, write
from skyinfra.errors import InvalidField, InvalidManifest, MissingDependency, NotSupported, counted
from skyinfra.notebook import serve_jupyter
from skyinfra.program.views import FILES_FOLDER
from skyinfra.protocol.manifest import Login, Manifest
from skyinfra.terminal.progress import asked, connected
from skyinfra.terraform.project import Project

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
            sys.stdout.write(f"{_HERE}:{forward.port} is port {remote} of {name} until you press Ctrl-C.\n")
        sys.stdout.flush()
        try:
            while True:
                time.sleep(_POLL_S)
        finally:
            for forward, remote in forwards:
                sys.stderr.write(f"{_HERE}:{forward.port} to port {remote} of {name}: {_said(forward)}\n")


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
            sys.stderr.write(f"a connection to port {remote} of {node} was refused: {error}\n")

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
        sys.stderr.write(f"waiting for a slot of {pool.manifest.fleet}\n")
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
        sys.stdout.write(f"Jupyter on {self._node} is at {address} until you press Ctrl-C.\n")
        sys.stdout.flush()
        if self._folder is not None:
            _show(address, self._folder)

    def end(self) -> None:
        """Says what stays."""
        if self._node:
            sys.stderr.write(f"Jupyter and its kernels end; its files stay on {self._node}, for tasks in sky.files()\n")


def _show(address: str, folder: Path) -> None:
    """Opens *address*, which holds a token, in the browser; other accounts see the arguments of programs."""
    page = folder / "jupyter.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">\n', encoding="utf-8")
    page.chmod(0o600)
    webbrowser.open(page.as_uri())


# Hosts ----------------------------------------------------------------------------------------------------------------
# What stands in them comes from a manifest: ssh runs programs that its configuration names.

_FILE = "skyinfra.config"
_HEAD = "# Written by `skyinfra ssh STACK/POOL --config`; what is changed here does not stay.\n"
_MARK = "#skyinfra "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WORD = re.compile(r"[A-Za-z0-9_.:\[][A-Za-z0-9_.:@,\[\]+=-]*")
_PATH = re.compile(r'[^"\\\x00-\x1f\x7f]+')
_PROXY = re.compile(r"([A-Za-z0-9_.:/=-]|%p)+")


@dataclass(frozen=True)
class Way:
    """The address of a node for ``ssh``, how to log in, and the program through which it connects, if not by itself."""

    address: str
    login: Login
    proxy: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Section:
    """The hosts of one fleet. origin: its project's folder, or its manifest."""

    fleet: str
    origin: str
    text: str

    @property
    def names(self) -> set[str]:
        return {line.split()[1] for line in self.text.splitlines() if line.startswith("Host ")}

    def __str__(self) -> str:
        return f"{_MARK}{json.dumps({'fleet': self.fleet, 'origin': self.origin})}\n{self.text}"


def write_hosts(fleet: str, manifest: Manifest, ways: Mapping[str, Way | None], *, replace: bool) -> None:
    """Writes the nodes of *manifest*, reached by *ways*, as hosts of ``ssh`` in place of those that the fleet had.

    fleet: as it was named on the command line. replace: takes names that another project has. Raises `InvalidField`
    where one has them, `InvalidManifest` for what cannot stand there, `NotSupported` where no node is reached.
    """
    reached = {name: way for name, way in ways.items() if way is not None}
    if not reached:
        raise NotSupported(
            "nothing answers at port 22 of its nodes",
            field=manifest.fleet,
            hint="Open it to your address (ssh_public_key and allow_cidrs), or use `skyinfra exec` and `skyinfra "
            "port-forward`, which need none.",
        )
    hosts = {f"{manifest.stack}-{manifest.pool}-{name}": _host(manifest, name, way) for name, way in reached.items()}
    new = _Section(manifest.fleet, _origin(fleet), "".join(hosts.values()))
    folder = Path.home() / ".ssh"
    with _changing(folder):
        file = folder / _FILE
        kept = []
        for each in _sections(file):
            if (each.fleet, each.origin) == (new.fleet, new.origin):
                continue
            taken = sorted(each.names & new.names)
            if not taken:
                kept.append(each)
            elif Path(each.origin).exists() and not replace:
                raise InvalidField(
                    f"{each.fleet} of {each.origin} has hosts of these names",
                    field="--config",
                    given=taken[0],
                    hint=f"--replace takes them from it; another name of the stack, or of the pool, keeps both. {file} "
                    "has them.",
                )
        _replace(file, (_HEAD + "".join(map(str, [*kept, new]))).encode(), 0o600)
        _include(folder / "config", file)
    _print_hosts(manifest, list(hosts), [name for name, way in ways.items() if way is None], file)


def forget_hosts(folder: Path, stack: str) -> None:
    """Removes the hosts of *stack* of the project in *folder*."""
    file = Path.home() / ".ssh" / _FILE
    if not file.is_file():
        return
    try:
        with _changing(file.parent):
            found = _sections(file)
            kept = [each for each in found if each.origin != str(folder) or each.fleet.partition("/")[0] != stack]
            if kept != found:
                _replace(file, (_HEAD + "".join(map(str, kept))).encode(), 0o600)
    except NotSupported as error:
        sys.stderr.write(f"the hosts of {stack} stay in {file}: {error}\n")


def _print_hosts(manifest: Manifest, hosts: list[str], left: list[str], file: Path) -> None:
    for host in hosts:
        sys.stdout.write(f"{host}\n")
    sys.stderr.write(f"{counted(len(hosts), 'host')} in {file}; `ssh {hosts[0]}`, rsync, scp and editors know them\n")
    with contextlib.suppress(KeyError):
        if Path.home() != Path(pwd.getpwuid(os.getuid()).pw_dir):
            sys.stderr.write(f"HOME is not the home of this account, where ssh looks: ssh -F {file.parent}/config\n")
    if left:
        sys.stderr.write(f"left out, for nothing answers at their port 22: {', '.join(left)}\n")
    if manifest.group_nodes:
        sys.stderr.write(
            "the nodes of the group have no fixed address: `skyinfra exec` and `port-forward` reach them\n"
        )


def _origin(fleet: str) -> str:
    return str(Path(fleet).absolute() if fleet.endswith(".json") else Project.find().folder)


def _host(manifest: Manifest, node: str, way: Way) -> str:
    """Returns the lines of one host. Raises `InvalidManifest`."""
    login = way.login
    given: list[tuple[str, object, re.Pattern[str]]] = [
        ("HostName", way.address, _WORD),
        ("User", login.user, _WORD),
        ("Port", login.port, _WORD),
        ("IdentityFile", login.key_file, _PATH),
        ("ProxyJump", login.via, _WORD),
    ]
    lines = [f"Host {_checked(_NAME, f'{manifest.stack}-{manifest.pool}-{node}', node)}"]
    for option, value, pattern in given:
        if value:
            text = _checked(pattern, str(value), node)
            lines.append(f'    {option} "{text}"' if pattern is _PATH else f"    {option} {text}")
    if way.proxy:
        lines.append(f"    ProxyCommand {shlex.join(_checked(_PROXY, word, node) for word in way.proxy)}")
    return "\n".join([*lines, "", ""])


def _checked(pattern: re.Pattern[str], text: str, node: str) -> str:
    if not pattern.fullmatch(text):
        raise InvalidManifest(
            "cannot stand in the configuration of ssh",
            field=f"manifest.nodes.{node}",
            given=text,
            hint="Names, addresses and users are letters, digits and `.:@_-` there.",
        )
    return text


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Holds *folder*, which is made where it is not there, for one process that writes into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise NotSupported(
            f"cannot be written: {error.strerror or error}", field=str(error.filename or folder)
        ) from None
    finally:
        os.close(handle)


def _sections(file: Path) -> list[_Section]:
    if not file.exists():
        return []
    found = []
    for part in f"\n{file.read_text(encoding='utf-8')}".split(f"\n{_MARK}")[1:]:
        mark, _, text = part.partition("\n")
        # One that somebody has changed is not kept.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            about = json.loads(mark)
            found.append(_Section(str(about["fleet"]), str(about["origin"]), text.rstrip("\n") + "\n\n"))
    return found


def _include(config: Path, file: Path) -> None:
    """Includes *file* at the top of *config*: below a host it would be that host's."""
    line = f'Include "{file}"'.encode()
    before = config.read_bytes() if config.exists() else b""
    if line not in before.splitlines():
        mode = config.stat().st_mode & 0o777 if config.exists() else 0o600
        _replace(config, line + b"\n" + before, mode)


def _replace(file: Path, data: bytes, mode: int) -> None:
    # Where it is a link, such as into a folder of dotfiles, the link stays.
    file = Path(os.path.realpath(file))
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
