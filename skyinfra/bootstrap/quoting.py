"""Quoting: a declared value stands in YAML unchanged, whatever characters it has."""

from __future__ import annotations

import re
from functools import lru_cache

# What stands in a YAML string in double quotes as it is, and the backslashes of what `quoted` has replaced already.
_SPECIAL = re.compile(r"[^ -~]")


@lru_cache(maxsize=64)  # the nodes of many pools have most files in common
def quoted(value: str) -> str:
    """*value* as a YAML string in double quotes, on one line, whatever it holds.

    PyYAML's own emitter would take a second for the files of one node.
    """
    text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{_SPECIAL.sub(_in_yaml, text)}"'


def _in_yaml(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
