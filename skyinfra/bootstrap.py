"""Deployment → user data: what Terraform hands to the nodes, with placeholders that it fills.

A local node needs no operating system set up, so its user data is the node configuration itself. A bought machine gets
a cloud-config: files, and one script that installs the runner and starts its services.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import re
import shlex
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import metadata
from typing import TYPE_CHECKING

import skyinfra
from skyinfra import bundled
from skyinfra._errors import NotSupported
from skyinfra.compiler import Deployment
from skyinfra.protocol.nodeconfig import SECRET_PLACEHOLDER, NodeConfig

if TYPE_CHECKING:
    from jinja2 import Environment

# What EC2 takes, before it is encoded; other providers take more.
LIMIT = 16_384
_FOLDER = "/var/lib/skyinfra"
_CONFIG = f"{_FOLDER}/node.json"
_OPT = "/opt/skyinfra"
_SETUP = f"{_OPT}/setup"
_UNITS = "/etc/systemd/system"
_PLACES = {"folder": _FOLDER, "config": _CONFIG, "venv": f"{_OPT}/venv", "tools": f"{_OPT}/tools"}
# Terraform puts a fleet secret of that length in the place of the placeholder.
_SECRET_LENGTH = 72
_HALVES = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
# The client and the workers pickle for each other, so these have to be the same on both sides.
_SAME_VERSIONS = ("cloudpickle", "distributed")


@dataclass(frozen=True)
class UserData:
    """The user data of the head and of the other nodes. No secret stands in it.

    revision: of everything but the layout, which reaches running nodes in place; equal where no node has to be made
    anew. None where the provider decides that itself.
    """

    head: str
    worker: str
    revision: str | None = None


def user_data(deployment: Deployment) -> UserData:
    """The user data of *deployment*; the same bytes for the same Deployment.

    Raises `NotSupported` where it is more than the provider takes.
    """
    if deployment.pool.provider.boots == "node.json":
        return UserData(head=deployment.head.dumps(), worker=deployment.worker.dumps())
    head, worker = (_files(deployment, config) for config in (deployment.head, deployment.worker))
    made = UserData(_cloud_config(head), _cloud_config(worker), revision=_revision(deployment, head, worker))
    for name, text in (("head", made.head), ("worker", made.worker)):
        _check_size(name, text)
    return made


def _revision(deployment: Deployment, *nodes: list[dict[str, str]]) -> str:
    """Of the files of all *nodes* but the layout in their configurations."""
    plain = []
    for config, files in zip((deployment.head, deployment.worker), nodes, strict=True):
        first = {**files[0], "content": _without_layout(config).dumps() + "\n"}
        plain.append(_cloud_config([first, *files[1:]]))
    return hashlib.sha256("\0".join(plain).encode()).hexdigest()[:16]


def sizes(text: str) -> dict[str, int]:
    """Bytes of each file in a node's user data, compressed alone, and of the whole (key ``total``)."""
    import yaml  # only for who asks: a synth needs none

    document = yaml.safe_load(text)
    files = document["write_files"] if isinstance(document, dict) and "write_files" in document else []
    return {**{file["path"]: len(_compressed(file["content"])) for file in files}, "total": len(_compressed(text))}


def _cloud_config(files: list[dict[str, str]]) -> str:
    return _environment().get_template("cloud-config.yaml.j2").render(files=files, setup=_SETUP)


def _files(deployment: Deployment, config: NodeConfig) -> list[dict[str, str]]:
    """Path, mode and content of every file; the first is the node configuration."""
    units = ["skyinfra-partition.service", "skyinfra-partition.path", "skyinfra-runner.service"]
    if config.head:
        units.append("skyinfra-watch.service")
    image, group = deployment.pool.image, deployment.selection.separate_head and not config.head
    setup = _rendered(
        "setup.sh",
        units=tuple(units),
        pool=deployment.pool.name if group else "",
        group=group,
        apt=tuple(image.apt),
        python=image.python or ".".join(platform.python_version_tuple()[:2]),
        requirements=(image.runner or f"skyinfra=={skyinfra.__version__}", *_pins()),
    )
    return [
        {"path": _CONFIG, "mode": "0644", "content": config.dumps() + "\n"},
        {"path": f"{_FOLDER}/{config.secret_file}", "mode": "0600", "content": f"{SECRET_PLACEHOLDER}\n"},
        {"path": _SETUP, "mode": "0755", "content": setup},
        *({"path": f"{_UNITS}/{unit}", "mode": "0644", "content": _rendered(unit)} for unit in units),
    ]


@lru_cache(maxsize=64)
def _rendered(name: str, **values: str | bool | tuple[str, ...]) -> str:
    """A file of a node from its template; the nodes of many pools have most files in common."""
    return _environment().get_template(f"{name}.j2").render(**_PLACES, **values)


@cache
def _pins() -> tuple[str, ...]:
    return tuple(f"{name}=={metadata.version(name)}" for name in _SAME_VERSIONS)


def _without_layout(config: NodeConfig) -> NodeConfig:
    if config.accelerator is None:
        return config
    return replace(config, accelerator=replace(config.accelerator, layouts=()))


def _check_size(name: str, text: str) -> None:
    # The secret does not compress; the placeholder in its place does.
    size = len(_compressed(text)) + _SECRET_LENGTH
    if size > LIMIT:
        largest = sorted(sizes(text).items(), key=lambda item: -item[1])[1:4]
        raise NotSupported(
            f"the user data of the {name} are {size} bytes compressed, of {LIMIT} that are taken",
            field="image",
            hint="The most of it: "
            + ", ".join(f"{path} {length} bytes" for path, length in largest)
            + ". Move what image.run and image.env hold into a package, or an image of your own.",
        )


def _compressed(text: str) -> bytes:
    # Without a time in it, the same text gives the same bytes.
    return gzip.compress(text.encode(), 9, mtime=0)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not for nodes that take a node.json

    environment = Environment(  # noqa: S701 - not HTML
        loader=FileSystemLoader(bundled.folder("templates", "node")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters["yaml"] = quoted
    environment.filters["sh"] = shlex.quote
    return environment


@lru_cache(maxsize=64)
def quoted(value: str) -> str:
    """*value* as a YAML string in double quotes, on one line, whatever it holds."""
    # As JSON, which YAML reads, but for characters that JSON writes in two halves.
    return _HALVES.sub(_whole, json.dumps(value))


def _whole(halves: re.Match[str]) -> str:
    character: str = json.loads(f'"{halves[0]}"')
    return f"\\U{ord(character):08x}"
