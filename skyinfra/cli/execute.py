"""``skyinfra exec | ssh | put | get``: a program, a shell or files on a node, or the names of all nodes for ``ssh``."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from skyinfra.blobs import copies
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
from skyinfra.console import unread
from skyinfra.errors import InvalidField, MissingDependency, NotSupported, counted, did_you_mean
from skyinfra.protocol import questions
from skyinfra.protocol.manifest import Manifest, ManifestNode
from skyinfra.providers import kinds, read
from skyinfra.ssh import hosts, ways
from skyinfra.sync import bringing
from skyinfra.terminal import tables
from skyinfra.terminal.progress import asked, working
from skyinfra.terraform.project import Project

_WAIT_S = 10.0


app = typer.Typer()


@app.command("exec", cls=CommandWithCommand)
def execute(context: typer.Context, fleet: Fleet, node: NodeName = None) -> None:
    """Run a command on a node, the head unless another is named. Its output is streamed and its exit code is ours."""
    command = command_of(context)
    if not command:
        raise InvalidField("no command", field="CMD", hint="Such as `skyinfra exec STACK/POOL -- nvidia-smi`.")
    if unread():
        tables.say("CMD does not get the standard input: `skyinfra put` brings files to a node.", to_stderr=True)
    with asked(fleet) as pool:
        name = pool.named(node or ways.head_of(pool.manifest).name, "NODE")[0]
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
    target = ways.head_of(manifest) if node is None else _named(manifest, node)
    _refuse_without_server(manifest, target)
    if user is None and target.ssh is None and manifest.provider in kinds():
        user = read(manifest.provider).traits.ssh_user
    if config:
        _name_hosts(fleet, manifest, user, replace=replace)
        return
    line = ways.ssh_line(manifest, target, command, user=user) or ways.session_line(manifest, target, command)
    if line is None:
        raise NotSupported(
            f"nothing answers at port {ways.PORT} of {target.public_address or target.address}",
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
    with (
        asked(fleet) as pool,
        errors_name_options(),
        working(f"put {path} on {counted(len(pool.named(node)), 'node')}"),
    ):
        name, nodes = pool.put_on(path, remote, node)
    if as_json:
        tables.print_document({"remote": name, "nodes": nodes})
    else:
        tables.say(f"{path} is {name} on {', '.join(nodes)}")


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
            tables.say(line)
        if not brought:
            tables.say(f"no such files of {found.name} are kept: `run --detach --fetch PATTERN` keeps some")
        if written is not None and (written.left_count or written.problem):
            tables.say(f"{found.name}: {copies.summary(written)}", to_stderr=True)
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


def _named(manifest: Manifest, name: str) -> ManifestNode:
    for node in manifest.nodes:
        if node.name == name:
            return node
    names = [node.name for node in manifest.nodes]
    hint = did_you_mean(name, names) or f"Nodes: {', '.join(names)}."
    if manifest.has_group:
        hint += " Those of a group have no fixed address; `skyinfra exec` reaches them."
    raise InvalidField(
        f"the manifest of {manifest.fleet} has no node of that name", field="NODE", given=name, hint=hint
    )


def _name_hosts(fleet: str, manifest: Manifest, user: str | None, *, replace: bool) -> None:
    """Makes the nodes hosts of ssh, prints their names, and says what is left out."""
    origin = str(Path(fleet).absolute() if fleet.endswith(".json") else Project.find().folder)
    found = ways.ways(manifest, user)
    names, file = hosts.write_hosts(origin, manifest, found, replace=replace), hosts.file()
    sys.stdout.writelines(f"{name}\n" for name in names)
    tables.say(
        f"{counted(len(names), 'host')} in {file}; `ssh {names[0]}`, rsync, scp and editors know them", to_stderr=True
    )
    with contextlib.suppress(KeyError):
        if Path.home() != Path(pwd.getpwuid(os.getuid()).pw_dir):
            tables.say(
                f"HOME is not the home of this account, where ssh looks: ssh -F {file.parent}/config", to_stderr=True
            )
    if left := [name for name, way in found.items() if way is None]:
        tables.say(f"left out, for nothing answers at their port 22: {', '.join(left)}", to_stderr=True)
    if manifest.has_group:
        tables.say(
            "the nodes of the group have no fixed address: `skyinfra exec` and `port-forward` reach them",
            to_stderr=True,
        )
