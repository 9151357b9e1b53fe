"""The base of everything that is declared: frozen, strict, unknown fields refused, errors in our own words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator

from skyinfra.errors import InvalidField, SkyinfraError
from skyinfra.errors.options import nearest, no_attribute

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


# How cdktf and cdktn write an output of another construct, which Terraform alone knows: in a text, or as a number.
_TOKEN = re.compile(r"[$#@&]\{TfToken\[")
_TOKEN_NUMBERS = -1e288


def is_output(value: object) -> bool:
    """Returns whether *value* is, or holds, an output of another construct (a token): only Terraform knows it."""
    if isinstance(value, str):
        return _TOKEN.search(value) is not None
    if isinstance(value, float):
        return value < _TOKEN_NUMBERS
    if isinstance(value, Mapping):
        return any(is_output(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return any(map(is_output, value))
    return _is_object(value)


def _is_object(value: object) -> bool:
    """Returns whether it is a token as an object of jsii, as ``module.get(...)`` gives it."""
    return type(value).__module__.partition(".")[0] in ("jsii", "cdktf", "cdktn") and hasattr(value, "resolve")


def _unless_output(value: Any, check: Any) -> Any:
    if not is_output(value):
        return check(value)
    return tuple(value) if isinstance(value, list) else value


# Marks a field of which the value may be an output of another construct: it reaches nothing but Terraform.
OUTPUT = WrapValidator(_unless_output)


if TYPE_CHECKING:
    _Model = BaseModel
else:

    class _Named(type(BaseModel)):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattr__(name)
            raise no_attribute(name, cls.words or cls.__name__)

    class _Model(BaseModel, metaclass=_Named):
        words: ClassVar[str] = ""


class Declaration(_Model):
    """Base of the declaration's models. Raises `InvalidField` where pydantic would raise its ValidationError."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True
    )

    # Whose options of other tools are known, see `skyinfra.errors.peers`; its own name, if empty.
    words: ClassVar[str] = ""
    # Fields whose parts say themselves what of them may be an output of another construct.
    outputs: ClassVar[frozenset[str]] = frozenset()

    # Hidden from type checkers, so that they and editors keep the signature made from the fields.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattr__(name)
            raise no_attribute(name, type(self).words or type(self).__name__)

        def __init__(self, *given: Any, **values: Any) -> None:
            if given:
                first = next(iter(type(self).model_fields), "field")
                hint = f"Write {type(self).__name__}({first}=..., ...)."
                raise InvalidField("takes its fields by name", field=type(self).__name__, given=given[0], hint=hint)
            _refuse_outputs(type(self), values)
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _translate(type(self), error, self.also_wrong(values)) from None

        # In place of *given*, for who asks what the class takes.
        __init__.__signature__ = inspect.signature(lambda self, **values: None)

    @classmethod
    def also_wrong(cls, values: Mapping[str, Any]) -> Sequence[SkyinfraError]:
        """Returns what is wrong in *values* besides what pydantic complains about, which is then not looked for."""
        return ()


def _refuse_outputs(model: type[Declaration], values: Mapping[str, Any]) -> None:
    """Raises `InvalidField` where an output of another construct is given for a field that is needed before it."""
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None or not is_output(value):
            continue
        parts = value if isinstance(value, list | tuple) else [value]
        if name in model.outputs:
            continue
        if any(map(_is_object, parts)):
            message, hint = (
                "is an object of jsii",
                "Take the output as text or a list: get_string, get_list, Token.as_string.",
            )
        elif OUTPUT not in field.metadata:
            admitted = ", ".join(key for key, each in model.model_fields.items() if OUTPUT in each.metadata)
            message = (
                "is an output of another construct, which Terraform knows, and this is needed to synthesize the stack"
            )
            hint = "Write the value itself." + (f" Outputs can be: {admitted}." if admitted else "")
        else:
            continue
        raise InvalidField(message, field=f"{model.__name__}.{name}", hint=hint)


def _translate(model: type[Declaration], error: ValidationError, also: Sequence[SkyinfraError]) -> SkyinfraError:
    """One error of all complaints of pydantic and of the errors *also*, each with its hint.

    Unknown fields come first: one that is needed may be what they mean.
    """
    complaints = error.errors(include_url=False)
    unknown = [each for each in complaints if each["type"] == "extra_forbidden"]
    names = [str(each["loc"][-1]) for each in unknown]
    hints = {
        name: nearest(name, model.model_fields, of=model.words or model.__name__, given=each["input"])
        for name, each in zip(names, unknown, strict=True)
    }
    found = [
        InvalidField("unknown field", field=_path(model, each["loc"]), hint=hints[name].strip())
        for name, each in zip(names, unknown, strict=True)
    ]
    if found:
        found[-1].hint = f"{hints[names[-1]]}{model.__name__} has: {', '.join(sorted(model.model_fields))}."
    meant = re.findall(r"\w+", " ".join(hints.values()))
    for each in complaints:
        if each["type"] == "missing" and str(each["loc"][-1]) not in meant:
            found.append(InvalidField("is needed", field=_path(model, each["loc"])))
    wrong = _wrong_values(model, [each for each in complaints if each["type"] not in ("missing", "extra_forbidden")])
    said = [each.field for each in also if each.field]
    # What is said of a field in our words counts above what pydantic says of each kind that it may have.
    also = [*(each for path, each in wrong.items() if not any(field.startswith(path) for field in said)), *also]
    every: list[SkyinfraError] = [*found, *also]
    first = every[0]
    first.hint = "\n".join(filter(None, [first.hint, *map(str, every[1:])])) or None
    return first


# By pydantic's type of an error: what a value has to be.
_EXPECTED = {
    "bool_type": "True or False",
    "dict_type": "names with their values, such as {'team': 'ml'}",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_type": "text",
    "tuple_type": "a list",
}


def _wrong_values(model: type[Declaration], complaints: Sequence[ErrorDetails]) -> dict[str, SkyinfraError]:
    """Returns an error for each value that is wrong, by its path. Of a value that may be one of several kinds pydantic
    complains once for each kind."""
    groups: dict[str, list[ErrorDetails]] = {}
    for each in complaints:
        groups.setdefault(_path(model, _without_kinds(each)), []).append(each)
    return {path: _wrong(model, path, group) for path, group in groups.items()}


def _without_kinds(complaint: ErrorDetails) -> tuple[int | str, ...]:
    """Returns the place of *complaint* up to where pydantic says which of several kinds it has tried."""
    kinds = ("str", "int", "float", _class_of(complaint))
    place = complaint["loc"]
    end = next((at for at, part in enumerate(place) if at and (part in kinds or "[" in str(part))), len(place))
    return place[:end]


def _class_of(complaint: ErrorDetails) -> str | None:
    """Returns the name of the class that the value has to be of."""
    context = complaint.get("ctx") or {}
    return context.get("class_name") or context.get("class")


def _wrong(model: type[Declaration], path: str, complaints: Sequence[ErrorDetails]) -> InvalidField:
    """Returns the error of a value; the lines behind the first one of its message are what would work."""
    expected = list(dict.fromkeys(filter(None, map(_expected, complaints))))
    if expected and len(expected) >= len(complaints) - 1:
        message, hint = f"expected {' or '.join(expected)}", ""
    else:
        message = str(complaints[0]["msg"]).removeprefix("Value error, ")
        message, _, hint = (message[:1].lower() + message[1:]).partition("\n")
    such = _example(model, complaints[0])
    if complaints[0]["type"] == "string_pattern_mismatch" and such:
        message, hint = "cannot be written like that", such
    elif complaints[0]["type"] == "string_type":
        hint = such
    given = complaints[0].get("input")
    return InvalidField(message, field=path, given=None if isinstance(given, type) else given, hint=hint or None)


def _expected(complaint: ErrorDetails) -> str | None:
    of = _class_of(complaint)
    if complaint["type"] in ("model_type", "is_instance_of") and of:
        return "a list" if of == "Sequence" else f"sky.{'mig.' if of == 'Follow' else ''}{of}(...)"
    return _EXPECTED.get(complaint["type"])


def _example(model: type[Declaration], complaint: ErrorDetails) -> str:
    """Returns how the value of a field with a pattern is written; empty where no example is known."""
    name, *below = complaint["loc"]
    field = model.model_fields.get(str(name))
    if field is None or below:
        return ""
    examples = field.examples or ([field.default] if isinstance(field.default, str) else [])
    return f"Such as {' or '.join(map(repr, examples))}." if examples else ""


def _path(model: type[Declaration], location: tuple[int | str, ...]) -> str:
    path = model.__name__
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path


# Lines of an image ---------------------------------------------------------------------------------------------------

# What pip takes besides the requirements of PEP 508: a repository, an address, or a path of the node.
_FILE = re.compile(r"[\w.-]+\.(txt|in|toml|lock|cfg|ya?ml)", re.ASCII)
_ELSEWHERE = re.compile(r"((git|hg|svn|bzr)\+|https?://|file:)\S+|/\S+", re.ASCII)
# https://www.debian.org/doc/debian-policy/ch-controlfields.html: a name, of an architecture, a version or a release.
# apt-get removes what ends with a dash.
_PACKAGE = re.compile(
    r"[a-z0-9][a-z0-9+.-]*[a-z0-9+.](:[a-z0-9-]+)?(=[A-Za-z0-9.+:~-]+|/[A-Za-z0-9.-]+)?|/[^\x00-\x20\x7f]+\.deb",
    re.ASCII,
)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_of(text: str) -> float:
    """Returns the seconds of a length of time: a number with its unit, such as ``90s``, ``30m``, ``1.5h``, ``2d``.

    Raises ValueError.
    """
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text, re.ASCII)
    if found is None or not float(found[1]):
        raise ValueError(f"expected a length of time\nA number with its unit: 90s, 30m, 12h, 2d (given: {text!r})")
    return float(found[1]) * _UNITS[found[2]]


def _length_of_time(text: str) -> str:
    seconds_of(text)
    return text


def _length_or_never(text: str) -> str:
    return text if text == NEVER else _length_of_time(text)


NEVER = "never"
# A length of time, as `seconds_of` reads it; in the second one "never" too.
Duration = Annotated[str, AfterValidator(_length_of_time), Field(examples=["12h"])]
DurationOrNever = Annotated[str, AfterValidator(_length_or_never), Field(examples=["30m"])]


def check_requirement(field: str, text: str) -> None:
    """Raises `InvalidField` where *text* is no requirement, but an option of pip, such as another index."""
    if _ELSEWHERE.fullmatch(text):
        return
    if _FILE.fullmatch(text):  # which pip would look for in the index, where anybody may have put it
        raise InvalidField(
            "is the name of a file, and no requirement",
            field=field,
            given=text,
            hint=f'Read it: [line for line in Path("{text}").read_text().splitlines() if line[:1] not in ("", "#")].',
        )
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(text)
    except InvalidRequirement:
        raise InvalidField(
            "is no requirement that pip takes",
            field=field,
            given=text,
            hint="Such as torch, torch==2.8.0, jax[cuda12]>=0.7, the address of a wheel, or its path on the nodes; one "
            "in each string. Options are fields: index, extra_indexes, wheelhouse, proxy; run=[] has other commands.",
        ) from None


def check_package(field: str, text: str) -> None:
    """Raises `InvalidField` where *text* is no package of Debian: root hands it to apt-get."""
    if not _PACKAGE.fullmatch(text):
        raise InvalidField(
            "is no Debian package",
            field=field,
            given=text,
            hint="Such as git, libnccl2=2.27.3-1+cuda12.9, or the path of a .deb; one in each string, and no options.",
        )
