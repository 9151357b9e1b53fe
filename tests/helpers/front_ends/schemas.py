"""The output of ``--json``, held against its schema in docs/schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from support import ROOT


def valid(name: str, text: str) -> Any:
    """The document *text*, which must fit the schema *name*."""
    document = json.loads(text)
    schema = json.loads((ROOT / "docs" / "schemas" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document
