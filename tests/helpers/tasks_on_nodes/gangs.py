"""A task of ranks, and starting ranks without a framework."""

from __future__ import annotations

import os


def none(pool, target, *args, **options):
    """A gang without a framework, which warns of nothing."""
    return pool.launch(target, *args, framework="none", **options)


def environment() -> dict[str, str]:
    return dict(os.environ)
