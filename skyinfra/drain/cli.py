"""``skyinfra-runner drain``, ``undrain`` and ``interrupt``: draining a node, and taking it back into service."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidField, InvalidNodeConfig, NodeFailed, SkyinfraError, counted
from skyinfra.node.folder import NodeDirectory, Status
from skyinfra.node.node import directory_of
from skyinfra.protocol.nodeconfig import NodeConfig

logger = logging.getLogger("skyinfra.runner")

_POLL_S = 0.1
# After an error of a look.
_RETRY_S = 2.0
# After the tasks' time: their workers end, and the head is informed.
_SLACK_S = 30.0
_BACK_S = 120.0
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def add(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the commands; *command* adds one with ``--config``."""
    text = "take the node out of service: no new tasks; what runs may end, what has not started moves to other nodes"
    parser = command(commands, "drain", _drain, text)
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="end what still runs then; it starts again on other nodes"
    )
    parser.add_argument("--reason", default="drained by hand", metavar="TEXT", help="for status and tasks")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
    command(commands, "undrain", _undrain, "take the node back into service")
    text = "watch for the notices of a provider that takes the machine back, and drain the node in time"
    parser = command(commands, "interrupt", _interrupt, text)
    parser.add_argument("--once", action="store_true", help="look once")


def _drain(options: argparse.Namespace) -> int:
    config = NodeConfig.load(options.config)
    timeout = config.drain_seconds if options.timeout is None else options.timeout
    if not 0 <= timeout < math.inf:
        raise InvalidField("must be at least 0", field="--timeout", given=timeout)
    directory = directory_of(options.config)
    until = time.time() + timeout
    with contextlib.suppress(InvalidNodeConfig):
        present = request.find(directory)
        if present is not None and present.until is not None and present.by != request.OPERATOR:
            until = min(until, present.until)  # the machine may go then
    request.write(directory, Drain(request.VERSION, request.OPERATOR, options.reason, until))
    if directory.holder() is None:
        print(f"No runner serves node {config.node} now; it will not serve before `skyinfra-runner undrain`.")
        return 0
    if options.no_wait:
        print(f"Node {config.node} is being drained; `skyinfra-runner status` shows how far it is.")
        return 0
    status = _wait(config.node, directory, lambda status: status.state == "drained", timeout + _SLACK_S)
    print(f"Node {status.node} is drained; `skyinfra-runner undrain` takes it back into service.")
    return 0


def _undrain(options: argparse.Namespace) -> int:
    config = NodeConfig.load(options.config)
    directory = directory_of(options.config)
    drained = request.clear(directory)
    if directory.holder() is None:
        print(f"No runner serves node {config.node}; it will have slots when one does.")
        return 0
    status = _wait(
        config.node, directory, lambda status: status.state == "ready" and status.drain_reason is None, _BACK_S
    )
    print(f"Node {status.node} is in service{'' if drained else ', as it was'}: {counted(len(status.slots), 'slot')}.")
    return 0


def _wait(node: str, directory: NodeDirectory, done: Callable[[Status], bool], patience_s: float) -> Status:
    """Waits until the status is *done*, and prints what the node waits for. Raises `NodeFailed`."""
    shown: tuple[str, ...] = ()
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        status = directory.status()
        if status is not None and done(status):
            return status
        if directory.holder() is None:
            raise NodeFailed(f"the runner of node {node} ended meanwhile", field=str(directory.path))
        if status is not None and status.waits_for and status.waits_for != shown:
            shown = status.waits_for
            print(f"waiting: {'; '.join(shown)}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
    state = "has no status" if status is None else f"is {status.state}"
    reason = f": {': '.join(status.error)}" if status is not None and status.error is not None else ""
    raise NodeFailed(f"node {node} {state} after {patience_s:g} s{reason}", field=str(directory.path))


def _interrupt(options: argparse.Namespace) -> int:
    from skyinfra.drain.preemption import PreemptionWatch

    watcher = PreemptionWatch(options.config)
    return watch(watcher.poll, once=options.once, pause_s=watcher.pause_s)


def watch(poll: Callable[[], object], *, once: bool, pause_s: float) -> int:
    """Calls *poll* *once*, or without end: an error, which may pass, is logged once."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    last: str | None = None
    while not once:
        try:
            poll()
            last, again_s = None, pause_s
        except SkyinfraError as error:
            if str(error) != last:
                logger.error("%s: %s", type(error).__name__, error)
            last, again_s = str(error), max(pause_s, _RETRY_S)
        time.sleep(again_s)
    poll()
    return 0
