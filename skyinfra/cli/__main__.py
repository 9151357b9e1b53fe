"""``python -m skyinfra.cli`` is ``skyinfra``."""

from __future__ import annotations

from skyinfra.cli import main

main()
