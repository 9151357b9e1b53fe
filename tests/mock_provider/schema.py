"""The schemas in schemas/: what they say of each argument, and how Terraform is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mock_provider.world import Failure

if TYPE_CHECKING:
    from tf.gen import tfplugin_pb2 as pb

SCHEMAS = Path(__file__).parent / "schemas"
# tfplugin6.Schema.Attribute.write_only (11), younger than the protocol of the package tf.
WRITE_ONLY = b"\x58\x01"


@dataclass(frozen=True)
class Field:
    """One argument or attribute.

    ``type`` is that of a plain attribute. ``block`` holds the fields of a nested block, ``attributes`` those of a
    nested attribute; both have a ``nesting``. What Terraform is not told: ``replaces`` (a change forces replacement;
    "set": that it comes or goes; ``{"if": ARGUMENT, "says": ...}``: where that argument is true, and is refused
    otherwise), ``default``, ``kept`` (whether it is known before an update), ``hashed`` (the state has its SHA-1
    alone), ``values``, ``matches`` and ``between`` (the provider refuses others), ``one_of`` (exactly one of these is
    declared), ``conflicts`` (none of these is declared with it), ``accepted`` and ``max_bytes`` (the cloud refuses
    others, at create), ``gives`` (what the cloud answers; ``{n}`` counts), ``unanswered`` (the provider leaves it
    unknown after a create, which Terraform refuses), ``found`` (what a refresh finds where nothing was declared),
    ``said`` (false: a refresh does not find a block in which nothing but false, 0 and empty values were declared).
    """

    name: str
    type: Any = None
    nesting: str = ""
    block: dict[str, Any] | None = None
    attributes: dict[str, Any] | None = None
    min: int = 0
    max: int = 0
    required: bool = False
    optional: bool = False
    computed: bool = False
    sensitive: bool = False
    write_only: bool = False
    replaces: bool | str | dict[str, str] = False
    kept: bool | None = None
    hashed: bool = False
    default: Any = None
    values: tuple[str, ...] = ()
    matches: str = ""
    between: tuple[float | None, float | None] = (None, None)
    one_of: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    max_bytes: int = 0
    gives: Any = None
    unanswered: bool = False
    found: Any = None
    said: bool = True

    @cached_property
    def fields(self) -> Fields:
        """What is in a nested block or nested attribute."""
        return fields(self.block if self.block is not None else self.attributes or {})

    @property
    def nested(self) -> bool:
        return bool(self.nesting)


Fields = dict[str, Field]


def fields(schema: dict[str, Any]) -> Fields:
    return {name: Field(name, **each) for name, each in schema.items()}


@dataclass(frozen=True)
class Schema:
    """A provider: ``resources`` are by the name of their type, ``data`` are data sources.

    A ``framework`` provider is held to more by Terraform than one that is made with the older SDK, and does not know
    its computed attributes while something else changes. ``failures`` are what it always refuses.
    """

    source: str
    version: str
    framework: bool
    provider: Fields
    resources: dict[str, Fields]
    data: dict[str, Fields]
    failures: tuple[Failure, ...] = ()

    @classmethod
    def read(cls, name: str) -> Schema:
        document = json.loads((SCHEMAS / f"{name}.json").read_text())
        kinds = {kind: fields(each) for kind, each in document["schemas"].items()}
        provider = kinds.pop("provider", {})
        data = {kind.removeprefix("data."): each for kind, each in kinds.items() if kind.startswith("data.")}
        resources = {kind: each for kind, each in kinds.items() if not kind.startswith("data.")}
        framework = document.get("framework", False)
        failures = tuple(Failure(**each) for each in document.get("failures", ()))
        return cls(document["source"], document["version"], framework, provider, resources, data, failures)

    def told(self) -> pb.GetProviderSchema.Response:
        """What Terraform asks a provider for first."""
        from tf.gen import tfplugin_pb2 as pb  # who serves a provider has it; others read schemas

        return pb.GetProviderSchema.Response(
            provider=pb.Schema(block=_block(self.provider)),
            resource_schemas={kind: pb.Schema(block=_block(each)) for kind, each in self.resources.items()},
            data_source_schemas={kind: pb.Schema(block=_block(each)) for kind, each in self.data.items()},
            server_capabilities=pb.ServerCapabilities(get_provider_schema_optional=True),
        )


def _block(schema: Fields) -> pb.Schema.Block:
    from tf.gen import tfplugin_pb2 as pb  # who serves a provider has it; others read schemas

    blocks = [each for each in schema.values() if each.block is not None]
    return pb.Schema.Block(
        attributes=[_attribute(each) for each in schema.values() if each.block is None],
        block_types=[
            pb.Schema.NestedBlock(
                type_name=each.name,
                block=_block(each.fields),
                nesting=pb.Schema.NestedBlock.NestingMode.Value(each.nesting.upper()),
                min_items=each.min,
                max_items=each.max,
            )
            for each in blocks
        ],
    )


def _attribute(field: Field) -> pb.Schema.Attribute:
    from tf.gen import tfplugin_pb2 as pb  # who serves a provider has it; others read schemas

    told = pb.Schema.Attribute(
        name=field.name,
        required=field.required,
        optional=field.optional,
        computed=field.computed,
        sensitive=field.sensitive,
    )
    if field.nested:
        nesting = pb.Schema.Object.NestingMode.Value(field.nesting.upper())
        told.nested_type.nesting = nesting
        told.nested_type.attributes.extend(_attribute(each) for each in field.fields.values())
    else:
        told.type = json.dumps(field.type).encode()
    if field.write_only:
        told.MergeFromString(WRITE_ONLY)
    return told
