"""A thread for the callbacks of futures: in that of the connection, one that used the pool would wait for itself."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

# That of the standard library, which logs what callbacks raise in the same words.
_logger = logging.getLogger("concurrent.futures")


class Callbacks:
    """Calls what it is given, one after the other, in a thread that runs while there is something to call.

    A program that ends waits for it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops what waits: in a forked process, where the thread is not."""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[Any], object], object]] = deque()
        self._runs = False

    def call(self, callback: Callable[[Any], object], future: object) -> None:
        """Calls *callback* with *future* soon."""
        with self._lock:
            self._waiting.append((callback, future))
            if self._runs:
                return
            self._runs = True
        try:
            threading.Thread(target=self._run, name="skyinfra-callbacks").start()
        except RuntimeError:  # this process may start no more threads, or ends
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
                callback, future = self._waiting.popleft()
            try:
                callback(future)
            except BaseException:
                _logger.exception("exception calling callback for %r", future)
            del callback, future


CALLBACKS = Callbacks()
os.register_at_fork(after_in_child=CALLBACKS.forget)
