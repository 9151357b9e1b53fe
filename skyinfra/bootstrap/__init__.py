"""Deployment → user data: what Terraform hands to the nodes, with placeholders that it fills.

A local node needs no operating system set up, so its user data is the node configuration itself. A cloud node gets
files and a program that does the steps of its first boot (`steps`), as a cloud-config where there is cloud-init, as a
startup script or as the entry of a container elsewhere (`files`).
"""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from skyinfra.bootstrap import files, places, runner_wheel, steps
from skyinfra.bootstrap.files import FORMS, Form
from skyinfra.bootstrap.quoting import quoted
from skyinfra.bootstrap.steps import carries_runner
from skyinfra.compiler import Deployment, revision
from skyinfra.errors import NotSupported
from skyinfra.providers import Boot

__all__ = ["FORMS", "Form", "UserData", "carries_runner", "converted", "quoted", "sizes", "user_data"]

# About what the addresses that Terraform puts in the place of placeholders add.
_ADDRESS_LENGTH = 100


@dataclass(frozen=True)
class UserData:
    """The user data of the head and of the other nodes. No secret stands in it, and no version of a package.

    revision: see `revision`; None where the provider decides itself what is made anew. versions: what the nodes of a
    fleet that is made now install, for the module; None where they install nothing.
    """

    head: str
    worker: str
    revision: str | None = None
    versions: dict[str, Any] | None = None


def user_data(deployment: Deployment) -> UserData:
    """Returns the user data of *deployment*; the same bytes for the same Deployment.

    Raises `NotSupported` where it is more than the provider takes, or where nobody brings the runner.
    """
    boot = deployment.pool.provider.data.boot
    if boot.delivery == "index":
        _check_runner(deployment)
    if boot.form == "node.json":
        return UserData(head=deployment.head.dumps(), worker=deployment.worker.dumps())
    configs = (deployment.head, deployment.worker)
    head, worker = (files.render(files.files(deployment, each), boot.form, config=each) for each in configs)
    for name, text in (("head", head), ("worker", worker)):
        _check_size(name, text, boot)
    return UserData(head, worker, revision(deployment), steps.versions())


def converted(text: str, form: Form) -> str:
    """Returns the cloud-config *text* in another form. Raises `InvalidField` where it is none."""
    return files.render(files.read(text), form)


def sizes(text: str) -> dict[str, int]:
    """Bytes of each file in a node's user data, compressed alone, and of the whole (key ``total``)."""
    found = files.read(text) if text.startswith("#cloud-config\n") else []
    return {**{file.path: len(_compressed(file.content)) for file in found}, "total": len(_compressed(text))}


def _check_runner(deployment: Deployment) -> None:
    """Raises `NotSupported` where the nodes, to which nothing is brought, are not told where the runner is."""
    runner = deployment.pool.image.runner
    if runner is None or not re.fullmatch(steps.PINNED, runner):
        wheel = runner_wheel.wheel()
        raise NotSupported(
            f"a node of {deployment.pool.provider.data.about.called} fetches the runner itself, and needs its address "
            "and its hash",
            field="image.runner",
            given=runner,
            hint="`skyinfra render --runner DIR` writes the runner of this skyinfra. Put it where the nodes reach it, "
            f'and declare image=sky.Image(runner="https://HOST/{wheel.name}#sha256={wheel.sha256}"). A released '
            "skyinfra is a runner too: its page on PyPI says address and hash of the wheel.",
        )


def _check_size(name: str, text: str, boot: Boot) -> None:
    if boot.limit is None:
        return
    if not boot.gzip:
        _refuse_larger(name, text, len(text.encode()) + _ADDRESS_LENGTH, boot)
        return
    # User data that fit when compressed fast, in two parts, fit. The second is the same for the nodes of many pools.
    own, mark, common = text.partition(places.PROGRAM)
    hasty = _hasty_size(own) + _hasty_size(mark + common)
    if hasty + _ADDRESS_LENGTH > boot.limit:
        _refuse_larger(name, text, len(_compressed(text)) + _ADDRESS_LENGTH, boot)


def _refuse_larger(name: str, text: str, size: int, boot: Boot) -> None:
    if size > (boot.limit or size):
        packed = " compressed" if boot.gzip else ""
        largest = sorted(sizes(text).items(), key=lambda item: -item[1])[1:4]
        raise NotSupported(
            f"the user data of the {name} are {size} bytes{packed}, of {boot.limit} that are taken",
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
