"""Values as Terraform reads them in a synthesized stack, and back."""

from __future__ import annotations

import json
import re
from typing import Any

# A value of more parts crosses to jsii as text: it walks a value part by part, there and in Terraform's JSON again.
_MANY = 64
_MARKER = re.compile(r"\$\{(?!TfToken\[)")
_FILE = re.compile(r'\$\{file\("\$\{path\.root\}/(.+)"\)\}')
_FOLDED = re.compile(r'\$\{jsondecode\((".*")\)\}', re.DOTALL)


def literal(value: Any) -> Any:
    """*value* with Terraform's template markers escaped, so that a declared ``${X}`` stays as it is written.

    Outputs of other constructs, which the library writes as markers of its own, are left as they are.
    """
    if isinstance(value, str):
        return (_MARKER.sub("$${", value) if "${" in value else value).replace("%{", "%%{")
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return value


def plain(value: Any) -> Any:
    """The inverse of `literal`: *value* as it is where Terraform reads no template in it, as in a file of variables."""
    if isinstance(value, str):
        return value.replace("$${", "${").replace("%%{", "%{")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def folded(inputs: dict[str, Any]) -> dict[str, Any]:
    """*inputs* of a module, those of many parts as ``${jsondecode("...")}``: a string for jsii, the same to Terraform.

    The values are literal already.
    """
    return {key: _fold(value) if _parts(value) > _MANY else value for key, value in inputs.items()}


def unfolded(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inverse of `folded`."""
    return {key: _unfold(value) if isinstance(value, str) else value for key, value in inputs.items()}


def is_reference(value: object) -> bool:
    """Returns whether an input of a synthesized module is a local value, which Terraform alone knows."""
    return isinstance(value, str) and value.startswith("${local.")


def from_file(path: str) -> str:
    """Returns the text of the file at *path*, counted from the stack's folder."""
    return f'${{file("${{path.root}}/{path}")}}'


def file_of(value: object) -> str | None:
    """Returns the inverse of `from_file`; None for every other value."""
    found = _FILE.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None


def _fold(value: Any) -> str:
    # The inner text is printable ASCII, so that the outer one holds no escapes but those that HCL knows too.
    return f"${{jsondecode({json.dumps(json.dumps(value, separators=(',', ':')))})}}"


def _unfold(value: str) -> Any:
    found = _FOLDED.fullmatch(value)
    return json.loads(json.loads(found[1])) if found else value


def _parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_parts, value.values()))
    return 1 + sum(map(_parts, value)) if isinstance(value, list) else 1
