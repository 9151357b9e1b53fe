"""Imported by the fork server of the workers, and nowhere else: see `skyinfra.worker.preload`."""

from __future__ import annotations

import os
import signal

from skyinfra.worker import preload, process

if process.OUTLIVES_SIGTERM in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if preload.VARIABLE in os.environ:
    preload.load(os.environ[preload.VARIABLE])
