"""Quoting: what is declared stands in YAML, in shell and in unit files as it is, whatever it holds."""

from __future__ import annotations

import yaml


def quoted(value: str) -> str:
    """*value* as a YAML string in double quotes, on one line, whatever it holds."""
    text = yaml.safe_dump(value, default_style='"', width=float("inf"), allow_unicode=False)
    return str(text).removesuffix("\n")


def in_unit(value: str) -> str:
    """*value* as one word of a unit file, in double quotes. Control characters other than tabs and line ends, too."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return '"' + "".join(c if c.isprintable() else _escape(c) for c in escaped) + '"'


def _escape(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())
