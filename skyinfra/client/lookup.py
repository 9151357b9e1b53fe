"""Connecting to a fleet, which is found from its stack's Terraform outputs, or from a manifest file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from skyinfra.client import files
from skyinfra.client.pool import Pool
from skyinfra.client.questions import Questions
from skyinfra.engine.termination import leave_on_signals
from skyinfra.errors import (
    BootFailed,
    FleetUnreachable,
    InvalidField,
    check_kind,
    check_mapping,
    refuses_unknown_options,
)
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import Node
from skyinfra.protocol.instance import NODE_CONFIG, NODE_DIRECTORY, InstanceInfo, instance_info
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot
from skyinfra.protocol.secrets import Secret
from skyinfra.submission.connection import Limits, boot_failed
from skyinfra.submission.fleet import AskedFleet, Fleet
from skyinfra.submission.snapshot import Snapshot
from skyinfra.submission.watching import OnOutput, Watcher
from skyinfra.sync import project
from skyinfra.terraform.project import Project
from skyinfra.worker import interruption

_PATIENCE_S = 30.0
_TIMEOUT_S = 15.0
_LOOK_S = 2.0
_CONNECT_S = 5.0
# The pool of the task that runs in this process, and the process: a forked one has none.
_current: tuple[int, Pool | None] = 0, None


@refuses_unknown_options("sky.connect")
def connect(
    fleet: str | Path | Manifest,
    pool: str | None = None,
    *,
    timeout: float | None = None,
    output: bool | OnOutput = True,
    progress: bool = True,
    includes: Sequence[str | Path] = (),
    excludes: Sequence[str] = (),
    secrets: Sequence[str | Secret] = (),
    workdir: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Pool:
    """Returns a connection to a deployed fleet; close it, or use it in a ``with`` block.

    fleet: name of the stack, with the pool's name as *pool* or as ``"STACK/POOL"``; the pool may be left out where
    the stack has one. Or a manifest file (a path, or a string that ends in ``.json``), for machines that have no
    Terraform. timeout: seconds until the head must have answered; without it 15, but none for a head whose port is
    closed, as while it starts again. output: what tasks and their subprocesses print is printed here too, line by line,
    with the slot in front; False: it is not, and a function is called with slot and line instead. progress: how far
    maps, gathers and tasks that call `skyinfra.progress` are is shown on stderr, as bars where someone watches.
    includes: files and folders that tasks are to have, such as the package they are in, without *excludes*; see
    `Pool.sync`. workdir: a folder that tasks have besides, without what Git ignores and what .skyinfraignore lists;
    each begins in a copy of it, which is removed with what it has written there. env: variables of all tasks, above
    those of the image; no secrets. secrets: names of secrets that every task is given, see `Secret`.

    Raises `InvalidField`, `ProjectNotFound`, `AppFailed`, `StackNotFound`, `PoolNotFound`, `TerraformNotFound`,
    `TerraformFailed`, `FleetNotDeployed`, `InvalidManifest`, `FleetUnreachable`, `CredentialsRefused`,
    `VersionMismatch`, `UnsafeAnswer`, `InvalidInclude`.
    """
    _check(timeout=timeout, output=output, progress=progress, includes=includes, excludes=excludes)
    check_mapping("env", env or {})
    folder = None if workdir is None else project.given_folder(workdir, "workdir")
    manifest = find_manifest(fleet, pool)
    made = open_pool(
        manifest,
        timeout=_TIMEOUT_S if timeout is None else timeout,
        closed=timeout is not None,
        output=output,
        progress=progress,
        includes=() if folder else includes,
        excludes=excludes,
        secrets=secrets,
    )
    made._fleet.env = dict(env or {})
    if folder is not None:
        with _closed_on_error(made):
            files.send_project(made._fleet, folder, [Path(each).absolute() for each in includes], excludes)
            made._fleet.workdir = "."
    return made


def _check(**given: object) -> None:
    """Raises `InvalidField` for an option of `connect` that is not what it takes."""
    for name, value in given.items():
        if name == "timeout" and value is not None:
            check_kind(name, value, (int, float), "seconds")
        elif name == "progress":
            check_kind(name, value, bool, "True or False")
        elif name == "output" and not callable(value):
            check_kind(name, value, bool, "True, False, or a function of slot and line")
        elif name in ("includes", "excludes"):
            check_kind(name, value, (list, tuple), "a list, such as ['src']")


def open_pool(
    manifest: Manifest,
    *,
    timeout: float = _TIMEOUT_S,
    patience: float = _PATIENCE_S,
    closed: bool = True,
    output: bool | OnOutput = True,
    progress: bool = True,
    includes: Sequence[str | Path] = (),
    excludes: Sequence[str] = (),
    secrets: Sequence[str | Secret] = (),
) -> Pool:
    """Connects to the fleet of *manifest*, and syncs *includes* without *excludes*, see `Pool.sync`.

    output, progress, secrets: see `connect`. closed: see `Limits`. timeout: seconds for the connection. patience:
    seconds for which the head or a slot may be gone before those who wait for it get `FleetUnreachable` or `SlotLost`;
    worker processes and heads that restart are back before. SIGTERM ends the program as Ctrl-C does from then on, see
    `leave_on_signals`. Raises `FleetUnreachable`, `CredentialsRefused`,
    `VersionMismatch`, `InvalidManifest`, `InvalidInclude`.
    """
    leave_on_signals()
    watcher = Watcher(output, progress=progress)
    pool = Pool(Fleet(manifest, Limits(timeout, patience, closed), watcher=watcher, secrets=secrets))
    if includes:
        with _closed_on_error(pool):
            pool.sync(*includes, excludes=excludes)
    return pool


@contextlib.contextmanager
def _closed_on_error(pool: Pool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        pool.close()
        raise


def ask(fleet: str | Path | Manifest, pool: str | None = None) -> Questions:
    """Returns a deployed fleet, for who asks it alone: no answer of it runs code here, whatever became of its head.

    Close it, or use it in a ``with`` block. Takes and raises what `connect` does, and raises `UnsafeAnswer`.
    """
    return open_questions(find_manifest(fleet, pool))


def open_questions(
    manifest: Manifest,
    *,
    timeout: float = _TIMEOUT_S,
    patience: float = _PATIENCE_S,
    closed: bool = False,
    any_version: bool = False,
) -> Questions:
    """Asks the fleet of *manifest*; see `ask`, `open_pool` and, for *closed* and *any_version*, `Limits`."""
    return Questions(AskedFleet(manifest, Limits(timeout, patience, closed, any_version)))


def find_manifest(fleet: str | Path | Manifest, pool: str | None = None) -> Manifest:
    """Returns the manifest that `connect` would use. Raises what `connect` raises before it connects."""
    if isinstance(fleet, Manifest):
        return fleet
    if not isinstance(fleet, str | Path):
        raise InvalidField(
            "expected the name of a stack, a manifest file or a Manifest", field="fleet", given=type(fleet).__name__
        )
    if isinstance(fleet, Path) or fleet.endswith(".json"):
        return Manifest.load(Path(fleet))
    stack, _, name = fleet.partition("/")
    synthesized = Project.find().stack(stack)
    return synthesized.fleet(pool or name or synthesized.only_pool)


def current_pool() -> Pool:
    """In a task, the pool of its own fleet: ``with sky.current_pool() as pool: ...``.

    It is connected by what the node has, when it is asked for first, and closed when the task ends, which cancels what
    was not waited for. A task keeps its slot while it waits: where all slots that may run what it waits for are held by
    tasks that wait so, `SlotsHeld` is raised. Raises `NotInTask` outside of a task, and what `connect` raises.
    """
    global _current
    own = instance_info()
    process, pool = _current
    if pool is None or process != os.getpid() or pool._fleet.closed:
        pool = Pool(Fleet(_manifest_here(own), Limits(_TIMEOUT_S, _PATIENCE_S), watcher=Watcher(True, progress=False)))
        _current = os.getpid(), pool
        interruption.at_end(pool.close)
    return pool


def _manifest_here(own: InstanceInfo) -> Manifest:
    """Returns the manifest of the fleet of this node, as its configuration and its head know it."""
    status = NodeDirectory(Path(os.environ[NODE_DIRECTORY])).status()
    if NODE_CONFIG not in os.environ or status is None or status.scheduler is None:
        raise FleetUnreachable(
            "the node of this task does not say where its head is",
            hint="Deploy the fleet with this version of skyinfra.",
        )
    node = Node.load(Path(os.environ[NODE_CONFIG]))
    host, _, port = status.scheduler.rpartition(":")
    config = node.config
    made = Manifest(
        version=1,
        stack=config.stack,
        pool=config.pool,
        provider=config.provider,
        head=Endpoint(host.strip("[]"), int(port)),
        nodes=(ManifestNode(own.node, own.node, "", head=own.head),),
        slots=(),
        secret=node.secret,
        simulated=own.simulated,
    )
    with open_questions(made) as asked:
        now = asked.look()
    here = [slot for slot in now.slots if slot.node == own.node]
    reported = now.state.slots if now.state is not None else {}
    return replace(
        made,
        nodes=tuple(ManifestNode(name, name, "") for name in {**reported, own.node: ()}),
        slots=tuple(ManifestSlot(each.worker, each.kind, each.accelerator, each.profile, each.gpu) for each in here),
    )


def wait_until_ready(manifest: Manifest, *, patience: float, on_change: Callable[[str], object]) -> None:
    """Waits until every slot that the fleet of *manifest* is to have takes tasks.

    patience: seconds. on_change: hears, in words, how far it is, whenever that changes. Raises `BootFailed` as soon as
    a node says that it could not be set up, `FleetUnreachable` after the patience, and what else connecting raises.
    """
    deadline = time.monotonic() + patience
    said = "boots"
    on_change(said)
    while True:
        lost = ""
        try:
            with open_questions(manifest, timeout=_CONNECT_S) as pool:
                while True:
                    there, wanted = _slots(manifest, pool.look())
                    text = f"{there} of {wanted} slots are ready"
                    if text != said:
                        said = text
                        on_change(said)
                    if there >= wanted:
                        return
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_LOOK_S)
        except BootFailed:
            raise
        except FleetUnreachable as error:
            lost = error.message
        if time.monotonic() > deadline:
            raise _late(manifest, patience, lost or said)
        time.sleep(_LOOK_S)


def _slots(manifest: Manifest, now: Snapshot) -> tuple[int, int]:
    """Returns how many slots are there, and how many there are to be: as the nodes that are there say, and as declared
    for the others. Raises `BootFailed`."""
    if now.state is not None and now.state.failed:
        node, failure = sorted(now.state.failed.items())[0]
        raise boot_failed(failure, node=node, fleet=manifest.fleet)
    reported = now.state.slots if now.state is not None else {}
    if not manifest.has_group:
        # The head remembers those that are not declared any more.
        reported = {node.name: reported.get(node.name, ()) for node in manifest.nodes}
    counts = [len(names) for names in reported.values() if names]
    others = max(0, manifest.node_count - len(counts))
    return len(now.slots), sum(counts) + others * len(manifest.slots)


def _late(manifest: Manifest, patience: float, last: str) -> FleetUnreachable:
    return FleetUnreachable(
        f"{manifest.fleet} is not ready {patience:g} s after it was created: {last}",
        hint="It exists, and its nodes go on: `skyinfra status` shows them. A head that cannot be reached from here "
        "needs this machine's address in allow_cidrs; `skyinfra deploy --no-wait` does not wait.",
    )
