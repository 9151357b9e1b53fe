"""Checkpoints that survive an end at any moment: written to a temporary folder, synced to the disk, and renamed; or
uploaded to a bucket, see `skyinfra.buckets.checkpoints`.

torch is imported only to read a state that torch has written.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyinfra.buckets.checkpoints import Checkpoints
from skyinfra.errors import InvalidField, MissingDependency, no_attribute, refuses_unknown_options
from skyinfra.node.folder import sync_folder
from skyinfra.worker.interruption import interrupted

Save = Callable[[Any, Path], object]
Load = Callable[[Path], Any]

LATEST = "latest"
_NAME = re.compile(r"step-(\d{12})\.(ckpt|pickle|pt)")
# While the node is drained, the pause between saves is this many times the duration of a save.
_PAUSE = 10


class SpotCheckpointer:
    """Keeps the state of a task in *path*: a folder that every node that may run the task has to see, or the prefix of
    a bucket, ``"s3://BUCKET/PREFIX"`` or ``"gs://BUCKET/PREFIX"``.

        checkpoints = sky.SpotCheckpointer("/mnt/shared/run-7")
        state, step = checkpoints.load_latest() or (new_state(), 0)
        while step < 10_000:
            state, step = train_step(state), step + 1
            checkpoints.update(state, step, every=500)

    A checkpoint is complete or absent, and the next one is complete before the last is removed. In a folder, which is
    made, the link ``latest`` points at the last one; in a copy without the link, the highest step is that. It has one
    writer at a time: each slot that trains on its own needs a folder or prefix of its own. A bucket needs boto3 on the
    nodes, and credentials that boto3 finds there.

    save: ``save(state, file)`` writes *state* to the path *file*, as a file or as a folder. load: ``load(file)`` reads
    it. Both or neither are given, as in ``SpotCheckpointer(path, save=torch.save, load=torch.load)``; without them,
    torch writes the state in a program that has imported torch, and pickle elsewhere. Load only what you trust: both
    execute what the file says. keep: that many checkpoints stay.

    Raises `InvalidField` for a *path* that is another URL, for a *keep* below 1, and for *save* without *load*.
    """

    @refuses_unknown_options("SpotCheckpointer")
    def __init__(self, path: Path | str, *, save: Save | None = None, load: Load | None = None, keep: int = 2) -> None:
        if keep < 1:
            raise InvalidField("at least one checkpoint is kept", field="keep", given=keep)
        if (save is None) != (load is None):
            raise InvalidField("save and load go together", field="save" if save is None else "load")
        # pathlib has made s3:/BUCKET of a URL.
        remote = re.match(r"\w\w+:/", str(path))
        self._bucket = Checkpoints(str(path), keep) if remote else None
        self.path: Path | str = Path(path) if self._bucket is None else self._bucket.url
        self.keep = keep
        self._save = save
        self._load = load
        # Step, end and duration in seconds of the last save here.
        self._last: tuple[int, float, float] | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(name, "SpotCheckpointer")

    @refuses_unknown_options("SpotCheckpointer.save")
    def save(self, state: Any, step: int) -> Path | str:
        """Saves *state* for *step*, at least 0, durably; returns the path of the checkpoint, or its URL.

        Replaces a checkpoint of the same step. Raises what *save* raises, OSError, and of a bucket `CloudRefused` and
        `MissingDependency`; earlier checkpoints stay then.
        """
        if step < 0:
            raise InvalidField("steps are counted from 0", field="step", given=step)
        began = time.monotonic()
        write, suffix = self._writer()
        place: Path | str
        if self._bucket is not None:
            place = self._bucket.save(lambda file: write(state, file), step, suffix)
        else:
            place = self._save_here(lambda file: write(state, file), f"step-{step:012d}.{suffix}")
        now = time.monotonic()
        self._last = step, now, now - began
        return place

    def _save_here(self, write: Callable[[Path], object], name: str) -> Path:
        above = Path(self.path)
        above.mkdir(parents=True, exist_ok=True)
        for left in above.glob(".step-*"):  # of processes that ended while they saved
            _remove(left)
        place = above / name
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=above) as folder:
            made = Path(folder, name)
            write(made)
            _sync(made)
            if place.is_dir() and not place.is_symlink():
                # A folder cannot be replaced atomically: the old one is moved first.
                place.rename(Path(folder, "old"))
            made.rename(place)
            link = Path(folder, LATEST)
            link.symlink_to(name)
            sync_folder(above)
            if (above / LATEST).is_dir() and not (above / LATEST).is_symlink():
                # Of a copy that followed the link.
                (above / LATEST).rename(Path(folder, "copied"))
            link.rename(above / LATEST)
            sync_folder(above)
        self._prune(place)
        return place

    @refuses_unknown_options("SpotCheckpointer.load_latest")
    def load_latest(self) -> tuple[Any, int] | None:
        """Returns the last saved state and its step; None where nothing was saved. Raises what *load* raises.

        Of a bucket, a checkpoint that is damaged is passed over, with a warning; FileNotFoundError: all of them are.
        """
        if self._bucket is not None:
            with self._bucket.latest() as found:
                return None if found is None else (self._reader(found.file, found.url)(found.file), found.step)
        place = self._last_here()
        if place is None:
            return None
        named = _NAME.fullmatch(place.name)
        if named is None:
            link = Path(self.path, LATEST)
            raise InvalidField("does not point at a checkpoint", field=str(link), given=place.name)
        return self._reader(place, str(place))(place), int(named[1])

    def _last_here(self) -> Path | None:
        """Returns what ``latest`` points at. A copy of the folder may lack the link, or have followed it: the highest
        step then, as a copy has other times."""
        above = Path(self.path)
        with contextlib.suppress(OSError):
            return above / os.readlink(above / LATEST)  # noqa: PTH115 - the text: a name in the folder
        try:
            found = [entry for entry in above.iterdir() if _NAME.fullmatch(entry.name)]
        except FileNotFoundError:
            return None
        # Their numbers are all of the same length.
        return max(found, key=lambda entry: entry.name, default=None)

    def update(self, state: Any, step: int, *, every: int | None = None) -> bool:
        """Offers *state* after each step; returns whether it was saved.

        It is saved at every *every*-th step, and where the node is drained (`interrupted`); the latter repeatedly, but
        for at most about a tenth of the time.
        """
        due = every is not None and step % every == 0 and (self._last is None or self._last[0] != step)
        if not due and interrupted():
            due = self._last is None or time.monotonic() - self._last[1] >= _PAUSE * self._last[2]
        if due:
            self.save(state, step)
        return due

    def _writer(self) -> tuple[Save, str]:
        if self._save is not None:
            return self._save, "ckpt"
        torch = sys.modules.get("torch")
        return (torch.save, "pt") if torch is not None else (_pickle, "pickle")

    def _reader(self, place: Path, named: str) -> Load:
        if self._load is not None:
            return self._load
        if place.suffix == ".pickle":
            return _unpickle
        if place.suffix == ".ckpt":
            raise InvalidField("was saved by a function of its own", field=named, hint="Give load= as well.")
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            raise MissingDependency(f"{named} was written by torch, which is not installed here") from None
        return lambda file: torch.load(file, weights_only=False)

    def _prune(self, newest: Path) -> None:
        """Removes all but the last *keep* checkpoints, by time; *newest* always stays."""
        found = [entry for entry in newest.parent.iterdir() if _NAME.fullmatch(entry.name) and entry != newest]
        found.sort(key=lambda entry: (entry.stat().st_mtime_ns, entry.name))
        for entry in found[: max(0, len(found) - (self.keep - 1))]:
            _remove(entry)


def _pickle(state: Any, file: Path) -> None:
    with file.open("wb") as stream:
        pickle.dump(state, stream, protocol=pickle.HIGHEST_PROTOCOL)


def _unpickle(file: Path) -> Any:
    with file.open("rb") as stream:
        return pickle.load(stream)  # noqa: S301 - the task's own


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


def _sync(entry: Path) -> None:
    """Writes a file, or a folder with everything in it, to the disk."""
    for path in (*entry.rglob("*"), entry):
        if path.is_dir():
            sync_folder(path)
        elif not path.is_symlink():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
