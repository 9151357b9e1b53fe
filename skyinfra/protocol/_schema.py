"""Strict reading of the JSON documents that node and client exchange.

A document is a tree of frozen dataclasses. ``read`` builds it from parsed JSON and refuses unknown keys, missing
keys and wrong kinds with the path of the field; ``write`` is its inverse. Annotations understood: ``str``, ``int``,
``float``, ``bool``, ``X | None``, ``tuple[X, ...]``, ``dict[str, X]``, ``Literal[...]``, dataclasses, and the forms of
texts below. An error shows the value that was found only where no secret can be in it: no collections, and no field
with ``repr=False``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from skyinfra.errors import SkyinfraError, did_you_mean

T = TypeVar("T")


# Forms -------------------------------------------------------------------------------------------------------------
# Of texts that become words of a command line, paths, lines of a configuration. A document may come from anybody: a
# manifest by mail, the state of a stack, a head that was taken over. None of these begins with a dash, which a program
# would take for an option (CVE-2017-1000117, git; CVE-2023-51385, OpenSSH), and none has what a shell, a configuration
# of ssh or a terminal takes for something else.


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a text. called: in words, for an error."""

    pattern: re.Pattern[str]
    called: str

    def has(self, text: str) -> bool:
        """Returns whether *text* has this form."""
        return self.pattern.fullmatch(text) is not None


def _form(pattern: str, called: str) -> Form:
    return Form(re.compile(pattern, re.ASCII), called)


_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
# Of IPv6, also with a zone or in brackets.
_HOST = r"[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]{0,252}"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,252}\$?"

Name = Annotated[str, _form(_NAME, "a name of letters, digits, dots, dashes and underscores")]
SlotName = Annotated[str, _form(rf"{_NAME}/[0-9]{{1,6}}", "the name of a slot, NODE/INDEX")]
# Empty while it is not known.
Address = Annotated[str, _form(rf"({_HOST})?", "a host name or an address")]
User = Annotated[str, _form(_USER, "the name of a user")]
# USER@HOST:PORT, as `ssh -J` and `ssh` take it; the instance of a cloud.
Target = Annotated[str, _form(rf"({_USER}@)?{_HOST}", "[USER@]HOST, or the name of a machine")]
# Of a cloud: an instance, one of its zones, projects. Slashes and colons are in those of some, addresses of files in
# none: the AWS CLI reads the file that an argument names with file://.
Identity = Annotated[
    str, _form(r"(?!.*://)([A-Za-z0-9/_][A-Za-z0-9._:/@+=~-]*)?", "an id of letters, digits and ._:/@+=~-")
]
Place = Annotated[str, Form(re.compile(r"(\w[\w ._:,'()+-]*)?"), "a zone of letters, digits and ._:,'()+-")]
# What a configuration of ssh may have between quotes.
FilePath = Annotated[str, _form(r'(?!-)[^"\\\x00-\x1f\x7f]+', "a path without quotes and backslashes")]
# The engine of containers of another machine, or its socket here; empty is what its program takes.
EngineHost = Annotated[
    str, _form(r"(?!.*(//|@)-)(ssh://[A-Za-z0-9._@:\[\]/-]+|unix:///\S+)?", "an address such as ssh://me@host")
]
Port = Annotated[int, range(0, 65536)]

# Documents ---------------------------------------------------------------------------------------------------------


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


class Document:
    """A frozen dataclass that travels as JSON.

    Arguments of a class: the *error* for JSON that cannot be read; the *source*, which begins the path of a field; the
    *version* that the document must have, and the *hint* for another version.
    """

    _reading: ClassVar[tuple[type[SkyinfraError], str, int | None, str]]

    def __init_subclass__(
        cls, *, error: type[SkyinfraError], source: str, version: int | None = None, hint: str | None = None
    ) -> None:
        hint = hint or f"This skyinfra reads version {version}: use the skyinfra that deployed the fleet."
        cls._reading = error, source, version, hint

    @classmethod
    def read(cls, value: object, *, source: str | None = None) -> Self:
        """Returns the document from parsed JSON. Raises the error of the class with the path of the field."""
        error, known, version, hint = cls._reading
        source = source or known
        if version is not None:
            check_version(value, version, path=source, error=error, hint=hint)
        document = read(cls, value, path=source, error=error)
        document._check(source)
        return document

    @classmethod
    def load(cls, path: Path, *, text_of: Callable[[Path], str] = _text_of) -> Self:
        """Returns the document in the JSON file *path*, whose text *text_of* reads. Raises the error of the class."""
        return cls.read(load(path, error=cls._reading[0], text_of=text_of), source=str(path))

    def _check(self, source: str) -> None:
        """Raises the error of the class where fields do not fit together."""

    def _refuse(self, wrong: bool, message: str, field: str, given: object = None, hint: str | None = None) -> None:
        """Raises the error of the class about *field* where it is *wrong*."""
        if wrong:
            raise self._reading[0](message, field=field, given=given, hint=hint)

    def to_json(self) -> dict[str, Any]:
        """Returns the inverse of `read`: plain JSON values."""
        return write(self)


def read(kind: type[T], value: object, *, path: str, error: type[SkyinfraError]) -> T:
    """*value* (parsed JSON) as an instance of the dataclass *kind*.

    Raises *error* with the path of the offending field.
    """
    return typing.cast(T, _read(kind, value, path, error))


def load(path: Path, *, error: type[SkyinfraError], text_of: Callable[[Path], str] = _text_of) -> object:
    """Returns the parsed JSON of the file *path*. Raises *error* where it cannot be read or is no JSON."""
    try:
        return json.loads(text_of(path))
    except OSError as reason:
        raise error(f"cannot be read: {reason.strerror}", field=str(path)) from None
    except (ValueError, RecursionError) as reason:
        raise error(f"is not JSON: {reason}", field=str(path)) from None


def check_version(value: object, version: int, *, path: str, error: type[SkyinfraError], hint: str) -> None:
    """Raises *error* where the document *value* says that it is of another version, or does not say which."""
    if isinstance(value, dict) and value.get("version") != version:
        raise error(
            "another version than can be read here", field=f"{path}.version", given=value.get("version"), hint=hint
        )


def write(document: object) -> dict[str, Any]:
    """Returns the dataclass tree *document* as plain JSON values, fields in the order they are declared."""
    return typing.cast(dict[str, Any], _write(document))


def _write(value: object) -> object:
    if value is None or isinstance(value, str | int | float):  # most of a document
        return value
    if isinstance(value, tuple | list):
        return [_write(item) for item in value]
    if isinstance(value, dict):
        return {key: _write(item) for key, item in value.items()}
    named = ((getattr(value, name), key, later) for name, key, later in _fields(type(value)))  # type: ignore[arg-type]
    return {key: _write(field) for field, key, later in named if field or not later}


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, str, bool], ...]:
    """Returns the names of the fields, their keys, and whether a false value is left out.

    ``later``: versions before do not know the field, so its key is there only where it says something; the text of
    other nodes stays that of versions before, which changes nothing there. ``before``: the key in the version before,
    which is written as long as that version may read it; both are read.
    """
    fields = dataclasses.fields(kind)
    return tuple((f.name, f.metadata.get("before", f.name), bool(f.metadata.get("later"))) for f in fields)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _read(kind: Any, value: object, path: str, error: type[SkyinfraError]) -> object:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, path, error)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        inner = [option for option in typing.get_args(kind) if option is not type(None)]
        return _read(inner[0], value, path, error)
    if origin is typing.Annotated:
        inner, form = typing.get_args(kind)
        return _checked(inner, form, value, path, error)
    if origin is tuple:
        items = _expect(list, value, path, error)
        inner_kind = typing.get_args(kind)[0]
        return tuple(_read(inner_kind, item, f"{path}[{i}]", error) for i, item in enumerate(items))
    if origin is dict:
        mapping = _expect(dict, value, path, error)
        key_kind, inner_kind = typing.get_args(kind)
        return {
            typing.cast(str, _read(key_kind, key, path, error)): _read(inner_kind, item, f"{path}.{key}", error)
            for key, item in mapping.items()
        }
    if origin is typing.Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            raise error("not one of the allowed values", field=path, given=value, hint=f"Allowed: {allowed}")
        return value
    return _expect(kind, value, path, error)


def _checked(kind: Any, form: Form | range, value: object, path: str, error: type[SkyinfraError]) -> object:
    found = _read(kind, value, path, error)
    if isinstance(form, Form):
        right, wanted = form.has(typing.cast(str, found)), form.called
    else:
        right, wanted = found in form, f"a number from {form.start} to {form.stop - 1}"
    if not right:
        raise error(f"expected {wanted}", field=path, given=found)
    return found


def _expect(kind: type[T], value: object, path: str, error: type[SkyinfraError]) -> T:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return typing.cast(T, float(value))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        given = None if isinstance(value, dict | list) else value
        raise error(f"expected {kind.__name__}, found {type(value).__name__}", field=path, given=given)
    return value


def _read_dataclass(kind: type, value: object, path: str, error: type[SkyinfraError]) -> object:
    mapping = _expect(dict, value, path, error)
    hints = _hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    names = {f.metadata["before"]: f.name for f in fields.values() if "before" in f.metadata}
    mapping = {names.get(key, key): item for key, item in mapping.items()}
    for key in mapping:
        if key not in fields:
            raise error("unknown field", field=f"{path}.{key}", hint=did_you_mean(str(key), fields) or None)
    arguments: dict[str, object] = {}
    for name, field in fields.items():
        if name in mapping:
            try:
                arguments[name] = _read(hints[name], mapping[name], f"{path}.{name}", error)
            except SkyinfraError as refused:
                if not field.repr:
                    refused.given = None
                raise
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error("missing field", field=f"{path}.{name}")
    return kind(**arguments)
