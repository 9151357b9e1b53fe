"""``skyinfra-runner drain``, ``undrain`` and ``interrupt``: taking a node out of service, and back into it."""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from skyinfra.drain import request
from skyinfra.drain.request import Drain
from skyinfra.errors import InvalidField, NodeFailed
from skyinfra.node.folder import NodeDirectory, Status
from skyinfra.protocol.nodeconfig import NodeConfig

_POLL_S = 0.1
# Beyond the time that tasks have: their workers are ended then, and the head is told.
_SLACK_S = 30.0
_BACK_S = 120.0
_LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


_Commands = Any  # argparse's own class for them is private and not generic at run time
_Command = Callable[[_Commands, str, object, str], argparse.ArgumentParser]


def add(commands: _Commands, command: _Command) -> None:
    """Adds the commands by *command*, which gives them ``--config``."""
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
    directory = NodeDirectory(options.config.absolute().parent)
    request.write(directory, Drain(request.VERSION, request.OPERATOR, options.reason, time.time() + timeout))
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
    directory = NodeDirectory(options.config.absolute().parent)
    asked = request.clear(directory)
    if directory.holder() is None:
        print(f"No runner serves node {config.node}; it will have slots when one does.")
        return 0
    status = _wait(config.node, directory, lambda status: status.state == "ready" and status.leaving is None, _BACK_S)
    print(f"Node {status.node} is in service{'' if asked else ', as it was'}: {len(status.slots)} slots.")
    return 0


def _wait(node: str, directory: NodeDirectory, done: Callable[[Status], bool], patience_s: float) -> Status:
    """Waits until what the node is doing is *done*, and says what it waits for. Raises `NodeFailed`."""
    told: tuple[str, ...] = ()
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        status = directory.status()
        if status is not None and done(status):
            return status
        if directory.holder() is None:
            raise NodeFailed(f"the runner of node {node} ended meanwhile", field=str(directory.path))
        if status is not None and status.waits_for and status.waits_for != told:
            told = status.waits_for
            print(f"waiting: {'; '.join(told)}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
    found = directory.status()
    state = "has no status" if found is None else f"is {found.state}"
    reason = f": {': '.join(found.error)}" if found is not None and found.error is not None else ""
    raise NodeFailed(f"node {node} {state} after {patience_s:g} s{reason}", field=str(directory.path))


def _interrupt(options: argparse.Namespace) -> int:
    from skyinfra.drain.preemption import Interrupt

    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    watcher = Interrupt(options.config)
    if options.once:
        watcher.look()
    else:
        watcher.run()
    return 0
