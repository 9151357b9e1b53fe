"""A runner in the background: starting one, telling a running one of a changed configuration, ending it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import skyinfra
from skyinfra.errors import NodeFailed
from skyinfra.node import processes
from skyinfra.node.folder import NodeDirectory, Status, writing
from skyinfra.node.node import Node, file_sha256

_POLL_S = 0.05
_KILL_PATIENCE_S = 10.0


def boot(path: Path, *, wait_s: float) -> Status:
    """Makes sure that a runner in the background serves the node *path* as its configuration says now.

    A runner that serves it already is told to read its configuration again; else one is started. Returns once every
    slot is ready; the time in which tasks end on slots that go does not count. Raises `NodeFailed` with the node's
    error and the end of its log; a runner that was started here does not outlive that.
    """
    node = Node.load(path)
    directory = NodeDirectory(path.parent)
    pid = directory.holder()
    if pid is None:
        try:
            return _start(node, directory, wait_s)
        except NodeFailed:
            # Somebody else may have started one in the same moment.
            pid = directory.holder()
            if pid is None:
                raise
    return _update(node, directory, pid, wait_s)


def stop(directory: NodeDirectory, *, timeout_s: float) -> bool:
    """Ends the runner that serves *directory*, and all its processes. False where none does.

    It has *timeout_s* seconds to end by itself, then its session is killed. Raises `NodeFailed` where that did
    not help.
    """
    pid = directory.holder()
    if pid is None:
        return False
    leads_session = os.getsid(pid) == pid
    os.kill(pid, signal.SIGTERM)
    if not poll(lambda: directory.holder() != pid, timeout_s):
        os.kill(pid, signal.SIGKILL)
        if not poll(lambda: directory.holder() != pid, _KILL_PATIENCE_S):
            raise NodeFailed(f"the runner (process {pid}) cannot be killed", field=str(directory.path))
    if leads_session:
        _end_session(pid)
    status = directory.status()
    if status is not None and status.state not in ("stopped", "failed"):
        directory.write(directory.status_file, replace(status, state="stopped", pid=None, slots=()).dumps())
    return True


def _update(node: Node, directory: NodeDirectory, pid: int, wait_s: float) -> Status:
    before = directory.status()
    seen = before.generation if before is not None and before.pid == pid else 0
    os.kill(pid, signal.SIGHUP)

    def applied(status: Status) -> bool:
        return status.pid == pid and status.config_sha256 == node.sha256 and status.generation > seen

    return _wait(node, directory, wait_s, applied, lambda: directory.holder() == pid)


def _start(node: Node, directory: NodeDirectory, wait_s: float) -> Status:
    with writing(directory.log_file):
        log = directory.log_file.open("ab")
    with log:
        process = subprocess.Popen(
            command("boot", node.path), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        return _wait(node, directory, wait_s, lambda status: status.pid == process.pid, lambda: process.poll() is None)
    except BaseException:
        _terminate(process)
        raise


def command(name: str, path: Path, *options: str) -> list[str]:
    """What runs the command *name* of skyinfra-runner for the node *path*, in a process that goes on without this."""
    # Running `-m` puts the current folder on the import path, where any file could shadow a module.
    safe = [] if Path(skyinfra.__file__).parents[1] == Path.cwd() else ["-P"]
    return [sys.executable, *safe, "-m", "skyinfra.runner", name, "--config", str(path.absolute()), *options]


def _wait(
    node: Node,
    directory: NodeDirectory,
    wait_s: float,
    concerns: Callable[[Status], bool],
    alive: Callable[[], bool],
) -> Status:
    """Waits for a status that *concerns* the request and is final. Raises `NodeFailed`."""
    status: Status | None = None
    told: tuple[str, ...] = ()
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        # Asked before the status is read: what the runner wrote last is seen.
        living = alive()
        current = directory.status()
        status = current if current is not None and concerns(current) else None
        if status is not None and status.state in ("ready", "drained"):
            return status
        if status is not None and status.state == "failed":
            if status.generation == 0:
                # It ends by itself, and may still have something to say in its log.
                poll(lambda: not alive(), _KILL_PATIENCE_S)
            raise _failed(node, directory, status, "did not come up")
        if not living:
            raise _failed(node, directory, status, "ended")
        if status is None and file_sha256(node.path) != node.sha256:
            raise NodeFailed(
                f"node {node.name} has got another configuration while this one was waited for", field=str(node.path)
            )
        if current is not None and current.state == "draining":
            # Tasks have their own patience, which the node's configuration says; it ends there.
            deadline += _POLL_S
            told = _tell(node, current.waits_for, told)
        time.sleep(_POLL_S)
    raise _failed(node, directory, status, f"was not ready within {wait_s:g} s")


def _tell(node: Node, waits_for: tuple[str, ...], told: tuple[str, ...]) -> tuple[str, ...]:
    """Says what a node that is draining waits for, where that is news."""
    if waits_for and waits_for != told:
        # `skyinfra deploy` shows the lines of a local node that begin so.
        text = f"skyinfra: waiting: node {node.name}: tasks end on slots that go: {'; '.join(waits_for)}"
        print(text, file=sys.stderr, flush=True)
    return waits_for or told


def _failed(node: Node, directory: NodeDirectory, status: Status | None, what: str) -> NodeFailed:
    reason = ": ".join(status.error) if status is not None and status.error is not None else ""
    message = f"node {node.name} {what}" + (f": {reason}" if reason else "")
    tail = directory.log_tail()
    return NodeFailed(message, hint=f"The end of {directory.log_file}:\n{tail}" if tail else None)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _end_session(process.pid)


def _end_session(session: int) -> None:
    """Kills what is left of the session of a detached runner that has ended, and waits until nothing is."""
    # Dask's helper processes end by themselves when the runner is gone.
    if poll(lambda: not processes.of_session(session), 1.0):
        return
    for process in processes.of_session(session):
        process.kill()
    poll(lambda: not processes.of_session(session), _KILL_PATIENCE_S)


def poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until *condition*, but no longer than *seconds*; whether it came to be."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
