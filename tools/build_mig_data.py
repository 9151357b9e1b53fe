"""Write skyinfra/mig/geometry.json from a table of MIG facts.

    python tools/build_mig_data.py FACTS.json [OUT.json]

The facts have one entry per GPU model and one row per profile, each with the sources of its names, ids and
placements. What they do not know stays null. The same facts give the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "skyinfra" / "mig" / "geometry.json"

COLUMNS = (
    "name",
    "compute_slices",
    "memory_slices",
    "size",
    "memory_gb",
    "max_count",
    "nvml_enum",
    "profile_id",
    "sm",
    "starts",
    "expected",
    "source",
    "id_source",
    "placement_source",
)

# Placements that are not cited for a part follow from the span code of the driver.
EXPECTED_SOURCE = "OGKM-SPAN"

_DRIVER = re.compile(r"R(\d+(?:\.\d+)+)")
_SAME_DRIVER = re.compile(r"as (A100-40)")
_SPLIT_ID_SOURCE = re.compile(r"(?P<most>\S+) \([\d,]+\); (?P<rest>[\d/]+) from GKE map")


def driver(text: str | None, facts: dict[str, Any]) -> str | None:
    """The oldest driver that offers MIG on the part, such as "525.85.12"."""
    if text is None:
        return None
    if _SAME_DRIVER.fullmatch(text):
        return driver(facts["a100_40gb"]["min_driver"], facts)
    found = _DRIVER.match(text)
    if not found:
        raise SystemExit(f"no driver version in {text!r}")
    return found[1]


def id_source(row: dict[str, Any]) -> str | None:
    """The key of the source of one row's profile id; some facts name two sources for the rows of one GPU."""
    text: str | None = row["id_source"]
    split = _SPLIT_ID_SOURCE.fullmatch(text or "")
    if not split:
        return text
    return "GKE" if str(row["id"]) in split["rest"].split("/") else split["most"]


def profile(row: dict[str, Any]) -> list[Any]:
    """One row of the table, in the order of COLUMNS."""
    cited = row["placements"] is not None
    starts = row["placements"] if cited else row["placements_expected"]
    expected = not cited and starts is not None
    return [
        row["name"],
        row["compute_slices"],
        row["memory_slices"],
        row.get("placement_size", row["memory_slices"]),
        row["memory_gb"],
        row["count"],
        row["nvml_enum"],
        row["id"],
        row["sm"],
        starts,
        expected,
        row["source"],
        id_source(row),
        EXPECTED_SOURCE if expected else row["placement_source"],
    ]


def gpu(entry: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """One GPU model; `min_driver_detail` keeps the words of the source where it says more than a version."""
    version = driver(entry["min_driver"], facts)
    detail = entry["min_driver"] if entry["min_driver"] not in (None, f"R{version}") else None
    return {
        "products": entry["products"],
        "pci_device_ids": entry["pci_device_ids"] or [],
        "architecture": entry["arch"],
        "memory_gib": entry["memory_gib"],
        "memory_slices": entry["memory_slices"],
        "compute_slices": entry["compute_slices"],
        "placement_units": entry["placement_units"],
        "resetless": entry["resetless_mig"],
        "min_driver": version,
        "min_driver_detail": detail,
        "notes": [_readable(note) for note in entry["notes"]],
        "profiles": [profile(row) for row in entry["profiles"] or []],
    }


def build(facts: dict[str, Any]) -> str:
    """The text of geometry.json: one line per field and per profile, so that a change reads as a diff."""
    gpus = {model: gpu(entry, facts) for model, entry in facts.items() if model != "_meta"}
    used = {key for entry in gpus.values() for row in entry["profiles"] for key in row[-3:] if key}
    sources = {key: _readable(facts["_meta"]["sources"][key]) for key in sorted(used)}
    lines = ["{", f'"columns": {json.dumps(COLUMNS)},', '"sources": {']
    lines += [",\n".join(f"  {json.dumps(key)}: {json.dumps(text)}" for key, text in sources.items()), "},"]
    lines += ['"gpus": {', ",\n".join(_gpu_text(model, entry) for model, entry in gpus.items()), "}", "}"]
    return "\n".join(lines) + "\n"


def _readable(text: str) -> str:
    """The source or note without the numbers of the copies that were read, which mean nothing to a reader."""
    text = re.sub(r"[;,]? ?\(?stored cop(?:y|ies)(?: id)? [\d, ]+\)?", "", text)
    text = re.sub(r",? ?\(?\b\d{10,}\b\)?", "", text)
    text = re.sub(r"in (?:the )?stored copy", "in the copy that was read", text)
    return text + ")" * (text.count("(") - text.count(")"))


def _gpu_text(model: str, entry: dict[str, Any]) -> str:
    fields = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items() if key != "profiles"]
    rows = ",\n".join(f"      {json.dumps(row)}" for row in entry["profiles"])
    fields.append(f'    "profiles": [\n{rows}\n    ]' if rows else '    "profiles": []')
    return f"  {json.dumps(model)}: {{\n" + ",\n".join(fields) + "\n  }"


def main(arguments: list[str]) -> None:
    if len(arguments) not in (1, 2):
        raise SystemExit(__doc__)
    facts = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    out = Path(arguments[1]) if len(arguments) == 2 else OUT
    out.write_text(build(facts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
