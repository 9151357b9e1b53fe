"""Values of resources, walked by their schema: what is planned, what it replaces, what the cloud makes of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
from tf.gen import tfplugin_pb2 as pb

from mock_provider.schema import Field, Fields

Value = Any
Step = str | int
Path = tuple[Step, ...]


class Refused(Exception):
    """Raised where a provider does not plan a change; says why."""


class _Unknown:
    """A value that is known after the apply; one of its kind."""

    def __repr__(self) -> str:
        return "(known after apply)"


UNKNOWN = _Unknown()


def decoded(value: pb.DynamicValue) -> Value:
    """As Terraform sends it, with UNKNOWN; lists for sets, None for null."""
    if not value.msgpack:
        return json.loads(value.json) if value.json else None
    return msgpack.unpackb(value.msgpack, ext_hook=lambda code, data: UNKNOWN, strict_map_key=False)


def encoded(value: Value) -> pb.DynamicValue:
    unknown = msgpack.ExtType(0, b"\x00")
    return pb.DynamicValue(msgpack=msgpack.packb(value, default=lambda each: unknown))


def attribute_path(path: Path) -> pb.AttributePath:
    return pb.AttributePath(
        steps=[
            pb.AttributePath.Step(element_key_int=step)
            if isinstance(step, int)
            else pb.AttributePath.Step(attribute_name=step)
            for step in path
        ]
    )


def elements(field: Field, value: Value) -> list[dict[str, Value]]:
    """What stands in the value of a nested block or nested attribute, whatever its nesting."""
    if not field.nested or value is None or value is UNKNOWN:
        return []
    if field.nesting == "map":
        return list(value.values())
    return [value] if field.nesting in ("single", "group") else list(value)


def changed(field: Field, value: Value, change: Callable[[Fields, dict[str, Value]], dict[str, Value]]) -> Value:
    """A nested value, each element of which is changed."""
    if value is None or value is UNKNOWN:
        return value
    if field.nesting == "map":
        return {key: each if each in (None, UNKNOWN) else change(field.fields, each) for key, each in value.items()}
    if field.nesting in ("single", "group"):
        return change(field.fields, value)
    return [each if each in (None, UNKNOWN) else change(field.fields, each) for each in value]


def planned(schema: Fields, proposed: dict[str, Value]) -> dict[str, Value]:
    """With defaults, and unknown where the cloud will say: Terraform has put in what it said before."""
    return {name: _planned(schema[name], value) for name, value in proposed.items()}


def _planned(field: Field, value: Value) -> Value:
    if field.write_only:
        return None
    if value is None and field.default is not None:
        return field.default
    if value is None and field.computed:
        return UNKNOWN
    if field.hashed and isinstance(value, str):
        # Of what `ignore_changes` holds it is the hash of a hash, which Terraform takes back, as of the real one.
        return hashlib.sha1(value.encode()).hexdigest()
    return changed(field, value, planned) if field.nested else value


def updated(
    schema: Fields, config: dict[str, Value], prior: dict[str, Value], plan: dict[str, Value], legacy: bool
) -> dict[str, Value]:
    """The plan of an update: the older SDK keeps what is computed, and a computed collection even where another is
    declared that is not known yet; of the framework it is unknown, unless the provider says that it is kept."""
    found = {}
    for name, value in plan.items():
        field, before = schema[name], prior[name]
        known = legacy if field.kept is None else field.kept
        if legacy and field.computed and isinstance(field.type, list) and value is UNKNOWN and before:
            value = before
        elif field.computed and not known and config[name] is None:
            value = UNKNOWN
        found[name] = value
    return found


def replacing(schema: Fields, prior: dict[str, Value], plan: dict[str, Value], path: Path = ()) -> Iterator[Path]:
    """The paths of the changes that force replacement; none leads into a set, whose elements have no address."""
    for name, field in schema.items():
        before, after, here = prior.get(name), plan.get(name), (*path, name)
        if before == after or (field.replaces == "set" and None not in (before, after)):
            continue
        if isinstance(field.replaces, dict) and not plan.get(field.replaces["if"]):
            raise Refused(field.replaces["says"])
        if field.replaces and not (field.nested and _only_computed(field, before, after)):
            yield here
        elif field.nested:
            yield from _replacing_within(field, before, after, here)


def _replacing_within(field: Field, before: Value, after: Value, path: Path) -> Iterator[Path]:
    old, new = elements(field, before), elements(field, after)
    if field.nesting == "list" and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from replacing(field.fields, one, other, (*path, index))
    elif field.nesting == "single" and old and new:
        yield from replacing(field.fields, old[0], new[0], path)
    elif any(_forces(field.fields, each) for each in [*old, *new] if each not in old or each not in new):
        yield path


def _only_computed(field: Field, before: Value, after: Value) -> bool:
    """Whether a block differs in nothing that can be declared."""

    def declared(schema: Fields, value: dict[str, Value]) -> dict[str, Value]:
        kept = {name: each for name, each in value.items() if not schema[name].computed or schema[name].optional}
        return {
            name: changed(schema[name], each, declared) if schema[name].nested else each for name, each in kept.items()
        }

    return bool(changed(field, before, declared) == changed(field, after, declared))


def _forces(schema: Fields, value: dict[str, Value]) -> bool:
    """Whether an element that comes or goes has set something that forces replacement."""
    return any(
        (schema[name].replaces and each not in (None, [], {}))
        or (schema[name].nested and any(_forces(schema[name].fields, one) for one in elements(schema[name], each)))
        for name, each in value.items()
    )


def filled(schema: Fields, value: dict[str, Value], n: int, answers: dict[str, Value]) -> dict[str, Value]:
    """What stands once the cloud has made it: number *n*, with *answers* that a test wants to see."""
    return {name: _filled(schema[name], each, n, answers) for name, each in value.items()}


def _filled(field: Field, value: Value, n: int, answers: dict[str, Value]) -> Value:
    if value is not UNKNOWN:
        return changed(field, value, lambda schema, each: filled(schema, each, n, {})) if field.nested else value
    answer = answers.get(field.name, field.gives)
    if answer is not None or field.name in answers:
        return _counted(answer, n)
    if not field.nested and field.optional and isinstance(field.type, list):
        # Of what could be declared and was not, there is none.
        return {} if field.type[0] == "map" else []
    if not field.nested:
        return _made(field.type, field.name, n)
    element = filled(field.fields, dict.fromkeys(field.fields, UNKNOWN), n, {})
    return {"single": element, "map": {"one": element}}.get(field.nesting, [element])


def _counted(answer: Value, n: int) -> Value:
    """The answer, with n for ``{n}`` in its texts."""
    if isinstance(answer, str):
        return answer.replace("{n}", str(n))
    if isinstance(answer, list):
        return [_counted(each, n) for each in answer]
    return {key: _counted(each, n) for key, each in answer.items()} if isinstance(answer, dict) else answer


def _made(kind: Any, name: str, n: int) -> Value:
    """A value of the type *kind* for the attribute *name*."""
    if kind == "string":
        address = name in ("ip", "public_ip", "private_ip", "nat_ip", "main_ip") or "ip_address" in name
        return f"10.{n // 65536 % 256}.{n // 256 % 256}.{n % 256}" if address else f"{name}-{n}"
    if kind in ("number", "bool"):
        return n if kind == "number" else False
    if kind == "dynamic":
        return None
    shape, inner = kind
    if shape == "object":
        return {each: _made(one, each, n) for each, one in inner.items()}
    return {} if shape == "map" else [_made(inner, name, n)]


def refused(schema: Fields, config: dict[str, Value], path: Path = ()) -> Iterator[tuple[Path, str]]:
    """What the provider itself refuses, with its path: a value that is none of those it knows, or that it gives."""
    declared = {name: config[name] for name in schema if config.get(name) not in (None, [], {})}
    for name, field in schema.items():
        value = config.get(name)
        if value is not None and field.computed and not field.optional:
            yield (*path, name), f"Can't configure a value for {name}: its value will be decided automatically"
        for said in _invalid(field, value, declared):
            yield (*path, name), said
        for index, each in enumerate(elements(field, value)):
            step = (index,) if field.nesting == "list" else ()
            # A path cannot name an element of a set.
            yield from refused(field.fields, each, (*path, name, *step) if field.nesting != "set" else path)


def _invalid(field: Field, value: Value, declared: dict[str, Value]) -> Iterator[str]:
    """Returns what is wrong with the *value* of an argument, where those of *declared* stand beside it.

    One that is unknown may be null in the end.
    """
    known = {name for name, each in declared.items() if each is not UNKNOWN}
    for each in _parts(value):
        if field.values and isinstance(each, str) and each not in field.values:
            others = " ".join(json.dumps(one) for one in field.values)
            yield f"expected {field.name} to be one of [{others}], got {each}"
        if field.matches and isinstance(each, str) and not re.search(field.matches, each):
            yield f"invalid value for {field.name}: {each} does not match {field.matches}"
        low, high = field.between
        if isinstance(each, (int, float)) and not (low is None or low <= each) & (high is None or each <= high):
            yield f"expected {field.name} to be in the range ({low} - {high}), got {each}"
    if field.one_of and field.name == field.one_of[0]:
        least, most = len(known.intersection(field.one_of)), len(declared.keys() & field.one_of)
        if least > 1 or most < 1:
            yield f"exactly one of {', '.join(field.one_of)} must be specified"
    if field.name in known and (both := sorted(known.intersection(field.conflicts))):
        yield f"{field.name}: conflicts with {', '.join(both)}"


def _parts(value: Value) -> list[Value]:
    """The values in a plain argument that are known."""
    found = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [each for each in found if each is not None and each is not UNKNOWN]


def unanswered(schema: Fields, plan: dict[str, Value]) -> list[str]:
    """The arguments that the provider leaves unknown after it has created a resource that was planned so."""
    return [name for name, field in schema.items() if field.unanswered and plan[name] is UNKNOWN]


def refreshed(schema: Fields, state: dict[str, Value]) -> dict[str, Value]:
    """Returns the state as a refresh leaves it."""
    return {name: _refreshed(schema[name], value) for name, value in state.items()}


def _refreshed(field: Field, value: Value) -> Value:
    if not field.said and not any(each for element in elements(field, value) for each in element.values()):
        return []
    return field.found if value is None else value


def refused_by_cloud(schema: Fields, value: dict[str, Value]) -> str | None:
    """What the cloud would answer to such a request to create it."""
    for name, field in schema.items():
        given = value.get(name)
        if field.accepted and isinstance(given, str) and given not in field.accepted:
            return f"{name}: {given} is not one of {', '.join(field.accepted)}"
        if field.max_bytes and isinstance(given, str) and len(given.encode()) > field.max_bytes:
            return f"{name}: {len(given.encode())} bytes, and at most {field.max_bytes} are allowed"
        for each in elements(field, given):
            said = refused_by_cloud(field.fields, each)
            if said:
                return said
    return None
