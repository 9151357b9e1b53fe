"""Says what would have brought a module or a file to a node that lacks it, from what this machine has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath

from skyinfra.tasks import modules

_SUFFIXES = (".py", "/__init__.py")


def remedy(module: str, folders: Iterable[Path], include: str) -> str:
    """Returns a sentence about *module*, the name of one that a node could not import.

    folders: with modules of the user, those that are most likely first. include: how a file goes along, with ``{}`` for
    its path.
    """
    if module.partition(".")[0] in sys.stdlib_module_names:
        return f"{module} is a part of Python that the Python of the node was built without."
    places = [_place(module, folder) for folder in folders]
    if (own := modules.source(module)) is not None:
        places.append(own.file.parent if own.is_package else own.file)
    for found in filter(None, places):
        return f"{module} is {_shown(found)} here: {include.format(_shown(found))}."
    if (requirement := _requirement(module)) is not None:
        return f'Here {module} is installed, by {requirement}: sky.Image(pip=["{requirement}"]) brings it to the nodes.'
    return (
        f"This machine has no module {module} either. sky.Image(pip=[...]) brings its package to the nodes; of a file, "
        f"{include.format('FILE')}."
    )


def file_remedy(path: str, below: str | None, folders: Iterable[Path]) -> str | None:
    """Returns a sentence about the file *path*, which a task did not find; None where this machine has none either.

    below: its path below the folder that nodes import from, where it is one of these. folders: as in `remedy`.
    """
    if below is None:
        if not Path(path).exists():
            return None
        return (
            f"{path} is on this machine; a task begins in an empty folder of a node. pool.sync({path!r}) takes it "
            f"along, and sky.synced({path!r}) is its path there."
        )
    for folder in folders:
        if (folder / below).exists():
            top = _shown(folder / PurePosixPath(below).parts[0] if "/" in below else folder)
            return f"{_shown(folder / below)} is on this machine: pool.sync({top!r}) takes that folder along."
    return None


def _place(module: str, folder: Path) -> Path | None:
    """Returns the file of *module* in *folder*, or the folder of its package."""
    path = folder / module.replace(".", "/")
    for suffix in _SUFFIXES:
        if Path(f"{path}{suffix}").is_file():
            return path if suffix.startswith("/") else Path(f"{path}{suffix}")
    # A package without __init__.py, unless it is any folder.
    return path if path.is_dir() and any(path.glob("*.py")) else None


def _shown(path: Path) -> str:
    """*path* as a person here would write it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _requirement(module: str) -> str | None:
    """Returns the distribution that has *module* here, with its public version, as pip takes it."""
    names = metadata.packages_distributions().get(module.partition(".")[0])
    return f"{names[0]}=={metadata.version(names[0]).partition('+')[0]}" if names else None
