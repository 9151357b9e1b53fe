"""Tells whether a synthesis would read what the last one has read, so that what that wrote can be taken.

The program of a project says which files it has opened since `record` began, and whether it has asked the network or
another program: nobody knows what they would answer now. Besides those files count each file of the project, each
variable of the environment, the installed packages, and what was written. A program that goes by the clock is not
noticed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

# Where the program writes what it has read.
VARIABLE = "SKYINFRA_READS"
# In the folder of what is synthesized.
_FILE = ".reads.json"
# Of the project, what no program declares anything by.
_NOT_READ = {".git", ".venv", "venv", "node_modules", "__pycache__", ".terraform", ".skyinfra", ".mypy_cache"}
_STATE = ".tfstate"
# A larger folder takes longer to look at than a program to run.
_MOST = 20_000
# Variables of the terminal and the shell.
_PASSING = {"_", "OLDPWD", "PWD", "SHLVL", "TERM", "COLUMNS", "LINES", VARIABLE}
_ASKS = ("socket.connect", "socket.getaddrinfo", "os.system", "os.exec", "os.posix_spawn", "os.spawn")
# The program of cdktf's library, which reads nothing but that library.
_OWN_PROGRAM = "node"


# In the program ------------------------------------------------------------------------------------------------------


def record() -> None:
    """Writes at the end of this program which files it has opened from now on, where it is asked for that."""
    target = os.environ.pop(VARIABLE, None)
    if target is None:
        return
    read: set[str] = set()
    asked = False

    def notice(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal asked
        if event in ("open", "os.listdir", "os.scandir"):
            name, flags = arguments[0], arguments[2] if event == "open" else 0
            if isinstance(name, str) and isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR):
                read.add(os.path.abspath(name))  # noqa: PTH100 - a Path would be made of each
        elif event == "subprocess.Popen":
            asked = asked or not os.path.basename(str(arguments[0])).startswith(_OWN_PROGRAM)  # noqa: PTH119
        elif event in _ASKS:
            asked = True

    def write() -> None:
        files = read | {file for each in list(sys.modules.values()) if (file := getattr(each, "__file__", None))}
        with contextlib.suppress(OSError):
            Path(target).write_text(json.dumps([] if asked else sorted(map(str, files))), encoding="utf-8")

    sys.addaudithook(notice)
    atexit.register(write)


# Around it -----------------------------------------------------------------------------------------------------------


class Reads:
    """The things that a synthesis of the project in *folder* by the command *app* reads, and writes to *output*."""

    def __init__(self, folder: Path, app: str, output: Path) -> None:
        self._folder, self._app, self._output = folder, app, output
        self._before = self._project()
        self.file = output / _FILE

    def same(self) -> bool:
        """Returns whether nothing has changed since `keep`."""
        try:
            kept = json.loads(self.file.read_text(encoding="utf-8"))
            return self._before is not None and bool(kept["digest"] == self._digest(kept["files"]))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def forget(self) -> None:
        """Forgets what was kept."""
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def keep(self) -> None:
        """Keeps what the program has read that has just ended; nothing where that is not known, or has changed."""
        try:
            files = [each for each in json.loads(self.file.read_text(encoding="utf-8")) if self._counts(each)]
            self.forget()
            if files and self._before is not None and self._before == self._project():
                document = {"files": files, "digest": self._digest(files)}
                self.file.write_text(json.dumps(document), encoding="utf-8")
        except (OSError, ValueError):
            self.forget()

    def _counts(self, file: str) -> bool:
        """Returns whether *file* is there, and counts by itself: not one of Python or of its packages, nor a folder of
        the project."""
        path = Path(file)
        if path.is_dir() and path.is_relative_to(self._folder):
            return False
        wholes = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(self._output)]
        return not any(path.is_relative_to(whole) for whole in wholes) and path.exists()

    def _digest(self, files: Iterable[str]) -> str:
        variables = sorted((name, value) for name, value in os.environ.items() if name not in _PASSING)
        python = [sys.version, *(_stamp(folder) for folder in _packages())]
        parts = [self._app, self._before, variables, python, [_stamp(file) for file in files], sorted(self._written())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _project(self) -> list[str] | None:
        """Returns the stamps of the files of the project; None where there are too many."""
        found: list[str] = []
        for folder, folders, files in os.walk(self._folder):
            here = Path(folder)
            folders[:] = [each for each in folders if each not in _NOT_READ and here / each != self._output]
            found += [_stamp(here / file) for file in files if _STATE not in file]
            if len(found) > _MOST:
                return None
        return sorted(found)

    def _written(self) -> Iterator[str]:
        for pattern in ("manifest.json", "stacks/*/cdk.tf.json", "stacks/*/assets/*/*"):
            yield from map(_stamp, self._output.glob(pattern))


def _packages() -> tuple[str, ...]:
    """Returns the folders of the installed packages, which change when one is installed."""
    return tuple(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))


def _stamp(path: Path | str) -> str:
    """Returns what changes with the content of a file, or with the names in a folder."""
    try:
        found = os.stat(path)  # noqa: PTH116 - as above
    except OSError:
        return f"{path}: none"
    return f"{path}: {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"
