"""Chooses the files of the user that are synced, and the folders from which Python imports.

Nothing here connects to anything.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from skyinfra.blobs.patterns import Pattern
from skyinfra.blobs.patterns import excluded as _excluded
from skyinfra.blobs.patterns import read as _patterns
from skyinfra.blobs.store import in_words
from skyinfra.blobs.trees import Entry, Tree, check_paths
from skyinfra.errors import InvalidInclude
from skyinfra.protocol import secrets
from skyinfra.tasks.included import Included
from skyinfra.tasks.modules import import_folders

# Never sent of a folder, as a line of a .gitignore would do it: what may hold a secret.
_NEVER = (
    # Their settings may hold a token.
    ".git/",
    ".hg/",
    ".svn/",
    # They hold the fleet secret.
    ".terraform/",
    "cdktf.out/",
    "*.tfstate",
    "*.tfstate.*",
    # The nodes of this machine.
    ".skyinfra/",
    ".env",
)
# Left out of folders with code.
EXCLUDED = (
    *_NEVER,
    "__pycache__/",
    "*.pyc",
    ".venv/",
    "node_modules/",
    "__pypackages__/",
    ".cache/",
    ".direnv/",
    ".eggs/",
    ".hypothesis/",
    ".idea/",
    ".mypy_cache/",
    ".nox/",
    ".pytest_cache/",
    ".pytype/",
    ".ruff_cache/",
    ".tox/",
    ".vscode/",
    ".ipynb_checkpoints/",
    ".DS_Store",
)
# Folders that are left out where they hold this: environments, of whatever name.
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
# Folders of these names are, too, where they are no package of the user's own.
_LIKE_ENVIRONMENTS = ("venv", "env", "ENV")
MOST_FILES = 20_000
MOST_BYTES = 4 * 2**30
_SHOWN = 5
_READ = 2**20
# A file that was changed so recently may be changed again without another time.
_FRESH_NS = 2 * 10**9
# Of a file that may hold a secret: state is text.
_LOOKED_THROUGH = 64 * 2**20

# The links that were said to be left out.
_said: set[tuple[str, Path]] = set()

_hashes: dict[tuple[str, int, int, int], str] = {}


class _HoldsSecret(InvalidInclude):
    """A file holds the secret of the fleet."""


@dataclass
class Includes:
    """Files and folders of this machine, relative to *base*.

    secret: of the fleet; a file that holds it is refused. most: files and bytes, as what is looked through before every
    sync has to be limited; None: any. skips: leaves a file out that holds the secret, instead of refusing it.
    ignored: left out of *base* where that goes along as a whole, but not of what is named in it. code: leaves out what
    Python and tools for code leave behind, and environments; of data only what may hold a secret.
    """

    base: Path
    secret: str
    paths: list[Path] = field(default_factory=list)
    excludes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    most: tuple[int, int] | None = field(default_factory=lambda: (MOST_FILES, MOST_BYTES))
    skips: bool = False
    code: bool = True

    def add(self, paths: Iterable[str | Path], excludes: Iterable[str] = ()) -> None:
        """Includes more. Raises `InvalidInclude` where one is not there."""
        for given in paths:
            path = Path(os.path.normpath(self.base / Path(given).expanduser()))
            if not path.exists():
                raise InvalidInclude("is not there", field="includes", given=str(given))
            if path not in self.paths:
                self.paths.append(path)
        self.excludes += [each for each in excludes if each not in self.excludes]

    def scan(self) -> Included:
        """Reads what has changed since the last time. Raises `InvalidInclude`."""
        tops = {self._top(path): path for path in self.paths}
        if len(tops) < len(self.paths):
            raise InvalidInclude("two of them have the same name", field="includes", hint="Put them into one folder.")
        files = {path: file for top, start in tops.items() for path, file in self._files(top, start)}
        check_paths(files)
        if self.most is not None:
            _check_size(files, *self.most)
        entries = {}
        for path, file in sorted(files.items()):
            try:
                entries[path] = self._entry(path, file)
            except _HoldsSecret:
                if not self.skips:
                    raise
                del files[path]
        tree = Tree(entries, _roots(tops, entries))
        return Included(tree, {entries[path].sha256: file for path, file in files.items()}, {**tops, **files})

    def _top(self, path: Path) -> str:
        """Returns its path in the tree: as below the base, or as below what Python imports from, else by its name."""
        if path == self.base:
            return "."
        for folder in (self.base, *import_folders()):
            if path.is_relative_to(folder) and path != folder:
                return path.relative_to(folder).as_posix()
        return path.name

    def _files(self, top: str, start: Path) -> Iterator[tuple[str, Path]]:
        if start.is_file():
            # What is named itself is not left out, unless it is never sent.
            if _excluded(start.name, False, _patterns(("*.tfstate", "*.tfstate.*"))):
                raise InvalidInclude("Terraform's state holds secrets and is not sent", field="includes", given=top)
            if secrets.is_read_from(_real(start)):
                raise InvalidInclude("is the file of a secret and is not sent", field="includes", given=top)
            yield top, start
            return
        within = tuple(map(_real, self.paths))
        excluded = EXCLUDED if self.code else _NEVER
        patterns = _patterns((*excluded, *(self.ignored if start == self.base else ()), *self.excludes))
        left_out = partial(_left_out, patterns=patterns, code=self.code)
        yield from _walk(start, within, top, left_out, (_real(start),))

    def _entry(self, path: str, file: Path) -> Entry:
        try:
            found = file.stat()
            key = (str(file), found.st_size, found.st_mtime_ns, found.st_ino)
            digest = _hashes.get(key)
            if digest is None:
                digest = self._hash(path, file)
                if time.time_ns() - found.st_mtime_ns > _FRESH_NS:
                    _hashes[key] = digest
        except OSError as error:
            raise InvalidInclude(f"cannot be read: {error.strerror or error}", field=path) from None
        return Entry(digest, found.st_size, bool(found.st_mode & 0o100))

    def _hash(self, path: str, file: Path) -> str:
        digest = hashlib.sha256()
        secret = self.secret.encode()
        tail, seen = b"", 0
        with file.open("rb") as stream:
            while data := stream.read(_READ):
                digest.update(data)
                if seen < _LOOKED_THROUGH and secret and secret in tail + data:
                    raise _HoldsSecret(
                        "holds the secret of the fleet and is not sent",
                        field=path,
                        hint="Manifests and Terraform's state do. Exclude it: excludes=[...].",
                    )
                tail, seen = data[-len(secret) :], seen + len(data)
        return digest.hexdigest()


def _walk(
    folder: Path, within: tuple[Path, ...], top: str, left_out: Callable[[Path, str], bool], above: tuple[Path, ...]
) -> Iterator[tuple[str, Path]]:
    """Yields the files below *folder*, by their path in the tree.

    Links that lead out of *within*, or into a folder that they are in, and folders that cannot be read are left out,
    with a line on stderr. Raises `InvalidInclude` where the first folder cannot be read.
    """
    try:
        for item in sorted(folder.iterdir()):
            path = item.name if top == "." else f"{top}/{item.name}"
            real = _real(item)
            if left_out(item, path) or secrets.is_read_from(real):
                continue
            if item.is_symlink() and not any(map(real.is_relative_to, within)):
                what = f"a link that leads out of what is sent along, to {real}; include that as well to have it"
                _say(path, real, what)
            elif item.is_dir():
                if real in above:
                    _say(path, real, "a link to a folder that it is in")
                else:
                    yield from _walk(item, within, path, left_out, (*above, real))
            elif item.is_file():
                yield path, item
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        if len(above) == 1:
            raise InvalidInclude(what, field="includes", given=str(folder)) from None
        _say(top, folder, what)


def _real(path: Path) -> Path:
    """Returns *path* without links. Before Python 3.13 `Path.resolve` raises where one leads to itself."""
    return Path(os.path.realpath(path))


def _say(path: str, real: Path, what: str) -> None:
    """Says, once, that *path* is left out."""
    if (path, real) not in _said:
        _said.add((path, real))
        sys.stderr.write(f"{path} is left out: {what}\n")


def _is_environment(folder: Path) -> bool:
    """Returns whether *folder* is an environment of Python: it looks like one, or has its name and holds no module."""
    # Path.exists raises where *folder* cannot be read.
    if any(os.path.exists(folder / each) for each in _ENVIRONMENTS):  # noqa: PTH110
        return True
    return folder.name in _LIKE_ENVIRONMENTS and next(folder.glob("*.py"), None) is None


def _check_size(files: dict[str, Path], most_files: int, most_bytes: int) -> None:
    try:
        sizes = {path: file.stat().st_size for path, file in files.items()}
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise InvalidInclude(what, field="includes", given=str(error.filename)) from None
    total = sum(sizes.values())
    if total <= most_bytes and len(sizes) <= most_files:
        return
    largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    lines = "\n".join(f"  {in_words(size):>10}  {path}" for path, size in largest)
    raise InvalidInclude(
        f"{len(sizes)} files with {in_words(total)} are more than {most_files} files or {in_words(most_bytes)}",
        field="includes",
        hint=f"The largest:\n{lines}\nLeave some out (excludes=[...]), or send data once with pool.put().",
    )


# Where Python imports from ------------------------------------------------------------------------------------------


def _roots(tops: dict[str, Path], files: dict[str, Entry]) -> tuple[str, ...]:
    """The folders of the tree that nodes import from: as here, and for what is not imported from here its own."""
    found: dict[str, None] = {}
    for folder in import_folders():
        for top, start in tops.items():
            if folder.is_relative_to(start):
                below = folder.relative_to(start).as_posix()
                found[top if below == "." else below if top == "." else f"{top}/{below}"] = None
            elif start.is_relative_to(folder):
                below = start.relative_to(folder).as_posix()
                if top == below:
                    found["."] = None
                elif top.endswith(f"/{below}"):
                    found[top.removesuffix(f"/{below}")] = None
    for top, start in tops.items():
        if not any(_holds(root, top) or _holds(top, root) for root in found):
            package = start.is_file() or (start / "__init__.py").exists()
            found[str(PurePosixPath(top).parent) if package else top] = None
    kept = [root for root in found if any(_holds(root, path) for path in Tree(files, (".",)).code)]
    return tuple(kept)


def _holds(root: str, path: str) -> bool:
    return root in (".", path) or path.startswith(f"{root}/")


def _left_out(item: Path, path: str, patterns: Sequence[Pattern], code: bool) -> bool:
    is_folder = item.is_dir()
    said = _excluded(path, is_folder, patterns)
    return code and is_folder and _is_environment(item) if said is None else said
