"""Imports the modules that every synth needs, while the library that synthesizes waits for its Node to start.

Only in a program that cdktf or ``skyinfra synth`` runs, which Ctrl-C ends without a traceback then. It helps where
``import skyinfra`` stands before the import of that library.
"""

from __future__ import annotations

import contextlib

# Packages that both sides import: whoever imports a part of a package while another thread is in the middle of the
# package may find it half made.
import email.message  # noqa: F401
import importlib.metadata
import importlib.resources  # noqa: F401
import json  # noqa: F401
import threading
import urllib.parse  # noqa: F401
from importlib import _bootstrap

from skyinfra.terraform import unchanged
from skyinfra.terraform.interrupts import hush_program

_LOOK_S = 0.02
_thread: threading.Thread | None = None


def start() -> None:
    """Begins. An import that fails here fails again, with its error, where it is needed."""
    hush_program()
    unchanged.record()
    global _thread
    _thread = threading.Thread(target=_read, name="skyinfra-ahead")
    _thread.start()


def wait() -> None:
    """Waits for the imports that have begun, so that no two threads import skyinfra's own modules; not where they wait
    for a module that this thread imports."""
    if _thread is None or _thread is threading.current_thread():
        return
    while _thread.is_alive() and not _waits_for_this_thread(_thread):
        _thread.join(_LOOK_S)


def _waits_for_this_thread(thread: threading.Thread) -> bool:
    # Of importlib: the locks of modules for which threads wait; before Python 3.12 one of a thread.
    locks = getattr(_bootstrap, "_blocking_on", {}).get(thread.ident) or []
    locks = locks if isinstance(locks, list) else [locks]
    return any(threading.get_ident() == getattr(lock, "owner", None) for lock in locks)


def _read() -> None:
    with contextlib.suppress(Exception):
        from skyinfra.compiler import compile_pool
        from skyinfra.pool import ComputePool
        from skyinfra.providers.aws import AWS
        from skyinfra.stack import module_inputs

        # Offers, templates and the code that travels are read once, by the first pool.
        pool = ComputePool(name="ahead", provider=AWS(), accelerator="H100/1g.10gb")
        module_inputs(compile_pool(pool, "ahead"), ".")
