"""Imported by the fork server of the workers, and nowhere else: see `skyinfra.worker.preload`."""

from __future__ import annotations

import os

from skyinfra.worker import preload

if preload.VARIABLE in os.environ:
    preload.load(os.environ[preload.VARIABLE])
