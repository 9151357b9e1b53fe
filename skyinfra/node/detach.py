"""A runner in the background: starting it, applying a changed configuration, ending it."""

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
from skyinfra.node.node import Node, directory_of, file_sha256
from skyinfra.node.processes import poll

# Is set for a runner that is started here, and inherited by all that it and its tasks start: its folder. modules/local
# knows it too.
VARIABLE = "SKYINFRA_RUNNER_OF"
_POLL_S = 0.05
_KILL_PATIENCE_S = 10.0


def boot(path: Path, *, wait_s: float) -> Status:
    """Makes a runner in the background serve the node *path* with its current configuration.

    A running one reads its configuration again; else one is started. Returns once every slot is ready. Raises
    `NodeFailed`, with the node's error and the end of its log, on an error or after *wait_s* seconds, in which draining
    does not count; a runner that was started here is ended then.
    """
    node = Node.load(path)
    directory = directory_of(path)
    pid = directory.holder()
    if pid is None:
        try:
            return _start(node, directory, wait_s)
        except NodeFailed:
            # Another process may have started one in the same moment.
            pid = directory.holder()
            if pid is None:
                raise
    return _update(node, directory, pid, wait_s)


def stop(directory: NodeDirectory, *, timeout_s: float) -> bool:
    """Ends the runner that serves *directory*, and all its processes. Returns False where none does.

    The runner is killed after *timeout_s* seconds. Raises `NodeFailed` where it cannot be.
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
        _end_rest(pid, directory)
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
    process = spawn(directory, "boot", node.path)
    try:
        return _wait(node, directory, wait_s, lambda status: status.pid == process.pid, lambda: process.poll() is None)
    except BaseException:
        if process.poll() is None:
            processes.end([process.pid], grace_s=_KILL_PATIENCE_S)
            process.wait()
        _end_rest(process.pid, directory)
        raise


def end_left() -> None:
    """Ends what tasks of this runner have left in sessions of their own, where it was started by `boot`."""
    if folder := os.environ.get(VARIABLE):
        # The helpers of the runner end by themselves.
        spared = {each.id for each in processes.descendants(os.getpid())}
        for process in processes.marked({VARIABLE: folder}):
            if process.id not in spared:
                process.kill()


def spawn(directory: NodeDirectory, name: str, path: Path, *options: str) -> subprocess.Popen[bytes]:
    """Starts the command *name* of skyinfra-runner for the node *path* in a session of its own, with the node's log.

    Raises `StateDirectoryError`.
    """
    # Running `-m` puts the current folder on the import path, where any file could shadow a module.
    safe = [] if Path(skyinfra.__file__).parents[1] == Path.cwd() else ["-P"]
    command = [sys.executable, *safe, "-m", "skyinfra.runner", name, "--config", str(path.absolute()), *options]
    with writing(directory.log_file):
        log = directory.log_file.open("ab")
    env = {**os.environ, VARIABLE: str(directory.path)}
    with log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env
        )


def _wait(
    node: Node, directory: NodeDirectory, wait_s: float, concerns: Callable[[Status], bool], alive: Callable[[], bool]
) -> Status:
    """Waits for a final status that *concerns* the request. Raises `NodeFailed`."""
    status: Status | None = None
    shown: tuple[str, ...] = ()
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        # Checked before the status is read, so that the last status is seen.
        living = alive()
        current = directory.status()
        status = current if current is not None and concerns(current) else None
        if status is not None and status.state in ("ready", "drained"):
            return status
        if status is not None and status.state == "failed":
            if status.generation == 0:
                # It ends by itself, and may still write to its log.
                poll(lambda: not alive(), _KILL_PATIENCE_S)
            raise _failed(node, directory, status, "did not come up")
        if not living:
            raise _failed(node, directory, status, "ended")
        if status is None and file_sha256(node.path) != node.sha256:
            raise NodeFailed(
                f"node {node.name} has got another configuration while this one was waited for", field=str(node.path)
            )
        if current is not None and current.state == "draining":
            # The node's configuration limits the time of draining.
            deadline += _POLL_S
            if current.waits_for and current.waits_for != shown:
                # `skyinfra deploy` shows the lines of a local node that begin so.
                shown = current.waits_for
                text = f"skyinfra: waiting: node {node.name}: tasks end on slots that go: {'; '.join(shown)}"
                print(text, file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
    raise _failed(node, directory, status, f"was not ready within {wait_s:g} s")


def _failed(node: Node, directory: NodeDirectory, status: Status | None, what: str) -> NodeFailed:
    reason = ": ".join(status.error) if status is not None and status.error is not None else ""
    message = f"node {node.name} {what}" + (f": {reason}" if reason else "")
    if reason:
        # It says all; the end of the log would say it again.
        return NodeFailed(message, hint=f"Its log is {directory.log_file}.")
    tail = directory.log_tail()
    return NodeFailed(message, hint=f"The end of {directory.log_file}:\n{tail}" if tail else None)


def _end_rest(session: int, directory: NodeDirectory) -> None:
    """Ends the remaining processes of a detached runner that has ended: those of its *session*, and what its tasks have
    started in others."""

    def left() -> list[processes.Process]:
        return [*processes.of_session(session), *processes.marked({VARIABLE: str(directory.path)})]

    # Dask's helper processes end by themselves when the runner is gone.
    if poll(lambda: not left(), 1.0):
        return
    for process in left():
        process.kill()
    poll(lambda: not left(), _KILL_PATIENCE_S)
