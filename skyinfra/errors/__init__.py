"""Every exception of skyinfra: one class per cause, one tree below `SkyinfraError`; docs/errors.md shows it.

A message says where, what was given, and what would work. Travels to nodes: standard library only.
"""

from __future__ import annotations

from skyinfra.errors.base import *
from skyinfra.errors.declarations import *
from skyinfra.errors.fleets import *
from skyinfra.errors.options import *
from skyinfra.errors.tasks import *
from skyinfra.errors.tools import *

__all__ = sorted(
    name for name, value in globals().items() if isinstance(value, type) and issubclass(value, SkyinfraError)
)

# Users see and pickle these as skyinfra.NAME.
for _name in __all__:
    globals()[_name].__module__ = "skyinfra"
