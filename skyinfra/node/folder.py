"""The node's directory, the folder of the node configuration: its files, and the lock of the runner that serves it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, TextIO

from skyinfra.errors import InvalidNodeConfig, NodeFailed, StateDirectoryError
from skyinfra.node import processes
from skyinfra.node.processes import poll
from skyinfra.protocol import interruption
from skyinfra.protocol.instance import InstanceInfo

VERSION = 1

State = Literal["starting", "partitioning", "draining", "drained", "serving", "ready", "failed", "stopped"]

# Fields of `Status` that stand in status.json as they are.
_PLAIN = ("fleet", "node", "state", "pid", "scheduler", "config_sha256", "generation", "simulated")
_HINTS = {
    errno.ENOSPC: "The disk is full: free some space, or declare a larger disk (disk_gb, for jobs head_volume_gb).",
    errno.EDQUOT: "The quota is used up: free some space, or raise the quota.",
    errno.EROFS: "The file system is mounted read-only: remount it, or look in the kernel log for the reason.",
    errno.EACCES: "The runner's user may not write there: change the owner of the directory to that user.",
    errno.EPERM: "The runner's user may not write there: change the owner of the directory to that user.",
    errno.ENOTDIR: "A part of the path is a file: choose a directory for the node configuration.",
}
# Of a document that one account leaves for another.
_LARGEST = 2**20
# Characters of one that is a sentence.
_SENTENCE = 500
# `holder` takes the lock for an instant; a starting runner waits that long for it.
_LOCK_PATIENCE_S = 1.0
# Where the services of a cloud node that have users of their own leave messages, each in a folder of its own.
_RUN = Path("/run")
# Where systemd has the units that a node was given, and links of the enabled ones in folders of what wants them.
_UNITS = Path("/etc/systemd/system")


@dataclass(frozen=True)
class Status:
    """The content of ``status.json``.

    state: ``starting`` (installing), ``partitioning``, ``draining`` (slots that go wait for their tasks), ``serving``
    (workers start), ``ready`` (every slot is registered with the scheduler), ``drained`` (out of service, see
    ``drain_reason``), ``failed`` (see ``error``), ``stopped``.
    config_sha256: the hash of the node configuration to which the state belongs.
    generation: the number of configurations that this runner has applied; a second `boot` waits for it to grow.
    error: class name and message of the current error, also while the runner tries again.
    layouts: the desired layout of each GPU, such as ``3g.40gb+1g.10gb*2``; empty where GPUs are not partitioned.
    layout_from: where that layout comes from, see `skyinfra.desired`.
    waits_for: what a draining node waits for, a sentence for each slot.
    drain_reason: why the node is drained, or None. unwarned: why no preemption notice can be read, or None.
    unwatched: what is missing of that which starts the runner again or reads for it, or None.
    stops: that the node ends soon, or why it has ended by itself, or None.
    """

    fleet: str
    node: str
    state: State
    config_sha256: str
    pid: int | None = None
    scheduler: str | None = None
    simulated: bool = False
    error: tuple[str, str] | None = None
    slots: tuple[InstanceInfo, ...] = field(default=())
    generation: int = 0
    layouts: tuple[str, ...] = ()
    layout_from: str = "node.json"
    waits_for: tuple[str, ...] = ()
    drain_reason: str | None = None
    unwarned: str | None = None
    unwatched: str | None = None
    stops: str | None = None

    def dumps(self) -> str:
        """Returns the text of ``status.json``."""
        error = {"class": self.error[0], "message": self.error[1]} if self.error else None
        document = {
            "version": VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "error": error,
            "layout": {"from": self.layout_from, "gpus": list(self.layouts)},
            "waits_for": list(self.waits_for),
            "drain_reason": self.drain_reason,
            "leaving": self.drain_reason,  # its name in the version before
            "unwarned": self.unwarned,
            "unwatched": self.unwatched,
            "stops": self.stops,
            "slots": [slot.to_json() for slot in self.slots],
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> Status:
        """Returns the inverse of `dumps`. Raises ValueError, KeyError, `InvalidNodeConfig`."""
        document = json.loads(text)
        error, layout = document["error"], document["layout"]
        return cls(
            **{name: document[name] for name in _PLAIN},
            error=(error["class"], error["message"]) if error else None,
            slots=tuple(InstanceInfo.read(slot, source="status.json") for slot in document["slots"]),
            layouts=tuple(layout["gpus"]),
            layout_from=layout["from"],
            waits_for=tuple(document["waits_for"]),
            drain_reason=document.get("drain_reason", document.get("leaving")),
            unwarned=document.get("unwarned"),
            unwatched=document.get("unwatched"),
            stops=document.get("stops"),
        )


def _named(folder: Path, name: str, *, before: str) -> Path:
    """Returns the file *name*; that named as the version *before* names it, where a node of that version has it.

    What watches for notices may not look into the folder, and has no use for either.
    """
    known = folder / before
    return known if os.path.exists(known) else folder / name  # noqa: PTH110 - Path.exists raises where it may not look


class NodeDirectory:
    """The directory *path* of one node. Every write that fails raises `StateDirectoryError`.

    The folders of other rooms are ``tasks/``, the output of each task; ``running/``, the task on each slot;
    ``blobs/``, synced files, and large calls and results, on the head for the whole fleet; ``trees/``, synced files as
    tasks see them; ``files/``, what clients put there, see `sky.files`; on the head ``kept/``, synced files that jobs
    need, see `skyinfra.head.kept_trees`. On a head whose jobs outlive it, ``jobs/`` and ``kept/`` are links to where
    they lie.

    *root*: the folder of the node configuration, where it is another one: root's, for what root alone writes.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self._has_services = root is not None
        root = root or path
        # The state of the node (`Status`), replaced atomically.
        self.status_file = path / "status.json"
        # On the head: ``HOST:PORT`` where the scheduler listens.
        self.scheduler_file = path / "scheduler"
        self.pid_file = path / "runner.pid"
        # Locked for as long as a runner serves the directory.
        self.lock_file = path / "runner.lock"
        # Output of a detached runner; the log of one whose output goes elsewhere.
        self.log_file = path / "runner.log"
        # Process id of the watchdog of a detached runner, which locks the file.
        self.watchdog_file = _named(path, "watchdog.pid", before="keeper.pid")
        # That the machine was rebooted to activate a MIG mode, see `RebootGuard`.
        self.reboot_file = root / "reboot.json"
        # The partitions that root made, where the runner is not root, see `skyinfra.gpu.record`.
        self.actual_file = root / "actual-layout.json"
        # What the runner knows of the desired layout, and asks of root, see `skyinfra.desired.file`.
        self.desired_file = path / "desired-layout.json"
        self.prepared_file = path / "prepared.json"
        # What the tasks that run have used so far, see `skyinfra.readings.figures`.
        self.figures_file = path / "figures.json"
        self.simulated_file = path / "simulated.json"
        # The request to drain the node, see `skyinfra.drain.request`; meanwhile the message for its tasks.
        self.drain_file = path / "drain.json"
        self.interrupted_file = path / interruption.FILE
        # The preemption notice that was handled last.
        self.handled_notice_file = _named(path, "handled-notice", before="followed")
        # On the head: the journal of its jobs, see `skyinfra.head.journal`.
        self.jobs = path / "jobs"
        self.packages = path / "site-packages"
        self.scratch = path / "scratch"
        self._lock_id: tuple[int, int] | None = None

    def write(self, file: Path, text: str, *, durable: bool = False) -> None:
        """Replaces *file* (in this directory) with *text*; readers see the old or the new text, never a part.

        *durable*: also after a power cut. What was made in the place of a directory that this process held belongs to
        another one.
        """
        if self.lost:
            raise StateDirectoryError("was removed", field=str(self.path))
        replace_file(file, text, durable=durable)

    def said_by(self, service: str) -> Path:
        """Returns the folder in which ``skyinfra-SERVICE`` leaves messages for the runner.

        It is the service's own where that has a user of its own, as on cloud nodes, and this directory elsewhere.
        """
        own = _RUN / f"skyinfra-{service}"
        return own if self._has_services and own.is_dir() else self.path

    def own_folder_of(self, service: str) -> bool:
        """Returns whether ``skyinfra-SERVICE`` runs with a user of its own: systemd removes its folder when it ends."""
        return self._has_services and (_RUN / f"skyinfra-{service}").is_dir()

    def has_enabled(self, service: str) -> bool:
        """Returns whether ``skyinfra-SERVICE`` is enabled on this node, and has a folder while it runs.

        That of a node of before may have none.
        """
        if not self._has_services or not any(_UNITS.glob(f"*.wants/skyinfra-{service}.service")):
            return False
        try:
            return f"RuntimeDirectory=skyinfra-{service}\n" in (_UNITS / f"skyinfra-{service}.service").read_text()
        except (OSError, UnicodeDecodeError):
            return False

    @property
    def notice_file(self) -> Path:
        """The preemption notice of the provider, see `skyinfra.drain.preemption`."""
        return self.said_by("interrupt") / "notice.json"

    @property
    def unwarned_file(self) -> Path:
        """Why no preemption notice can be read; it is there for as long as none can."""
        return self.said_by("interrupt") / "unwarned"

    @property
    def declared_file(self) -> Path:
        """On the head: the text that the provider's metadata has for the layout, see `skyinfra.runner.watch`."""
        return self.said_by("watch") / "declared-layout"

    def status(self) -> Status | None:
        """Reads ``status.json``; returns None where no runner, or only one of another version, has served here."""
        try:
            return Status.loads(self.status_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, InvalidNodeConfig):
            return None

    def unwarned(self) -> str | None:
        """Returns why the node will not be warned before the provider takes it back; None where it will be."""
        try:
            return " ".join(message(self.unwarned_file).split())[:_SENTENCE]
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"{self.unwarned_file} cannot be read: {error}"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the directory: no second runner can serve it meanwhile. Raises `NodeFailed` where one does."""
        with writing(self.lock_file):
            stream = self.lock_file.open("a")
        with stream:
            if not poll(lambda: locked(stream, fcntl.LOCK_EX), _LOCK_PATIENCE_S):
                hint = (
                    "Run `skyinfra-runner boot --detach` to apply a changed configuration, or `skyinfra-runner stop`."
                )
                text = f"another runner (process {self.holder()}) serves this node"
                raise NodeFailed(text, field=str(self.path), hint=hint)
            self._lock_id = _identity(os.fstat(stream.fileno()))
            self.write(self.pid_file, f"{os.getpid()}\n")
            try:
                yield
            finally:
                if not self.lost:
                    self.pid_file.unlink(missing_ok=True)

    @property
    def lost(self) -> bool:
        """Whether the directory that this process holds was removed, or replaced by another one."""
        try:
            return self._lock_id is not None and _identity(self.lock_file.stat()) != self._lock_id
        except (FileNotFoundError, NotADirectoryError):
            return True

    def holder(self) -> int | None:
        """Returns the process id of the runner that serves this directory, or None. A stale file does not count."""
        try:
            stream = self.lock_file.open("r")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            # For a service with a user of its own.
            with contextlib.suppress(StateDirectoryError):
                pid = self.process_in(self.pid_file)
                return pid if pid is not None and processes.owner(pid) is not None else None
            return None
        with stream:
            if locked(stream, fcntl.LOCK_SH):
                return None
        # A runner writes it right after it has locked the directory.
        poll(self.pid_file.exists, _LOCK_PATIENCE_S)
        return self.process_in(self.pid_file)

    def process_in(self, file: Path) -> int | None:
        """Returns the process id in *file* of this directory; None without one.

        Whoever owns the directory chose it, and root sends signals to it: raises `StateDirectoryError` where the
        process is another account's.
        """
        try:
            pid = int(file.read_text(encoding="utf-8"))
            owner, other = file.parent.stat().st_uid, processes.owner(pid)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        if owner != 0 and other not in (None, owner):
            raise StateDirectoryError(
                f"names the process {processes.describe(pid)}, which is not of the folder's owner",
                field=str(file),
                hint="Nothing was sent to it. Have the owner of the folder remove that file.",
            )
        return pid

    def log_tail(self, lines: int = 20) -> str:
        """Returns the last *lines* of the log of a detached runner; empty where there is none."""
        text = self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def replace_file(file: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replaces *file* with *content* atomically, text as UTF-8. *durable*: also writes it to the disk.

    Root writes into folders of another user, who may put links there: no link is followed. Raises
    `StateDirectoryError`.
    """
    with writing(file):
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                os.fchmod(stream.fileno(), 0o644)
                stream.write(content.encode() if isinstance(content, str) else content)
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            Path(name).replace(file)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(file.parent)


def message(file: Path) -> str:
    """Returns the text of *file*, which one account leaves for another in a folder: the runner for root.

    It may be anything that its author can put there. Raises OSError for what is no file of the folder's owner or of
    root, or has more than a message needs; no link is followed, and no pipe waited for. Raises ValueError.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(error.errno, "it is a link" if error.errno == errno.ELOOP else error.strerror) from None
    try:
        found = os.fstat(handle)
        # A second name may have been given to another account's file.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(errno.EINVAL, "it is no file, or one with several names")
        if found.st_uid not in (0, file.parent.stat().st_uid):
            raise OSError(errno.EPERM, "it belongs neither to the owner of its folder nor to root")
        with open(handle, "rb", closefd=False) as stream:
            data = stream.read(_LARGEST + 1)
    finally:
        os.close(handle)
    if len(data) > _LARGEST:
        raise OSError(errno.EFBIG, f"it has more than {_LARGEST} bytes")
    return data.decode()


def stamp(file: Path) -> tuple[int, int, int] | None:
    """Returns what changes whenever *file* does; None without the file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def newer(file: Path, other: Path) -> bool:
    """Returns whether there is a *file*, and no *other*, or one that was written before it. No link is followed."""
    found, known = _written(file), _written(other)
    return found is not None and (known is None or found > known)


def _written(file: Path) -> int | None:
    try:
        found = file.lstat()
    except OSError:
        return None
    return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else None


def sync_folder(path: Path) -> None:
    """Writes the names in the folder *path* to the disk, of a file its content. Raises OSError."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def locked(stream: IO[str], kind: int) -> bool:
    """Takes the lock *kind* of fcntl on *stream* without waiting; returns whether it could."""
    try:
        fcntl.flock(stream.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def appending(file: Path) -> TextIO:
    """Opens *file* for appending. Refuses a link with OSError, and does not wait for a pipe."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(os.open(file, flags, 0o644), "a", encoding="utf-8")


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino


def _free(path: Path) -> str:
    """Returns how much of the disk of *path* is free, in words."""
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return ""
    free, total = (blocks * disk.f_frsize / 1e6 for blocks in (disk.f_bavail, disk.f_blocks))
    return f": {free:.0f} of {total:.0f} MB are free on {path.parent}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the body into a `StateDirectoryError` about *path*."""
    try:
        yield
    except OSError as error:
        raise StateDirectoryError(
            f"cannot be written: {error.strerror or error}{_free(path) if error.errno == errno.ENOSPC else ''}",
            field=str(path),
            hint=_HINTS.get(error.errno or 0, "Look in the kernel log for the reason, then start the runner again."),
        ) from error
