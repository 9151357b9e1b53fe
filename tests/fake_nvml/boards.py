"""Writes boards.c, the models of GPU that the fake driver has: all of skyinfra's MIG geometry, and some without MIG."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

GEOMETRY = Path(__file__).resolve().parents[2] / "skyinfra" / "mig" / "geometry.json"

# Model, name, PCI device id, memory in MiB.
WITHOUT_MIG = (
    ("t4", "Tesla T4", 0x1EB8, 15360),
    ("a10", "NVIDIA A10", 0x2236, 23028),
    ("l4", "NVIDIA L4", 0x27B8, 23034),
    ("l40s", "NVIDIA L40S", 0x26B9, 46068),
)
# A GPU reports some less than its whole GiB: 81559 MiB on an H100 of 80 GB.
RESERVED_MIB = 361
MEDIA = {"+me": "MEDIA_EXTRA", "+me.all": "MEDIA_ALL", "-me": "MEDIA_NONE"}


def name(product: str) -> str:
    """``H100 80GB HBM3 (SXM5) 2330`` is sold as ``NVIDIA H100 80GB HBM3``."""
    plain = re.sub(r"\(.*?\)", "", product.partition(" / ")[0])
    return "NVIDIA " + " ".join(re.sub(r" [0-9A-F]{4}\s*$", "", plain).split())


def profiles(gpu: dict[str, Any], columns: list[str]) -> list[dict[str, Any]]:
    """Those of which everything is known; an id that is not known becomes one that no known id is."""
    rows = [dict(zip(columns, row, strict=True)) for row in gpu["profiles"]]
    known = [row for row in rows if row["nvml_enum"] is not None and row["size"] and row["starts"] and row["max_count"]]
    return [row | {"profile_id": 1000 + row["nvml_enum"]} if row["profile_id"] is None else row for row in known]


def profile(row: dict[str, Any]) -> str:
    media = MEDIA.get(row["name"].partition("gb")[2], "MEDIA_SHARE")
    numbers = [row[key] for key in ("nvml_enum", "profile_id", "compute_slices", "size", "max_count")]
    starts = ", ".join(map(str, row["starts"]))
    values = ", ".join(map(str, [*numbers, row["sm"] or 0]))
    return f'    {{"{row["name"]}", {values}, {media}, {len(row["starts"])}, {{{starts}}}}},\n'


def source() -> str:
    """The text of boards.c."""
    data = json.loads(GEOMETRY.read_text(encoding="utf-8"))
    tables, boards = [], []
    for model, gpu in data["gpus"].items():
        known = profiles(gpu, data["columns"])
        if not known or not gpu["memory_gib"]:
            continue
        tables.append(f"static const struct profile {model}[] = {{\n{''.join(map(profile, known))}}};\n")
        pci = gpu["pci_device_ids"][0] if gpu["pci_device_ids"] else "0x0000"
        memory = gpu["memory_gib"] * 1024 - RESERVED_MIB
        sizes = f"{memory}, {gpu['placement_units']}, {gpu['compute_slices']}, {str(gpu['resetless']).lower()}"
        boards.append(f'    {{"{model}", "{name(gpu["products"][0])}", {pci}, {sizes}, {len(known)}, {model}}},\n')
    for model, title, number, memory in WITHOUT_MIG:
        boards.append(f'    {{"{model}", "{title}", {number:#06x}, {memory}, 1, 0, false, 0, 0}},\n')
    end = "const unsigned board_count = sizeof boards / sizeof *boards;\n"
    return f'#include "machine.h"\n\n{"".join(tables)}\nconst struct board boards[] = {{\n{"".join(boards)}}};\n{end}'
