"""Writes tests/mock_provider/schemas/NAME.json anew from what publishes the schema of a provider.

    python -m tools.provider_schema cdktn NAME WHEEL [TYPE ...]       a wheel from PyPI: cdktn-provider-NAME
    python -m tools.provider_schema pulumi NAME WHEEL [TYPE ...]      a wheel from PyPI that was made of the provider
    python -m tools.provider_schema terraform NAME FILE [TYPE ...]    what `terraform providers schema -json` printed

Without TYPE, of the types that the file has; a data source is data.TYPE. What a source does not say (what forces
replacement, defaults, values, and for cdktn what is sensitive and the provider's own arguments) stays as it is. Pulumi
names lists in the plural, makes names up, and says neither whether a list is a set nor whether it is a block: what the
file has in the singular, and its ``name``, stay, and where it says ``framework`` there are no blocks.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).resolve().parents[1] / "tests" / "mock_provider" / "schemas"
BY_HAND = (
    "replaces",
    "default",
    "kept",
    "hashed",
    "values",
    "matches",
    "between",
    "one_of",
    "conflicts",
    "accepted",
    "max_bytes",
    "gives",
    "unanswered",
    "found",
    "said",
    "sensitive",
    "write_only",
)

Json = dict[str, Any]


def written(value: Any, indent: int = 0) -> str:
    """JSON with one line for each attribute."""
    inner = isinstance(value, dict) and any(isinstance(each, dict) for each in value.values())
    if not inner:
        return json.dumps(value, ensure_ascii=False)
    space = " " * (indent + 1)
    lines = [f"{space}{json.dumps(key)}: {written(each, indent + 1)}" for key, each in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


def merged(new: Json, old: Json) -> Json:
    """The fields of *new*, with what *old* has by hand."""
    found = {}
    for name, field in new.items():
        before = old.get(name, {})
        kept = {key: before[key] for key in BY_HAND if key in before}
        inner = {
            key: merged(field[key], before.get("block") or before.get("attributes") or {})
            for key in ("block", "attributes")
            if key in field
        }
        plain = {key: value for key, value in field.items() if key not in inner}
        found[name] = {**plain, **kept, **inner}
    return found


# Of `terraform providers schema -json`.


def from_terraform(document: Json, kind: str) -> Json:
    [provider] = document["provider_schemas"].values()
    if kind == "provider":
        return _block(provider["provider"]["block"])
    where = "data_source_schemas" if kind.startswith("data.") else "resource_schemas"
    return _block(provider[where][kind.removeprefix("data.")]["block"])


def _flags(field: Json) -> Json:
    names = ("required", "optional", "computed", "sensitive", "write_only")
    return {name: True for name in names if field.get(name)}


def _block(block: Json) -> Json:
    found = {name: _attribute(each) for name, each in block.get("attributes", {}).items()}
    for name, each in block.get("block_types", {}).items():
        limits = {"min": each.get("min_items"), "max": each.get("max_items")}
        found[name] = {
            "nesting": each["nesting_mode"],
            **{key: value for key, value in limits.items() if value},
            "block": _block(each["block"]),
        }
    return dict(sorted(found.items()))


def _attribute(field: Json) -> Json:
    if "nested_type" not in field:
        return {"type": field["type"], **_flags(field)}
    nested = field["nested_type"]
    within = {name: _attribute(each) for name, each in nested["attributes"].items()}
    return {"nesting": nested["nesting_mode"], **_flags(field), "attributes": within}


# Of cdktn: the JavaScript that its generator writes says everything in comments and getters.

_FIELD = re.compile(
    r"// (\w+) - computed: (\w+), optional: (\w+), required: (\w+)\n"
    r"(.*?)(?=\n    // \w+ - computed|\n    // =====|\n\})",
    re.DOTALL,
)
_GETTERS = {
    "getStringAttribute": "string",
    "getNumberAttribute": "number",
    "getBooleanAttribute": "bool",
    "getListAttribute": ["list", "string"],
    "getNumberListAttribute": ["list", "number"],
    "getStringMapAttribute": ["map", "string"],
    "getNumberMapAttribute": ["map", "number"],
    "getBooleanMapAttribute": ["map", "bool"],
    "StringMap": ["map", "string"],
    "NumberMap": ["map", "number"],
    "BooleanMap": ["map", "bool"],
}


class Cdktn:
    """Returns what a wheel says of the types *kinds*."""

    def __init__(self, wheel: Path, kinds: tuple[str, ...]) -> None:
        files = {f"package/lib/{folder}/index.js": kind for kind in kinds for folder in _folders(kind)}
        with zipfile.ZipFile(wheel) as file:
            [name] = [each for each in file.namelist() if each.endswith(".jsii.tgz")]
            packed = io.BytesIO(file.read(name))
        self.texts = {}
        # In its order: what is compressed has no other.
        with tarfile.open(fileobj=packed) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name in files else None
                if content:
                    # Its last line is a map of the source.
                    self.texts[files[member.name]] = content.read().decode().partition("//# sourceMappingURL")[0]
        self.version = ""

    def __call__(self, kind: str) -> Json:
        text = self.texts[kind]
        self.version = re.findall(r"providerVersion: '([^']+)'", text)[0]
        classes = dict(re.findall(r"^class (\w+) extends (.*?)^\}", text + "\n}", re.MULTILINE | re.DOTALL))
        [top] = [key for key, body in classes.items() if re.match(r"\w+\.Terraform(Resource|DataSource)", body)]
        blocks = set(re.findall(r"^\s+(\w+): \{\n\s+value: [^\n]*\n\s+isBlock: true", text, re.MULTILINE))
        return dict(sorted(_of_class(top, classes, text, blocks)))


def _folders(kind: str) -> tuple[str, ...]:
    """Where the program of a type may be: compute-instance, google-compute-instance, data-google-compute-zones."""
    name = kind.removeprefix("data.").replace("_", "-")
    return (f"data-{name}",) if kind.startswith("data.") else (name, name.partition("-")[2])


def _of_class(name: str, classes: dict[str, str], text: str, blocks: set[str]) -> Iterator[tuple[str, Json]]:
    for field, computed, optional, required, body in _FIELD.findall(classes[name] + "\n}"):
        given = {"required": required, "optional": optional, "computed": computed}
        flags = {key: True for key, value in given.items() if value == "true"}
        nested = re.search(rf'new (\w+?)(List|Map|OutputReference)\(this, "{field}"(?:, (true|false))?\)', body)
        if nested and f"{nested[1]}OutputReference" in classes:
            yield field, _nested(nested, flags, field in blocks, classes, text, blocks)
        else:
            yield field, {"type": _type(body, field), **flags}


def _nested(
    found: re.Match[str], flags: Json, block: bool, classes: dict[str, str], text: str, blocks: set[str]
) -> Json:
    reference = f"{found[1]}OutputReference"
    fields = dict(sorted(_of_class(reference, classes, text, blocks)))
    one = found[2] == "OutputReference"
    nesting = {"List": "set" if found[3] == "true" else "list", "Map": "map"}.get(found[2], "list")
    if one and re.search(r"super\(terraformResource, terraformAttribute, false\)", classes[reference]):
        nesting = "single"
    if flags == {"computed": True}:
        return {"type": _object(nesting, fields), **flags}
    if not block:
        return {"nesting": nesting, **flags, "attributes": fields}
    limits = {**({"min": 1} if "required" in flags else {}), **({"max": 1} if one and nesting == "list" else {})}
    return {"nesting": nesting, **limits, "block": fields}


def _object(nesting: str, fields: Json) -> Any:
    """The type of a computed attribute with several values."""
    inner = ["object", {name: each["type"] for name, each in fields.items()}]
    return inner if nesting == "single" else [nesting, inner]


def _type(body: str, name: str) -> Any:
    [getter] = re.findall(rf"(\w+)\((?:this, )?['\"]{name}['\"]\)", body)
    kind = _GETTERS[getter]
    return ["set", kind[1]] if "Fn.tolist(" in body else kind


# Of Pulumi: the Python that its generator writes of a provider has a class for the arguments and one for the resource.

_PLAIN = {"str": "string", "bool": "bool", "int": "number", "float": "number"}
# What stands around a type and says nothing of it, but `Optional`.
_AROUND = ("Input", "Output", "InputType")


class Pulumi:
    """Returns the schema of a provider in *wheel*. framework: whether it is made with the SDK that has no blocks."""

    def __init__(self, wheel: Path, *, framework: bool) -> None:
        self._framework = framework
        self._classes: dict[str, dict[str, ast.ClassDef]] = {}
        with zipfile.ZipFile(wheel) as file:
            [about] = [each for each in file.namelist() if each.endswith("/pulumi-plugin.json")]
            self._sources = {
                name.removeprefix(f"{about.partition('/')[0]}/"): file.read(name).decode()
                for name in file.namelist()
                if name.endswith(".py")
            }
            said = json.loads(file.read(about))
        self.version = said.get("parameterization", said)["version"]

    def __call__(self, kind: str) -> Json:
        name = kind.partition("_")[2] if kind != "provider" else kind
        found = [each for each in self._sources if each.removesuffix(".py").replace("/", "_") == name]
        # One that was moved into a folder still has its old file.
        path = max(found, key=lambda each: each.count("/"))
        top = self._of(path)
        [args] = [each for each in top if each.endswith("Args") and not each.startswith("_")]
        secret = re.findall(r"additional_secret_outputs=\[(.*?)\]", self._sources[path])
        fields = self._fields(path, args, args.removesuffix("Args"))
        for key in re.findall(r'"(\w+)"', "".join(secret)):
            snake = re.sub("([A-Z])", lambda found: f"_{found[1].lower()}", key)
            fields[snake] = {**fields[snake], "sensitive": True}
        if kind != "provider":
            fields.setdefault("id", {"type": "string", "computed": True})
        return dict(sorted(fields.items()))

    def _of(self, path: str) -> dict[str, ast.ClassDef]:
        """The classes of a file, by name."""
        if path not in self._classes:
            body = ast.parse(self._sources[path]).body
            self._classes[path] = {each.name: each for each in body if isinstance(each, ast.ClassDef)}
        return self._classes[path]

    def _fields(self, path: str, args: str, outputs: str) -> Json:
        """The fields of a class of arguments and of the class of what comes of them, either of which may be missing."""
        beside = path.rpartition("/")[0] + "/" if "/" in path else ""
        inputs = {**self._of(f"{beside}_inputs.py"), **self._of(path)}.get(args)
        given = {**self._of(f"{beside}outputs.py"), **self._of(path)}.get(outputs)
        # Of the provider only what is given to it.
        got = _getters(given) if given is not None and args != "ProviderArgs" else {}
        found = {}
        for name, (kind, required) in (_arguments(inputs) if inputs else {}).items():
            computed = not required and name in got and not _optional(got[name])
            flags = {"required": required, "optional": not required, "computed": computed}
            found[name] = self._field(path, kind, {key: True for key, value in flags.items() if value})
        for name, kind in got.items():
            if name not in found and name != "urn":
                found[name] = self._field(path, kind, {"computed": True})
        return dict(sorted(found.items()))

    def _field(self, path: str, kind: ast.expr, flags: Json) -> Json:
        nesting, inner = _unwrapped(kind)
        if not isinstance(inner, ast.Constant):
            plain = _plain(inner)
            return {"type": [nesting, plain] if nesting else plain, **flags}
        name = str(inner.value).rpartition(".")[2]
        fields = self._fields(path, name if name.endswith("Args") else f"{name}Args", name.removesuffix("Args"))
        if self._framework:
            return {"nesting": nesting or "single", **flags, "attributes": fields}
        if flags == {"computed": True}:
            return {"type": _object("list", fields), **flags}
        limits = {"min": "required" in flags, "max": not nesting}
        return {"nesting": "list", **{key: 1 for key, value in limits.items() if value}, "block": fields}


def _arguments(of: ast.ClassDef) -> dict[str, tuple[ast.expr, bool]]:
    """The arguments of a class, each with its type and whether it is required."""
    [start] = [each for each in of.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    pairs = zip(start.args.kwonlyargs, start.args.kw_defaults, strict=True)
    return {each.arg: (each.annotation, default is None) for each, default in pairs if each.annotation is not None}


def _getters(of: ast.ClassDef) -> dict[str, ast.expr]:
    """The properties of a class, with their types."""
    found = [each for each in of.body if isinstance(each, ast.FunctionDef)]
    typed = {each.name: each.returns for each in found if "pulumi.getter" in map(_called, each.decorator_list)}
    return {name: kind for name, kind in typed.items() if kind is not None}


def _called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _parts(kind: ast.expr) -> tuple[str, list[ast.expr]]:
    """``Sequence`` and ``[str]`` of ``Sequence[str]``."""
    if not isinstance(kind, ast.Subscript):
        return "", []
    inner = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    return ast.unparse(kind.value).rpartition(".")[2], inner


def _optional(kind: ast.expr) -> bool:
    name, inner = _parts(kind)
    return name == "Optional" or (name in _AROUND and _optional(inner[0]))


def _unwrapped(kind: ast.expr) -> tuple[str, ast.expr]:
    """``list``, ``map`` or nothing, and what it is of."""
    name, inner = _parts(kind)
    if name in (*_AROUND, "Optional"):
        return _unwrapped(inner[0])
    if name in ("Sequence", "Mapping"):
        deeper, of = _unwrapped(inner[-1])
        return ("list" if name == "Sequence" else "map"), of if not deeper else inner[-1]
    return "", kind


def _plain(kind: ast.expr) -> Any:
    nesting, inner = _unwrapped(kind)
    return [nesting, _plain(inner)] if nesting else _PLAIN[ast.unparse(inner).rpartition(".")[2]]


def named_as_before(new: Json, old: Json) -> Json:
    """The fields of *new*, with the singular where *old* has it."""
    plurals = {plural: name for name in old for plural in (f"{name}s", f"{name}es", f"{name[:-1]}ies")}
    found = {}
    for name, field in new.items():
        called = name if name in old else plurals.get(name, name)
        before = old.get(called, {})
        if called == "name" and before:  # Pulumi makes one up where none is given
            field = before
        inner = {
            key: named_as_before(field[key], before.get(key, {})) for key in ("block", "attributes") if key in field
        }
        found[called] = {**field, **inner}
    return dict(sorted(found.items()))


def main(source: str, name: str, path: str, *kinds: str) -> None:
    file = SCHEMAS / f"{name}.json"
    document: Json = json.loads(file.read_text()) if file.exists() else {"source": name, "version": "", "schemas": {}}
    wanted = kinds or tuple(document["schemas"])
    if source == "cdktn":
        wanted = tuple(kind for kind in wanted if kind != "provider")
        wheel = Cdktn(Path(path), wanted)
        schemas = {kind: wheel(kind) for kind in wanted}
        document["version"] = wheel.version
    elif source == "pulumi":
        made = Pulumi(Path(path), framework=document.get("framework", False))
        schemas = {kind: named_as_before(made(kind), document["schemas"].get(kind, {})) for kind in wanted}
        document["version"] = made.version
    else:
        printed = json.loads(Path(path).read_text())
        schemas = {kind: from_terraform(printed, kind) for kind in wanted}
        [document["source"]] = [each.partition("/")[2] for each in printed["provider_schemas"]]
    for kind in wanted:
        document["schemas"][kind] = merged(schemas[kind], document["schemas"].get(kind, {}))
    file.write_text(written(document) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
