"""The resources in a Terraform state, and the files that states of this machine stand in."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shlex
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyinfra.errors import ProjectError, StateNotSaved

# The version of the state's format, since Terraform 0.12: https://developer.hashicorp.com/terraform/language/state
_FORMAT = 4


# Between the name of a pool, which has no underscore, and that of one of its places, in the name of a module.
BETWEEN = "__"


@dataclass(frozen=True)
class Resource:
    """A resource that exists.

    module: the module of its pool, which is named like the pool; "" for one of the stack itself. place: that the module
    is of, where its name has one behind that of the pool, as for one of several places. provider: the
    configuration of its Terraform provider, as the state names it. attributes: may hold secrets. tainted: whether its
    creation has failed. key: of `for_each` or `count`. inside: the module that the pool's calls for it, such as
    ``module.hosts``; "" for one of its own.
    """

    module: str
    type: str
    name: str
    provider: str
    attributes: Mapping[str, Any]
    tainted: bool = False
    key: str | int | None = None
    inside: str = ""
    place: str = ""

    @property
    def call(self) -> str:
        """The name of the module, with that of the place."""
        return f"{self.module}{BETWEEN}{self.place}" if self.place else self.module

    @property
    def address(self) -> str:
        """The name of the resource in a plan."""
        module = f"module.{self.call}." if self.module else ""
        inside = f"{self.inside}." if self.inside else ""
        return f"{module}{inside}{self.type}.{self.name}{'' if self.key is None else f'[{json.dumps(self.key)}]'}"


def read_state(text: str, *, source: object) -> tuple[Resource, ...]:
    """Returns the resources in the state *text*, none where it is empty. Raises `ProjectError`, naming *source*."""
    if not text.strip():
        return ()
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("version") != _FORMAT:
        raise ProjectError(
            f"is no Terraform state of version {_FORMAT}: it is damaged, encrypted, or of another version of Terraform",
            field=str(source),
        )
    return tuple(_resources(document.get("resources") or ()))


def _resources(entries: Iterable[Mapping[str, Any]]) -> Iterable[Resource]:
    for entry in entries:
        if entry.get("mode") != "managed":
            continue
        module, _, inside = entry.get("module", "").removeprefix("module.").partition(".module.")
        module, _, place = module.partition(BETWEEN)
        for instance in entry.get("instances", ()):
            yield Resource(
                module=module,
                inside=inside and f"module.{inside}",
                place=place,
                type=entry["type"],
                name=entry["name"],
                provider=entry.get("provider", ""),
                attributes=instance.get("attributes") or {},
                tainted=instance.get("status") == "tainted",
                key=instance.get("index_key"),
            )


def read_outputs_file(file: Path) -> dict[str, Any]:
    """Returns the outputs in a state file, sensitive ones too; none where it cannot be read. Asks no Terraform."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = document.get("outputs") if isinstance(document, dict) else None
    return {name: each.get("value") for name, each in (found or {}).items() if isinstance(each, dict)}


def keep_private(file: Path, *, create: bool = False) -> None:
    """Lets nobody but its owner read *file*, if it is there or is to be made. Raises `ProjectError`."""
    try:
        file.chmod(0o600)
    except FileNotFoundError:
        if create:
            with suppress(OSError):  # Terraform says what is wrong with its folder
                file.touch(0o600)
    except OSError as error:
        raise ProjectError(
            f"may be read by others, and its mode cannot be changed: {error.strerror}",
            field=str(file),
            hint="It holds the fleet's secret, which gives code execution on its nodes. Make it yours, with mode 0600.",
        ) from None


def not_saved(
    errors: Sequence[tuple[str, str]], unsaved: str | None, terraform: Sequence[str], folder: Path
) -> StateNotSaved:
    """Returns the error for a state that could not be saved, after writing it to a file where Terraform could not.

    unsaved: the state, where Terraform could not even write its errored.tfstate into *folder*.
    """
    file = folder / "errored.tfstate" if unsaved is None else _rescued(unsaved, folder)
    reasons = [text for _, text in errors if not text.startswith(("Failed to persist", "Failed to create local"))]
    push = shlex.join((*terraform, f"-chdir={folder}", "state", "push", str(file)))
    error = StateNotSaved(
        "\n".join(["the state was not saved, and what this run made or removed is not in it", *reasons]),
        hint="No file could be written that holds it. List what the cloud has, and remove it by hand."
        if file is None
        else f"It is in {file}, with the fleet's secret. Mend the cause, and save it before anything else:\n{push}",
    )
    error.diagnostics = tuple(errors)
    return error


def _rescued(state: str, folder: Path) -> Path | None:
    """Writes *state* to a file of its own in *folder*, or where this machine keeps temporary files."""
    for place in (folder, None):
        with suppress(OSError):
            descriptor, name = tempfile.mkstemp(prefix="errored-", suffix=".tfstate", dir=place)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(state)
            return Path(name)
    return None


def refuse_shared(folder: Path) -> None:
    """Raises `ProjectError` where other accounts may write to *folder*: they could have their code run by its owner.

    A group of the account alone, which is how most systems make one, is nobody else.
    """
    try:
        found = folder.stat()
    except OSError:
        return  # what needs it says so
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _of_one(found.st_gid)):
        raise ProjectError(
            "other accounts may write to this folder, and so have code run as you",
            field=str(folder),
            hint=f"Take that from them: chmod go-w {shlex.quote(str(folder))}\nWhere that changes nothing, as on a "
            "disk of Windows in WSL (/mnt/c), put the project below your home folder.",
        )


def _of_one(group: int) -> bool:
    """Returns whether a *group* is that of one account: it has its name, and no further member."""
    try:
        found = grp.getgrgid(group)
        return found.gr_name == pwd.getpwuid(os.geteuid()).pw_name and not set(found.gr_mem) - {found.gr_name}
    except KeyError:
        return False


def read_state_file(file: Path) -> tuple[Resource, ...]:
    """Returns the resources in a state file; none where there is no file. Raises `ProjectError`."""
    try:
        return read_state(file.read_text(encoding="utf-8", errors="replace"), source=file)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ProjectError(f"cannot be read: {error.strerror}", field=str(file)) from None
