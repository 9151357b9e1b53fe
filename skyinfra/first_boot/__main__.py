"""python3 -m first_boot run FILE | report FILE [SECONDS] | upgrade FILE REQUEST

run: does the steps that FILE lists, each unless it is done. report: tells of the one that failed, SECONDS long.
upgrade: does what the file REQUEST asks for, see `upgrade`.
"""

from __future__ import annotations

import sys

from . import engine, report, upgrade

if __name__ == "__main__":
    verb, path, *rest = sys.argv[1:]
    if verb == "run":
        upgrade.settle(path)
        sys.exit(engine.run(path))
    if verb == "upgrade":
        sys.exit(upgrade.run(path, rest[0]))
    sys.exit(report.run(path, seconds=float(rest[0]) if rest else float("inf")))
