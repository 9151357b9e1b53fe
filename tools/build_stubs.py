"""Write skyinfra/accelerators/_names.pyi, the factories by name, from the catalog.

python tools/build_stubs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "skyinfra" / "accelerators" / "_names.pyi"


def build() -> str:
    """The text of the stub; the same catalog gives the same text."""
    sys.path.insert(0, str(ROOT))
    from skyinfra.accelerators.factories import identifiers

    lines = ["# Written by tools/build_stubs.py from catalog.json; do not edit."]
    lines += ["from skyinfra.accelerators.factories import Factory as _Factory", ""]
    return "\n".join(lines + [f"{name}: _Factory" for name in identifiers()]) + "\n"


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["--check"]):
        raise SystemExit(__doc__)
    text = build()
    if not arguments:
        OUT.write_text(text, encoding="utf-8")
    elif OUT.read_text(encoding="utf-8") != text:
        raise SystemExit("skyinfra/accelerators/_names.pyi is out of date: run tools/build_stubs.py")


if __name__ == "__main__":
    main(sys.argv[1:])
