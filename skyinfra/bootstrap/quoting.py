"""Quoting: what is declared stands in YAML as it is, whatever it holds."""

from __future__ import annotations

import re
from functools import lru_cache

# What stands in a YAML string in double quotes as it is.
_SPECIAL = re.compile(r"[^ !#-\[\]-~]")
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


@lru_cache(maxsize=64)  # the nodes of many pools have most files in common
def quoted(value: str) -> str:
    """*value* as a YAML string in double quotes, on one line, whatever it holds.

    PyYAML's own emitter would take a second for the files of one node.
    """
    return f'"{_SPECIAL.sub(_in_yaml, value)}"'


def _in_yaml(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
