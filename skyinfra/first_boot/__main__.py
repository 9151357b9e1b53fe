"""python3 -m first_boot run|report FILE [SECONDS]

run: does the steps that FILE lists, each unless it is done. report: tells of the one that failed, SECONDS long.
"""

from __future__ import annotations

import sys

from . import engine, report

if __name__ == "__main__":
    verb, path, *rest = sys.argv[1:]
    sys.exit(engine.run(path) if verb == "run" else report.run(path, seconds=float(rest[0]) if rest else float("inf")))
