"""``skyinfra exec | ssh | put | get``: a program, a shell or files on a node, or the names of all nodes for ``ssh``."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Annotated, Any

import typer

from skyinfra.blobs import copies
from skyinfra.cli.forward import Way, write_hosts
from skyinfra.cli.options import (
    CommandWithCommand,
    Fleet,
    JobName,
    Json,
    NodeName,
    OnlyNode,
    command_of,
    errors_name_options,
    exit_code,
    write,
)
from skyinfra.errors import InvalidField, MissingDependency, NotSupported, counted, did_you_mean
from skyinfra.protocol import questions
from skyinfra.protocol.manifest import Login, Manifest, ManifestNode
from skyinfra.providers import kinds, read
from skyinfra.sync import bringing
from skyinfra.terminal import tables
from skyinfra.terminal.progress import asked, working

_WAIT_S = 10.0
_SSH_PORT = 22
_PROBE_S = 3.0
_PROBES = 32
_STDIO = ("--listen-on-stdin", "--verbosity=warning")


app = typer.Typer()


@app.command("exec", cls=CommandWithCommand)
def execute(context: typer.Context, fleet: Fleet, node: NodeName = None) -> None:
    """Run a command on a node, the head unless another is named. Its output is streamed and its exit code is ours."""
    command = command_of(context)
    if not command:
        raise InvalidField("no command", field="CMD", hint="Such as `skyinfra exec STACK/POOL -- nvidia-smi`.")
    with asked(fleet) as pool:
        name = pool.named(node or _head(pool.manifest).name, "NODE")[0]
        identity = pool.ask(name, questions.START, command=command)
        try:
            while True:
                found: dict[str, Any] = pool.ask(
                    name, questions.OUTPUT, wait_s=_WAIT_S + 20, identity=identity, longest_s=_WAIT_S
                )
                for stream, text in found["parts"]:
                    write(stream, text)
                if found["code"] is not None:
                    break
        except BaseException:
            pool.ask(name, questions.END, identity=identity)
            raise
    raise typer.Exit(exit_code(int(found["code"])))


@app.command(cls=CommandWithCommand)
def ssh(
    context: typer.Context,
    fleet: Fleet,
    node: NodeName = None,
    user: Annotated[
        str | None, typer.Option(help="The user on the node; of the provider's images, or whom ssh takes, by default.")
    ] = None,
    config: Annotated[
        bool, typer.Option("--config", help="Name all nodes STACK-POOL-NODE for ssh, rsync and editors, and end.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="With --config: take names that others have.")] = False,
) -> None:
    """Open a shell on a node, the head unless another is named: by ssh, or Session Manager where no port is open."""
    from skyinfra.client.lookup import find_manifest

    command = command_of(context)
    if config and (node or command):
        raise InvalidField("names all nodes and opens no shell: leave NODE and CMD out", field="--config")
    if replace and not config:
        raise InvalidField("needs --config", field="--replace")
    manifest = find_manifest(fleet)
    target = _head(manifest) if node is None else _named(manifest, node)
    _refuse_without_server(manifest, target)
    if user is None and target.ssh is None and manifest.provider in kinds():
        user = read(manifest.provider).traits.ssh_user
    if config:
        write_hosts(fleet, manifest, _ways(manifest, user), replace=replace)
        return
    line = ssh_line(manifest, target, command, user=user) or session_line(manifest, target, command)
    if line is None:
        raise NotSupported(
            f"nothing answers at port {_SSH_PORT} of {target.public_address or target.address}",
            field=target.name,
            hint="Open it to your address (ssh_public_key and allow_cidrs), or use `skyinfra exec`, which needs none.",
        )
    if shutil.which(line[0]) is None:
        what = "OpenSSH's client" if line[0] == "ssh" else "the AWS CLI and its Session Manager plugin"
        raise MissingDependency(f"{line[0]} is not installed: install {what}")
    sys.stdout.flush()
    os.execvp(line[0], line)  # noqa: S606 - the terminal is ssh's from here on


@app.command()
def put(
    fleet: Fleet,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file or a folder of this machine.")],
    remote: Annotated[
        str | None, typer.Argument(metavar="REMOTE", help="Its path there; the last part of PATH, if not given.")
    ] = None,
    node: OnlyNode = None,
    as_json: Json = False,
) -> None:
    """Copy a file or a folder to the nodes, below sky.files() of tasks. What they have already is not sent again."""
    with asked(fleet) as pool, errors_name_options():
        nodes = pool.node_names() if node is None else [node]
        with working(f"put {path} on {counted(len(nodes), 'node')}"):
            name = pool.put(path, remote, node)
    if as_json:
        tables.print_document({"remote": name, "nodes": nodes})
    else:
        sys.stdout.write(f"{path} is {name} on {', '.join(nodes)}\n")


@app.command()
def get(
    fleet: Fleet,
    remote: Annotated[str, typer.Argument(metavar="REMOTE", help="A file or a folder below sky.files() of a node.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Where to; a folder that exists takes it in.")] = Path(),
    node: OnlyNode = None,
    as_json: Json = False,
) -> None:
    """Copy a file or a folder from a node: what tasks wrote below sky.files(), or what was put there."""
    with asked(fleet) as pool, errors_name_options(), working(f"get {remote}"):
        found = pool.get(remote, path, node)
    if as_json:
        tables.print_document({"path": str(found)})
    else:
        sys.stdout.write(f"{found}\n")


@app.command()
def fetch(
    fleet: Fleet,
    job: JobName,
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that they come to.")] = Path(),
    pattern: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only these, as in a .gitignore.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring the files that a script wrote, and that `run --detach --fetch` kept. Files that changed here stay."""
    with asked(fleet) as pool, errors_name_options():
        found = pool.job(job)
        with working(f"fetch the files of {found.name}"):
            brought, written = found.brought(path, pattern or ()), found.info().written
    if as_json:
        files = [{"path": each.path, "size": each.size, "how": each.how} for each in brought]
        tables.print_document({"folder": str(path.absolute()), "files": files})
    else:
        for line in bringing.sentences(brought, path.absolute()):
            sys.stdout.write(f"{line}\n")
        if not brought:
            sys.stdout.write(f"no such files of {found.name} are kept: `run --detach --fetch PATTERN` keeps some\n")
        if written is not None and (written.left_count or written.problem):
            sys.stderr.write(f"{found.name}: {copies.summary(written)}\n")
    if not brought or any(each.how == "refused" for each in brought):
        raise typer.Exit(1)


def _refuse_without_server(manifest: Manifest, target: ManifestNode) -> None:
    if manifest.provider == "local":
        raise NotSupported(
            "the nodes of this fleet are on the machine where it was deployed",
            field=manifest.fleet,
            hint="`skyinfra exec` runs a program beside their runner; here, any shell does.",
        )
    if manifest.provider == "container":
        raise NotSupported(
            "a container has no SSH server",
            field=target.name,
            hint=f"On its host: `docker exec -it {target.id} bash`, or the same with podman. `skyinfra exec` runs a "
            "program beside its runner.",
        )


def ssh_line(manifest: Manifest, node: ManifestNode, command: Sequence[str], *, user: str | None) -> list[str] | None:
    """Returns the ``ssh`` command, through the head where only the head can be reached; None where nothing leads there.

    user: None or empty is whom ``ssh`` takes. On AWS Session Manager needs no SSH server: see `session_line`.
    """
    way = _open_way(manifest, node, user)
    if way is None and manifest.provider != "aws":
        way = _by_the_cloud(manifest, node, user)
    if way is None:
        return None
    at = f"{way.login.user}@" if way.login.user else ""
    remote = [shlex.join(command)] if command else []
    terminal = ["-t"] if command and sys.stdin.isatty() else []
    proxy = ["-o", f"ProxyCommand={shlex.join(way.proxy)}"] if way.proxy else []
    # Behind the dashes is neither an option, and ssh takes no dashes out of the command there.
    return ["ssh", *terminal, *way.login.options, *proxy, "--", f"{at}{way.address}", *remote]


def _open_way(manifest: Manifest, node: ManifestNode, user: str | None) -> Way | None:
    known = node.ssh or Login()
    user = user or known.user
    # A host may have another port, or a name that the configuration of ssh alone knows.
    if node.ssh is not None or _answers(node.public_address or node.address):
        return Way(node.public_address or node.address, replace_fields(known, user=user))
    head = _head(manifest)
    if node != head and head.public_address and _answers(head.public_address):
        return Way(node.address, Login(user, via=f"{user}@{head.public_address}" if user else head.public_address))
    return None


def _ways(manifest: Manifest, user: str | None) -> dict[str, Way | None]:
    """Returns how ``ssh`` reaches each node; None for one that it does not."""

    def way(node: ManifestNode) -> Way | None:
        return _open_way(manifest, node, user) or _by_the_cloud(manifest, node, user)

    # Each waits for an answer.
    with ThreadPoolExecutor(_PROBES) as threads:
        return dict(zip((node.name for node in manifest.nodes), threads.map(way, manifest.nodes), strict=True))


def _by_the_cloud(manifest: Manifest, node: ManifestNode, user: str | None) -> Way | None:
    """Returns the way to a node without an open port: through what leads to its head, where something does."""
    via, login = manifest.via, Login(user)
    if via is not None and via.kind == "ssh":
        return Way(node.address, Login(user, via=f"{via.target}:{via.port}" if via.port else via.target))
    if via is not None and via.kind == "iap":
        place = [
            *([f"--zone={node.zone}"] if node.zone else []),
            *([f"--project={via.project}"] if via.project else []),
        ]
        return Way(node.name, login, ("gcloud", "compute", "start-iap-tunnel", node.name, "%p", *_STDIO, *place))
    line = session_line(manifest, node, ())
    if line is None:
        return None
    return Way(node.id, login, (*line, "--document-name", "AWS-StartSSHSession", "--parameters", "portNumber=%p"))


def session_line(manifest: Manifest, node: ManifestNode, command: Sequence[str]) -> list[str] | None:
    """Returns the ``aws ssm start-session`` command; None for another provider."""
    if manifest.provider != "aws" or not node.id:
        return None
    # A zone is its region with a letter.
    region = [f"--region={node.zone[:-1]}"] if node.zone else []
    remote = (
        ["--document-name", "AWS-StartInteractiveCommand", "--parameters", f"command={shlex.join(command)}"]
        if command
        else []
    )
    return ["aws", "ssm", "start-session", f"--target={node.id}", *region, *remote]


def _head(manifest: Manifest) -> ManifestNode:
    return next((node for node in manifest.nodes if node.head), manifest.nodes[0])


def _named(manifest: Manifest, name: str) -> ManifestNode:
    for node in manifest.nodes:
        if node.name == name:
            return node
    names = [node.name for node in manifest.nodes]
    hint = did_you_mean(name, names) or f"Nodes: {', '.join(names)}."
    if manifest.group_nodes:
        hint += " Those of a group have no fixed address; `skyinfra exec` reaches them."
    raise InvalidField(
        f"the manifest of {manifest.fleet} has no node of that name", field="NODE", given=name, hint=hint
    )


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, _SSH_PORT), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True
