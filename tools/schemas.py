"""Write the JSON Schemas of what ``--json`` prints: ``python -m tools.schemas``; with ``--check`` say which are stale.

One source: the shapes below and in `tools.shapes`, and the dataclasses that they name.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from skyinfra.deploy.advice import FleetAdvice
from skyinfra.mig.advice import Advice
from skyinfra.mig.geometry import Geometry, Profile
from skyinfra.packing.result import Given, Waste
from skyinfra.preflight.report import Line
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.readings import Progress
from skyinfra.recommendation.memory import Part, Workload
from skyinfra.sync.bringing import How
from skyinfra.terminal.tables import SCHEMA_VERSION
from tools.shapes import (
    AMOUNT,
    CANDIDATE,
    CHANGES,
    CHOICE,
    GPU_CHANGE,
    KEPT,
    MACHINES,
    MODEL,
    OFFER,
    ON_SALE,
    ORPHAN,
    PICTURE,
    PLACE,
    POOL,
    SOURCES,
    SPENT,
    STACK,
    USE,
    Shape,
    fields,
)

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"


# The documents by name, each with the command that prints it.
DOCUMENTS: dict[str, tuple[str, Shape]] = {
    "synth": ("skyinfra synth --json", {"stacks": [{"name": str, "folder": str, "pools": [POOL]}]}),
    "plan": ("skyinfra plan --json", CHANGES),
    "status": ("skyinfra status --json", {"stacks": [STACK], "orphans": [ORPHAN]}),
    "cost": (
        "skyinfra cost --json",
        {"since": str | None, "stacks": [{"stack": str, **AMOUNT, "pools": [SPENT]}]},
    ),
    "preflight": (
        "skyinfra preflight --json",
        {"stack": str, "pass": int, "warn": int, "fail": int, "lines": [Line]},
    ),
    "offers": ("skyinfra offers --json", {"offers": [OFFER], "notes": [str]}),
    "places": (
        "skyinfra offers --for STACK/POOL --json",
        {"fleet": str, "order": str, "live": bool, "places": [CANDIDATE]},
    ),
    "capacity": ("skyinfra capacity STACK/POOL --json", {"blocks": [ON_SALE]}),
    "recommend": (
        "skyinfra recommend --json",
        {
            "model": MODEL,
            "workload": Workload,
            "need": [Part],
            "bytes": float,
            "choices": [CHOICE],
            "left_out": {"*": int},
            "notes": [str],
        },
    ),
    "jobs": (
        "skyinfra jobs STACK/POOL --json",
        {"jobs": [{**fields(JobInfo), "progress": Progress | None}], "kept?": KEPT},
    ),
    "fetch": (
        "skyinfra jobs fetch STACK/POOL JOB --json",
        {"folder": str, "files": [{"path": str, "size": int, "how": How}]},
    ),
    "put": ("skyinfra put STACK/POOL PATH --json", {"remote": str, "nodes": [str]}),
    "get": ("skyinfra get STACK/POOL REMOTE --json", {"path": str}),
    "top": (
        "skyinfra top STACK/POOL --json",
        {"nodes": [{"name": str, "problem": str | None, "slots": [USE]}]},
    ),
    "doctor": ("skyinfra doctor STACK/POOL --json", {"nodes": {"*": [Finding]}}),
    "logs": (
        "skyinfra logs STACK/POOL --json",
        {"nodes": [{"name": str, "problem": str | None, "path?": str, "text": str}]},
    ),
    "render": (
        "skyinfra render --json",
        {"files": [{"fleet": str, "file": str, "bytes": int, "compressed": int | None, "parts": {"*": int}}]},
    ),
    "runner": ("skyinfra render --runner DIR --json", {"file": str, "sha256": str}),
    "mig-layout": (
        "skyinfra mig show --json, skyinfra mig check",
        {"accelerator": str, "model": str, "declared": str | None, "fits": bool, "gpus": [PICTURE]},
    ),
    "mig-plan": (
        "skyinfra mig plan STACK/POOL --json",
        {"fleet": str, "gpus": [GPU_CHANGE], "unchanged": int, "drain_seconds": float},
    ),
    "mig-advise": (
        "skyinfra mig advise STACK/POOL --json",
        {**fields(FleetAdvice, "advice", "trace"), **fields(Advice), "keeps": bool, "declaration": str},
    ),
    "mig-profiles": (
        "skyinfra mig profiles --json",
        {
            **fields(Geometry, "profiles"),
            "profiles": [{**fields(Profile, "sources"), "attributes": str, "sources": SOURCES}],
        },
    ),
    "mig-layouts": (
        "skyinfra mig layouts --json",
        {
            "accelerator": str,
            "model": str,
            "profiles": [str],
            "placements": [[{**PLACE, "expected": bool}]],
            "multisets": [str],
            "maximal": [str],
        },
    ),
    "mig-pack": (
        "skyinfra mig pack --json",
        {
            "demand": [{"wanted": str, "count": int, "memory_gb": float}],
            "status": str,
            "cost_per_hour": float,
            "bound": float,
            "gap": float,
            "spot": bool,
            "nodes": int,
            "machines": [MACHINES],
            "given": [Given],
            "spare": [fields(Given, "wanted")],
            "waste": {**fields(Waste), "share": float},
            "considered": int,
            "left_out": {"*": int},
            "notes": [str],
            "source": str,
        },
    ),
    "mig-import": (
        "skyinfra mig import --json",
        (
            {"accelerator": str | None, "layouts": {"*": str | None}, "warnings": [str]},
            {"entries": [{"*": Any}]},
        ),
    ),
    "deploy-event": (
        "skyinfra deploy --json, a line for each event",
        (
            {"event": Literal["planned"], **CHANGES},
            {"event": Literal["start", "done", "failed"], "address": str, "action": str, "seconds": float},
            {"event": Literal["waiting"], "pool": str, "text": str},
            {
                "event": Literal["deployed"],
                "stack": str,
                "changed": bool,
                "fleets": [{"fleet": str, "provider": str, "simulated": bool, "nodes": int, "slots": int, "head": str}],
            },
            {"event": Literal["error"], "error": str, "message": str},
        ),
    ),
    "manifest": ("skyinfra manifest STACK/POOL", Manifest),
}
_PLAIN: dict[object, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    types.NoneType: {"type": "null"},
    Any: {},
}


def schema_of(shape: Shape) -> dict[str, Any]:
    """Returns the JSON Schema of a shape."""
    if isinstance(shape, dict):
        return _object(shape)
    if isinstance(shape, list):
        return {"type": "array", "items": schema_of(shape[0])}
    if isinstance(shape, tuple):
        return {"anyOf": [schema_of(each) for each in shape]}
    if shape in _PLAIN:
        return dict(_PLAIN[shape])
    if dataclasses.is_dataclass(shape):
        return _object(fields(shape))
    origin, arguments = typing.get_origin(shape), typing.get_args(shape)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (tuple, list):
        if origin is tuple and arguments[1:] != (...,):
            items = [schema_of(each) for each in arguments]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [schema_of(each) for each in arguments]}
    raise TypeError(f"no schema for {shape!r}")


def _object(shape: dict[str, Shape]) -> dict[str, Any]:
    if set(shape) == {"*"}:
        return {"type": "object", "additionalProperties": schema_of(shape["*"])}
    return {
        "type": "object",
        "properties": {name.rstrip("?"): schema_of(each) for name, each in shape.items()},
        "required": [name for name in shape if not name.endswith("?")],
        "additionalProperties": False,
    }


def documents() -> dict[str, str]:
    """Returns the texts of the schemas by the names of their files."""
    made = {}
    for name, (command, shape) in DOCUMENTS.items():
        # The manifest has a version of its own.
        version = {} if shape is Manifest else {"schema_version": Literal[SCHEMA_VERSION]}
        parts = shape if isinstance(shape, tuple) else (fields(shape) if shape is Manifest else shape,)
        found = [_object({**version, **each}) for each in parts]
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": command,
            **(found[0] if len(found) == 1 else {"anyOf": found}),
        }
        made[f"{name}.json"] = json.dumps(document, indent=1) + "\n"
    return made


def stale(folder: Path = FOLDER) -> list[str]:
    """Returns the names of the files that are not as they would be written now."""
    wanted = documents()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main() -> None:
    """Writes the schemas, or with --check names those that are stale; exit code 1 where there is one."""
    if "--check" in sys.argv[1:]:
        found = stale()
        print("\n".join(found) or "no schema is stale")
        sys.exit(1 if found else 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in documents().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
