"""``python -m skyinfra.runner``; also the entry point ``skyinfra-runner``."""

from __future__ import annotations

import sys

from skyinfra.runner.cli import main

if __name__ == "__main__":
    sys.exit(main())
