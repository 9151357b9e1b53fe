"""Asks a provider what forces replacement and what its defaults are, and writes that into tests/mock_provider/schemas.

    python -m tools.provider_asked NAME PROGRAM CONFIGURATION [TYPE ...]

Each argument is planned left out, and changed, as Terraform would; nothing is created. CONFIGURATION is JSON, the
arguments of the provider's block with which it asks nobody. Speaks version 5 of the protocol, whose messages are those
of version 6 in the package tf.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import msgpack
from tf.gen import tfplugin_pb2 as pb

from tools.provider_schema import SCHEMAS, Json, written

COOKIE = {"TF_PLUGIN_MAGIC_COOKIE": "d602bf8f470bc67ca7faa0386276bbdd4330efaf76d1a219cb4d6991ca9872b2"}
Path = tuple[str | int, ...]


class Asked:
    """A provider that runs."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(f"unix:{address}", [("grpc.max_receive_message_length", -1)])

    def call(self, method: str, request: Any, answer: Any) -> Any:
        name = f"/tfplugin5.Provider/{method}"
        send = self.channel.unary_unary(name, type(request).SerializeToString, answer.FromString)
        return send(request, timeout=120)

    def configure(self, schema: Json, given: Json) -> None:
        config = {**empty(schema), **given}
        request = pb.ConfigureProvider.Request(terraform_version="1.11.4", config=_encoded(config))
        said = self.call("Configure", request, pb.ConfigureProvider.Response).diagnostics
        if said:
            raise SystemExit(str(said))

    def plan(self, kind: str, prior: Json | None, proposed: Json, config: Json) -> tuple[Json, list[Path]]:
        """Returns the plan, and the paths that force replacement."""
        request = pb.PlanResourceChange.Request(
            type_name=kind, prior_state=_encoded(prior), proposed_new_state=_encoded(proposed), config=_encoded(config)
        )
        answer = self.call("PlanResourceChange", request, pb.PlanResourceChange.Response)
        planned = msgpack.unpackb(answer.planned_state.msgpack or b"\xc0", strict_map_key=False)
        return planned or {}, [_path(each) for each in answer.requires_replace]


def _encoded(value: Any) -> pb.DynamicValue:
    return pb.DynamicValue(msgpack=msgpack.packb(value))


def _path(path: Any) -> Path:
    return tuple(step.attribute_name for step in path.steps if step.attribute_name)


def empty(schema: Json) -> Json:
    """A configuration that declares nothing."""
    lists = ("list", "set")
    return {name: [] if "block" in each and each["nesting"] in lists else None for name, each in schema.items()}


def sample(kind: Any, text: str) -> Any:
    """A value of a type, of which *text* makes one or another."""
    if kind == "string":
        return text
    if kind in ("number", "bool"):
        return len(text) if kind == "number" else len(text) > 1
    shape, inner = kind
    if shape == "object":
        return {name: sample(each, text) for name, each in inner.items()}
    return {"a": sample(inner, text)} if shape == "map" else [sample(inner, text)]


def declared(schema: Json) -> Json:
    """Returns the arguments that must be declared, and nothing else."""
    value = empty(schema)
    for name, each in schema.items():
        if "type" in each and each.get("required"):
            value[name] = sample(each["type"], "a")
        elif each.get("min"):
            value[name] = [declared(each["block"])]
    return value


def arguments(schema: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Every argument that can be declared, with its path."""
    for name, each in schema.items():
        if (*path, name) == ("id",) or name == "timeouts":
            continue
        if "block" in each:
            yield from arguments(each["block"], (*path, name))
        elif each.get("required") or each.get("optional"):
            yield (*path, name), each


def put(schema: Json, value: Json, path: Path, what: Any) -> None:
    """Sets the argument at *path*, in blocks that are made for it."""
    name, *rest = path
    if not rest:
        value[name] = what
        return
    field = schema[name]
    if field["nesting"] in ("single", "group"):
        value[name] = value[name] or declared(field["block"])
    elif not value[name]:
        value[name] = [declared(field["block"])]
    inner = value[name] if isinstance(value[name], dict) else value[name][0]
    put(field["block"], inner, tuple(rest), what)


def got(value: Any, path: Path) -> Any:
    """Returns the value at *path*, of the first of several blocks."""
    for name in path:
        value = value[0] if isinstance(value, list) and value else value
        value = value.get(name) if isinstance(value, dict) else None
    return value


def ask(provider: Asked, kind: str, schema: Json) -> None:
    """Writes into *schema* what the provider plans."""
    base = declared(schema)
    for path, field in arguments(schema):
        for key in ("replaces", "default"):
            field.pop(key, None)
        if not field.get("computed") and not field.get("required"):
            left = copy.deepcopy(base)
            put(schema, left, path, None)
            value = got(provider.plan(kind, None, left, left)[0], path)
            if value not in (None, [], {}) and not isinstance(value, msgpack.ExtType):
                field["default"] = value
        before, after = copy.deepcopy(base), copy.deepcopy(base)
        put(schema, before, path, sample(field.get("type", "string"), "a"))
        put(schema, after, path, sample(field.get("type", "string"), "bbb"))
        known = {"id": "i"} if "id" in schema else {}
        _, found = provider.plan(kind, {**before, **known}, {**after, **known}, after)
        # What is in a set has no path but that of the set.
        if any(path[: len(each)] == each for each in found):
            field["replaces"] = True


@contextmanager
def running(program: str) -> Iterator[Asked]:
    environment = {**os.environ, **COOKIE, "PLUGIN_PROTOCOL_VERSIONS": "5"}
    with subprocess.Popen([program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        line = process.stdout.readline().decode() if process.stdout else ""
        try:
            yield Asked(line.split("|")[3])
        finally:
            process.kill()


def main(name: str, program: str, configuration: str, *kinds: str) -> None:
    file = SCHEMAS / f"{name}.json"
    document: Json = json.loads(file.read_text())
    schemas = document["schemas"]
    with running(program) as provider:
        provider.configure(schemas["provider"], json.loads(configuration))
        for kind in kinds or [each for each in schemas if each != "provider" and not each.startswith("data.")]:
            ask(provider, kind, schemas[kind])
    file.write_text(written(document) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
