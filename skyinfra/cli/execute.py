"""``skyinfra exec | ssh``: a program or a shell on a node."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyinfra.cli.nodes import chosen
from skyinfra.cli.options import CommandWithCommand, Fleet, NodeName, command_of, exit_code
from skyinfra.errors import InvalidField, MissingDependency, NotSupported, did_you_mean
from skyinfra.protocol import questions

if TYPE_CHECKING:
    from skyinfra.protocol.manifest import Manifest, ManifestNode

_WAIT_S = 10.0
_SSH_PORT = 22
_PROBE_S = 3.0


def add_commands(app: typer.Typer) -> None:
    """Adds the commands to *app*."""
    app.command("exec", cls=CommandWithCommand)(execute)
    app.command(cls=CommandWithCommand)(ssh)


def execute(context: typer.Context, fleet: Fleet, node: NodeName = None) -> None:
    """Run a command on a node, the head unless another is named. Its output is streamed and its exit code is ours."""
    from skyinfra.client import ask

    command = command_of(context)
    if not command:
        raise InvalidField("no command", field="CMD", hint="Such as `skyinfra exec STACK/POOL -- nvidia-smi`.")
    with ask(fleet) as pool:
        name = chosen(pool, node or _head(pool.manifest).name)[0]
        identity = pool.ask(name, questions.START, command=command)
        try:
            while True:
                found: dict[str, Any] = pool.ask(
                    name, questions.OUTPUT, wait_s=_WAIT_S + 20, identity=identity, longest_s=_WAIT_S
                )
                for stream, text in found["parts"]:
                    target = sys.stderr if stream == "stderr" else sys.stdout
                    target.write(text)
                    target.flush()
                if found["code"] is not None:
                    break
        except BaseException:
            pool.ask(name, questions.END, identity=identity)
            raise
    raise typer.Exit(exit_code(int(found["code"])))


def ssh(
    context: typer.Context,
    fleet: Fleet,
    node: NodeName = None,
    user: Annotated[
        str | None, typer.Option(help="The user on the node; of the provider's images, or whom ssh takes, by default.")
    ] = None,
) -> None:
    """Open a shell on a node, the head unless another is named: by ssh, or Session Manager where no port is open."""
    from skyinfra.client.lookup import find_manifest
    from skyinfra.providers import kinds, read

    command = command_of(context)
    manifest = find_manifest(fleet)
    if manifest.provider == "local":
        raise NotSupported(
            "the nodes of this fleet are on the machine where it was deployed",
            field=manifest.fleet,
            hint="`skyinfra exec` runs a program beside their runner; here, any shell does.",
        )
    target = _head(manifest) if node is None else _named(manifest, node)
    if manifest.provider == "container":
        raise NotSupported(
            "a container has no SSH server",
            field=target.name,
            hint=f"On its host: `docker exec -it {target.id} bash`, or the same with podman. `skyinfra exec` runs a "
            "program beside its runner.",
        )
    if user is None and target.ssh is None and manifest.provider in kinds():
        user = read(manifest.provider).traits.ssh_user
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


def ssh_line(manifest: Manifest, node: ManifestNode, command: Sequence[str], *, user: str | None) -> list[str] | None:
    """Returns the ``ssh`` command, through the head where only the head can be reached; None where no port answers.

    user: None or empty is whom ``ssh`` takes.
    """
    user = user or (node.ssh.user if node.ssh else None)
    at, options = f"{user}@" if user else "", node.ssh.options if node.ssh else []
    remote = ["--", shlex.join(command)] if command else []
    terminal = ["-t"] if command and sys.stdin.isatty() else []
    # A host may have another port, or a name that the configuration of ssh alone knows.
    if node.ssh is not None or _answers(node.public_address or node.address):
        return ["ssh", *terminal, *options, f"{at}{node.public_address or node.address}", *remote]
    head = _head(manifest)
    if node != head and head.public_address and _answers(head.public_address):
        return ["ssh", *terminal, "-J", f"{at}{head.public_address}", f"{at}{node.address}", *remote]
    return None


def session_line(manifest: Manifest, node: ManifestNode, command: Sequence[str]) -> list[str] | None:
    """Returns the ``aws ssm start-session`` command; None for another provider."""
    if manifest.provider != "aws" or not node.id:
        return None
    # A zone is its region with a letter.
    region = ["--region", node.zone[:-1]] if node.zone else []
    remote = (
        ["--document-name", "AWS-StartInteractiveCommand", "--parameters", f"command={shlex.join(command)}"]
        if command
        else []
    )
    return ["aws", "ssm", "start-session", "--target", node.id, *region, *remote]


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
        import socket

        socket.create_connection((address, _SSH_PORT), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True
