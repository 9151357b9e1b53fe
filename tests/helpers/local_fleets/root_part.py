"""Root's part of a node whose runner is not root, done by a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from local_fleets.running_node import RunningNode
from skyinfra.node.folder import stamp
from skyinfra.runner import cli


@contextlib.contextmanager
def root(node: RunningNode) -> Iterator[list[int]]:
    """Does the work of the path unit: runs root's part whenever the runner has written its file. Gives the exit codes.

    Those of runs for which there was no request are not among them: they have to do nothing.
    """
    codes: list[int] = []
    over = threading.Event()
    seen = stamp(node.directory.desired_file)

    def serve() -> None:
        nonlocal seen
        while not over.wait(0.05):
            now, before = stamp(node.directory.desired_file), stamp(node.directory.actual_file)
            if now != seen and before is not None:
                seen = now
                code = cli.main(["partition", "--config", str(node.file), "--on-request"])
                if code or stamp(node.directory.actual_file) != before:
                    codes.append(code)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield codes
    finally:
        over.set()
        thread.join()
