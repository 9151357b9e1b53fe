"""Deployment → user data: what Terraform hands to the nodes, with placeholders that it fills.

A local node needs no operating system set up, so its user data is the node configuration itself. A cloud node gets
files and a program that does the steps of its first boot (`steps`), as a cloud-config where there is cloud-init, as a
startup script or as the entry of a container elsewhere (`files`).
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

import skyinfra
from skyinfra.bootstrap import files, places, steps
from skyinfra.bootstrap.files import FORMS, Form
from skyinfra.bootstrap.quoting import quoted
from skyinfra.bootstrap.steps import carries_runner
from skyinfra.compiler import Deployment
from skyinfra.errors import NotSupported
from skyinfra.protocol.nodeconfig import NodeConfig

__all__ = ["FORMS", "LIMIT", "Form", "UserData", "carries_runner", "converted", "quoted", "sizes", "user_data"]

# The limit of EC2, before encoding; other providers take more.
LIMIT = 16_384
# Terraform puts a fleet secret of that length in the place of the placeholder, and an address of that length, about,
# in that of the runner's.
_SECRET_LENGTH = 72
_ADDRESS_LENGTH = 100
_FORMS: dict[str, Form] = {"cloud-init": "cloud-config", "script": "script", "container": "container"}


@dataclass(frozen=True)
class UserData:
    """The user data of the head and of the other nodes. No secret stands in it.

    revision: of what is declared, but for the layout, which reaches running nodes in place; equal where no node has
    to be made anew. None where the provider decides that itself.
    """

    head: str
    worker: str
    revision: str | None = None


def user_data(deployment: Deployment) -> UserData:
    """The user data of *deployment*; the same bytes for the same Deployment.

    Raises `NotSupported` where it is more than the provider takes.
    """
    boots = deployment.pool.provider.boots
    if boots == "node.json":
        return UserData(head=deployment.head.dumps(), worker=deployment.worker.dumps())
    form = _FORMS[boots]
    found = [files.files(deployment, config) for config in (deployment.head, deployment.worker)]
    head, worker = (files.render(each, form) for each in found)
    for name, text in (("head", head), ("worker", worker)):
        _check_size(name, text)
    return UserData(head, worker, _revision(deployment))


def _revision(deployment: Deployment) -> str:
    """Returns the hash of the declaration without the layout, and of the versions that client and workers share.

    The code that sets a node up is left out: a node that took a week to get is not replaced for a repaired step.
    """
    declared = [skyinfra.__version__]
    for config in (deployment.head, deployment.worker):
        plain = _without_layout(config)
        declared += [plain.dumps(), *steps.declared(deployment, plain)]
    return hashlib.sha256("\0".join(declared).encode()).hexdigest()[:16]


def converted(text: str, form: Form) -> str:
    """The cloud-config *text* in another form. Raises `InvalidField` where it is none."""
    return files.render(files.read(text), form)


def sizes(text: str) -> dict[str, int]:
    """Bytes of each file in a node's user data, compressed alone, and of the whole (key ``total``)."""
    found = files.read(text) if text.startswith("#cloud-config\n") else []
    return {**{file.path: len(_compressed(file.content)) for file in found}, "total": len(_compressed(text))}


def _without_layout(config: NodeConfig) -> NodeConfig:
    if config.accelerator is None:
        return config
    return replace(config, accelerator=replace(config.accelerator, layouts=()))


def _check_size(name: str, text: str) -> None:
    # User data that fit when compressed fast, in two parts, fit. The second is the same for the nodes of many pools.
    own, mark, common = text.partition(places.PROGRAM)
    hasty = _hasty_size(own) + _hasty_size(mark + common)
    if hasty + _SECRET_LENGTH + _ADDRESS_LENGTH <= LIMIT:
        return
    # The secret does not compress; the placeholder in its place does.
    size = len(_compressed(text)) + _SECRET_LENGTH + _ADDRESS_LENGTH
    if size > LIMIT:
        largest = sorted(sizes(text).items(), key=lambda item: -item[1])[1:4]
        raise NotSupported(
            f"the user data of the {name} are {size} bytes compressed, of {LIMIT} that are taken",
            field="image",
            hint="The most of it: "
            + ", ".join(f"{path} {length} bytes" for path, length in largest)
            + ". Move what image.run and image.env hold into a package, or an image of your own.",
        )


@lru_cache(maxsize=8)
def _hasty_size(text: str) -> int:
    return len(gzip.compress(text.encode(), 1, mtime=0))


def _compressed(text: str) -> bytes:
    # Without a time in it, the same text gives the same bytes.
    return gzip.compress(text.encode(), 9, mtime=0)
