"""Cloud-configs held to cloud-init's own schema, and to more: what it passes over is a mistake here.

The schema comes from the cloud-init package, installed on this machine or fetched from its Debian mirror; it is kept
below build/ and never committed. Stricter than ``cloud-init schema``: an unknown key at the top, a key twice, and what
is deprecated are errors.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft4Validator, ValidationError, validators
from support import ROOT, missing

_FILE = "schema-cloud-config-v1.json"
_PACKAGE = Path("usr/lib/python3/dist-packages/cloudinit/config/schemas")
_KEPT = ROOT / "build" / "cloud-init" / _FILE


def schema() -> dict[str, Any]:
    """The schema of a cloud-config. Fails under CI, and skips elsewhere, where it cannot be had."""
    for file in (Path("/") / _PACKAGE / _FILE, _KEPT):
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    reason = _fetch()
    if reason:
        missing(f"the schema of cloud-init, installed or from a Debian mirror ({reason}),")
    return json.loads(_KEPT.read_text(encoding="utf-8"))


def _fetch() -> str:
    """Takes the schema out of the package, as apt downloads it. Returns what went wrong, or nothing."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return "no apt-get and dpkg-deb"
    with tempfile.TemporaryDirectory() as folder:
        done = _run("apt-get", "download", "cloud-init", folder=folder)
        if done.returncode != 0 and os.geteuid() == 0:
            _run("apt-get", "update", folder=folder)
            done = _run("apt-get", "download", "cloud-init", folder=folder)
        package = next(Path(folder).glob("cloud-init_*.deb"), None)
        if package is None:
            return (done.stderr.strip().splitlines() or ["apt-get downloaded nothing"])[-1]
        _run("dpkg-deb", "--extract", str(package), "out", folder=folder)
        found = Path(folder) / "out" / _PACKAGE / _FILE
        if not found.is_file():
            return f"{package.name} has no {_FILE}"
        _KEPT.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(found, _KEPT)
    return ""


def _run(*command: str, folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def problems(text: str, rules: dict[str, Any]) -> list[str]:
    """What is wrong with a cloud-config, with the path of each."""
    if not text.startswith("#cloud-config\n"):
        return ["the first line is not #cloud-config"]
    try:
        document = yaml.load(text, _Strict)
    except yaml.YAMLError as error:
        return [str(error)]
    found = [f"{_path(each)}: {each.message}" for each in _VALIDATOR(rules).iter_errors(document)]
    unknown = sorted(set(document) - _known(rules, rules)) if isinstance(document, dict) else []
    return found + [f"{name}: unknown" for name in unknown]


def _path(error: ValidationError) -> str:
    return ".".join(map(str, error.absolute_path)) or "the document"


def _known(part: Any, rules: dict[str, Any]) -> set[str]:
    """The keys that any module of cloud-init reads at the top: its schema names them one module at a time."""
    names = set(part.get("properties", ()))
    if "$ref" in part:
        place: Any = rules
        for step in part["$ref"].removeprefix("#/").split("/"):
            place = place[step]
        names |= _known(place, rules)
    for key in ("allOf", "anyOf", "oneOf"):
        for each in part.get(key, ()):
            names |= _known(each, rules)
    return names


def _deprecated(_validator: Any, value: Any, _instance: Any, _schema: Any) -> Iterator[ValidationError]:
    if value:
        yield ValidationError("deprecated")


_VALIDATOR = validators.extend(Draft4Validator, {"deprecated": _deprecated})


class _Strict(yaml.SafeLoader):
    """Refuses a key that is there twice; YAML forbids it, and cloud-init takes the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)
