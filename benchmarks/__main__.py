"""``python -m benchmarks [NAME ...]``."""

from __future__ import annotations

import sys

from benchmarks import boot, imports, packing, partition, placement, synth
from benchmarks.measure import Result

ALL = {
    "imports": imports.run,
    "synth": synth.run,
    "placement": placement.run,
    "packing": packing.run,
    "partition": partition.run,
    "boot": boot.run,
}


def main() -> None:
    names = sys.argv[1:] or list(ALL)
    unknown = set(names) - set(ALL)
    if unknown:
        sys.exit(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    print(f"{'what':<52} {'baseline':<34} {'ratio':>7}  {'median':>10}  aim")
    for name in names:
        for result in ALL[name]():
            show(result)


def show(result: Result) -> None:
    milliseconds = f"{result.seconds * 1000:.0f} ms" if result.seconds >= 0.01 else f"{result.seconds * 1000:.2f} ms"
    print(
        f"{result.what:<52} {result.baseline:<34} {result.ratio:>6.2f}x  {milliseconds:>10}  {result.aim}", flush=True
    )


if __name__ == "__main__":
    main()
