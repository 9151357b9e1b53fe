"""Checkpoints below a prefix of a bucket: each is a folder of objects, of which the last says that it is whole.

No object is written twice. A folder is named by a number that counts, its step, and a word of its own, so that two
writers never write the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from skyinfra.buckets import Objects, parse
from skyinfra.errors import CloudRefused, InvalidField

_MARKER = "whole.json"
_DATA = "data"
_FOLDER = re.compile(r"(?P<number>\d{8})-step-(?P<step>\d{12})-[0-9a-f]{8}\.(ckpt|pickle|pt)")
_PURPOSE = "checkpoints are kept in a bucket"


@dataclass(frozen=True)
class Found:
    """A checkpoint that was brought here. *url*: where it is kept."""

    file: Path
    step: int
    url: str


class _Damaged(Exception):
    """The checkpoint cannot be used; why."""


@dataclass(frozen=True)
class _Marker:
    """The last object of a checkpoint. folder: it is one, with the *folders* in it; *files* by size and SHA-256."""

    step: int
    folder: bool
    folders: list[str]
    files: dict[str, tuple[int, str]]

    def lacks(self, sizes: Mapping[str, int]) -> str | None:
        """Returns which file is not there as it was saved, by the *sizes* of all objects; None where all are."""
        for key, (size, _) in self.files.items():
            if sizes.get(key) != size:
                return f"{key} has {sizes.get(key, 'no')} bytes, and not {size}"
        return None


class Checkpoints:
    """The checkpoints below *url*, of which the last *keep* stay. It has one writer at a time."""

    def __init__(self, url: str, keep: int) -> None:
        kind, bucket, prefix = parse(url, "path")
        if not prefix:
            raise InvalidField("needs a prefix, which is of these checkpoints alone", field="path", given=url)
        self.url = f"{kind}://{bucket}/{prefix}"
        self._keep = keep

    def save(self, write: Callable[[Path], object], step: int, suffix: str) -> str:
        """Saves what *write* writes to the path that it is given; returns the URL of the checkpoint.

        It is whole before anything is removed: older ones, and what processes left that ended while they saved.
        """
        objects = Objects(self.url, purpose=_PURPOSE)
        before = _by_folder(objects.sizes())
        last = max((int(folder[:8]) for folder in before), default=0)
        name = f"{last + 1:08}-step-{step:012}-{secrets.token_hex(4)}.{suffix}"
        with self._folder("save") as folder:
            made = folder / name
            write(made)
            try:
                _upload(objects, name, made, step)
            except BaseException:
                with contextlib.suppress(CloudRefused):
                    _remove(objects, name, _by_folder(objects.sizes(f"{name}/")).get(name, ()))
                    objects.abort_uploads(lambda key: key.startswith(f"{name}/"))
                raise
        whole = [each for each in sorted(before, reverse=True) if _is_whole(objects, each, before[each])]
        for each in sorted(before.keys() - set(whole[: self._keep - 1])):
            _remove(objects, each, before[each])
        objects.abort_uploads(lambda key: _FOLDER.fullmatch(key.partition("/")[0]) is not None)
        return f"{self.url}/{name}"

    @contextlib.contextmanager
    def latest(self) -> Iterator[Found | None]:
        """Yields the newest whole checkpoint, here for as long as the body; None where nothing was saved.

        One that is damaged is passed over, with a warning. Raises FileNotFoundError where all are.
        """
        objects, damaged = Objects(self.url, purpose=_PURPOSE), dict[str, str]()
        while True:
            found = {name: sizes for name, sizes in _by_folder(objects.sizes()).items() if _MARKER in sizes}
            name = max(found.keys() - damaged, default=None)
            if name is None:
                break
            with self._folder("load") as folder:
                try:
                    _download(objects, name, found[name], folder / name)
                except _Damaged as why:
                    damaged[name] = str(why)
                    continue
                for each in damaged:
                    if each > name:
                        text = f"{self.url}/{each} is damaged ({damaged[each]}): {name} before it is loaded"
                        warnings.warn(text, stacklevel=4)
                yield Found(folder / name, _step(name), f"{self.url}/{name}")
                return
        if damaged.keys() & found.keys():
            said = "; ".join(f"{each}: {damaged[each]}" for each in sorted(damaged.keys() & found.keys()))
            raise FileNotFoundError(f"no checkpoint below {self.url} is whole: {said}")
        yield None

    @contextlib.contextmanager
    def _folder(self, purpose: str) -> Iterator[Path]:
        """A folder of this machine, where tempfile makes them, for a copy of a checkpoint."""
        prefix = f"skyinfra-{purpose}-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if not _runs(left.name.removeprefix(prefix).partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-") as folder:
            yield Path(folder)


def _runs(pid: str) -> bool:
    """Returns whether the process *pid* runs."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def _step(name: str) -> int:
    return int(name[14:26])


def _by_folder(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Returns the sizes of the objects of each checkpoint, whole or not, by their names in it."""
    found: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        folder, _, rest = name.partition("/")
        if _FOLDER.fullmatch(folder) and rest:
            found.setdefault(folder, {})[rest] = size
    return found


def _upload(objects: Objects, name: str, made: Path, step: int) -> None:
    """Uploads the file or folder *made*, looks whether all of it is there, and then says so by the marker."""
    files: dict[str, Path] = {}
    folders: list[str] = []
    for path in sorted(made.rglob("*")) if made.is_dir() else [made]:
        inner = _DATA if path == made else f"{_DATA}/{path.relative_to(made).as_posix()}"
        if path.is_file():
            files[inner] = path
        elif path.is_dir() and not path.is_symlink():
            folders.append(inner)
        else:
            raise InvalidField("a bucket keeps files and folders alone", field="save", given=str(path))
    marker = _Marker(step, made.is_dir(), folders, {key: (path.stat().st_size, "") for key, path in files.items()})
    objects.upload({f"{name}/{key}": path for key, path in files.items()})
    there = _by_folder(objects.sizes(f"{name}/")).get(name, {})
    if lost := marker.lacks(there):
        raise CloudRefused(f"{objects.where}/{name} is not whole, and no upload has failed: {lost}")
    marker.files.update({key: (size, _sha256(files[key])) for key, (size, _) in marker.files.items()})
    objects.write(f"{name}/{_MARKER}", json.dumps(vars(marker)).encode())


def _marker(objects: Objects, name: str, sizes: Mapping[str, int]) -> _Marker:
    """Returns the marker of a checkpoint whose objects have all the sizes that it says. Raises `_Damaged`."""
    try:
        marker = _Marker(**json.loads(objects.read(f"{name}/{_MARKER}")))
        lost = marker.lacks(sizes)
    except (ValueError, TypeError, AttributeError, FileNotFoundError) as error:
        raise _Damaged(f"{_MARKER} cannot be read: {error}") from None
    if lost:
        raise _Damaged(lost)
    return marker


def _is_whole(objects: Objects, name: str, sizes: Mapping[str, int]) -> bool:
    try:
        return _MARKER in sizes and _marker(objects, name, sizes) is not None
    except _Damaged:
        return False


def _download(objects: Objects, name: str, sizes: Mapping[str, int], place: Path) -> None:
    """Writes a checkpoint to *place*. Raises `_Damaged` where it is not what was saved."""
    marker = _marker(objects, name, sizes)
    for folder in (_DATA, *marker.folders) if marker.folder else ():
        (place / folder.removeprefix(_DATA).lstrip("/")).mkdir(parents=True, exist_ok=True)
    for key, (size, sha256) in marker.files.items():
        file = place / key.removeprefix(_DATA).lstrip("/") if marker.folder else place
        try:
            objects.download(f"{name}/{key}", file, size)
        except FileNotFoundError as error:
            raise _Damaged(str(error)) from None
        if _sha256(file) != sha256:
            raise _Damaged(f"{key} is not what was saved")


def _remove(objects: Objects, name: str, keys: Iterable[str]) -> None:
    """Removes the objects of a checkpoint: the marker first, after which it is none."""
    objects.remove(f"{name}/{key}" for key in sorted(keys, key=lambda key: (key != _MARKER, key)))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
