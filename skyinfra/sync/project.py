"""The files that go with a script: those of its folder, or of the folder above the package that it lies in."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from skyinfra.errors import InvalidField, InvalidInclude

# Lines as in a .gitignore, for what `skyinfra run` leaves behind.
IGNORE = ".skyinfraignore"
# A script takes no more with it than that by itself; data are put there once, or included by name.
MOST_FILES = 2_000
MOST_BYTES = 100 * 2**20
_GIT_S = 60


def folder_of(script: Path) -> Path | None:
    """Returns the folder that goes with *script*, which is absolute; None for a home folder and those above it."""
    folder = script.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    home = Path.home()
    return None if home == folder or home.is_relative_to(folder) else folder


def given_folder(folder: str | Path, field: str) -> Path:
    """Returns the *folder* that a user gave as *field*, absolute. Raises `InvalidField` where there is none."""
    found = Path(os.path.normpath(Path(folder).expanduser().absolute()))
    if not found.is_dir():
        raise InvalidField("there is no such folder", field=field, given=str(folder))
    return found


def excludes_of(folder: Path) -> list[str]:
    """Lines as in a .gitignore for what stays here: what Git ignores, and those of `IGNORE`.

    Raises `InvalidInclude`.
    """
    return [*_ignored_by_git(folder), *_lines(folder / IGNORE)]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InvalidInclude(f"cannot be read: {error}", field="includes", given=str(file)) from None


def _ignored_by_git(folder: Path) -> list[str]:
    """The ignored files and folders below *folder*, each anchored there; none outside of a repository.

    Raises `InvalidInclude` in one of which Git does not say it: a file with a secret would be sent along.
    """
    command = ["git", "-C", str(folder), "ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_GIT_S, check=False)
    except FileNotFoundError:
        why = "there is no git here"
    except OSError as error:
        why = f"git cannot be run: {error.strerror or error}"
    except subprocess.TimeoutExpired:
        why = f"git takes more than {_GIT_S} s"
    else:
        if done.returncode == 0:
            names = [os.fsdecode(name) for name in done.stdout.split(b"\0")]
            return [f"/{_literal(name)}" for name in names if name not in ("./", "")]
        lines = done.stderr.decode(errors="replace").splitlines() or [f"git ended with {done.returncode}"]
        why = next((line for line in lines if line.startswith("fatal: ")), lines[0]).removeprefix("fatal: ")
    above = _repository(folder)
    if above is None:
        return []
    raise InvalidInclude(
        f"Git does not say what it ignores: {why}",
        field="includes",
        given=str(folder),
        hint="Name a smaller folder (workdir), or send the script alone (--alone)."
        if why.startswith("git takes")
        else f"`git config --global --add safe.directory {shlex.quote(str(above))}` trusts a folder of another "
        "account; install git where there is none.",
    )


def _repository(folder: Path) -> Path | None:
    """The folder with ``.git`` that *folder* is or lies in, on its file system, as Git looks for it."""
    real = Path(os.path.realpath(folder))
    device = real.stat().st_dev
    found = (each for each in (real, *real.parents) if os.path.lexists(each / ".git"))
    return next((each for each in found if each.stat().st_dev == device), None)


def _literal(name: str) -> str:
    """*name* as a line of a .gitignore; a character that means something there is any one character."""
    return "".join("?" if character in "*?[" else character for character in name)
