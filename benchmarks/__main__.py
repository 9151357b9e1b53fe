"""``python -m benchmarks [report] [NAME ...] [--quick] [--trace FILE] [--report FILE]``.

report: the rows go to docs/performance.md and benchmarks/history.csv, too. --trace: of `follow`; --report: of `gpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial

from benchmarks import (
    boot,
    engine,
    follow,
    gpu,
    hops,
    imports,
    packing,
    partition,
    placement,
    report,
    scale,
    strangers,
    synth,
)
from benchmarks.measure import Result, show

ALL: dict[str, Callable[[], Iterable[Result]]] = {
    "imports": imports.run,
    "synth": synth.run,
    "placement": placement.run,
    "packing": packing.run,
    "partition": partition.run,
    "boot": boot.run,
    "engine": engine.run,
    "hops": hops.run,
    "strangers": strangers.run,
    "follow": follow.run,
    "scale": scale.run,
    "gpu": gpu.run,
}
QUICK = {**ALL, **{each.__name__.split(".")[1]: partial(each.run, quick=True) for each in (engine, hops, scale)}}


def main() -> None:
    quick = "--quick" in sys.argv
    words = iter(sys.argv[1:])
    with_file = ("--trace", "--report")
    names = [word for word in words if word != "--quick" and not (word in with_file and next(words, None))]
    reported = names[:1] == ["report"]
    names = names[reported:] or list(ALL)
    unknown = set(names) - set(ALL)
    if unknown:
        sys.exit(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    selected = QUICK if quick else ALL
    rows = ((name, result) for name in names for result in selected[name]())
    show(report.noted(rows) if reported else (result for _, result in rows))


if __name__ == "__main__":
    main()
