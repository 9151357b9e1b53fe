"""Write skyinfra/gpu/pci_ids.json from the list of GPUs of NVIDIA's open kernel modules.

    python tools/build_pci_ids.py README.md

README.md is that of https://github.com/NVIDIA/open-gpu-kernel-modules, whose table has the product names by PCI id.
Cards for consumers are taken: their variants (Ti, SUPER, Laptop) bear names that begin with one another's.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "skyinfra" / "gpu" / "pci_ids.json"
_ROW = re.compile(r"\| NVIDIA GeForce (?P<name>.+?)(?: GPU)? +\| (?P<id>[0-9A-F]{4}) +\|")
_VERSION = re.compile(r"^version (\d[\d.]*\d)", re.MULTILINE)


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    text = Path(arguments[0]).read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for row in _ROW.finditer(text):
        found.setdefault(row["id"], set()).add(row["name"])
    # An id that several products have says nothing.
    rows = {number: next(iter(names)) for number, names in sorted(found.items()) if len(names) == 1}
    version = _VERSION.search(text)
    if version is None:
        raise SystemExit("the README says no version")
    source = f"NVIDIA/open-gpu-kernel-modules {version[1]} README.md, supported GPUs by PCI id"
    lines = ",\n".join(f"    {json.dumps(number)}: {json.dumps(name)}" for number, name in rows.items())
    OUT.write_text(f'{{\n  "source": {json.dumps(source)},\n  "names": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
