"""The base of everything that is declared: frozen, strict, unknown fields refused, errors in our own words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from skyinfra.errors import InvalidField, SkyinfraError, did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class Declaration(BaseModel):
    """Base of the declaration's models. Raises `InvalidField` where pydantic would raise its ValidationError."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True
    )

    # Hidden from type checkers, so that they and editors keep the signature made from the fields.
    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _translate(type(self), error, self.also_wrong(values)) from None

    @classmethod
    def also_wrong(cls, values: Mapping[str, Any]) -> Sequence[SkyinfraError]:
        """Returns what is wrong in *values* besides what pydantic complains about, which is then not looked for."""
        return ()


def _translate(model: type[Declaration], error: ValidationError, also: Sequence[SkyinfraError]) -> InvalidField:
    """One error of all complaints of pydantic and of the errors *also*, each with its hint.

    Unknown fields come first: one that is needed may be what they mean.
    """
    complaints = error.errors(include_url=False)
    unknown = [each for each in complaints if each["type"] == "extra_forbidden"]
    hints = {str(each["loc"][-1]): did_you_mean(str(each["loc"][-1]), model.model_fields) for each in unknown}
    found = [
        InvalidField("unknown field", field=_path(model, each["loc"]), hint=hints[str(each["loc"][-1])])
        for each in unknown
    ]
    if found:
        found[-1].hint = f"{found[-1].hint} {model.__name__} has: {', '.join(sorted(model.model_fields))}.".strip()
    meant = re.findall(r"\w+", " ".join(hints.values()))
    for each in complaints:
        if each["type"] == "missing" and str(each["loc"][-1]) not in meant:
            found.append(InvalidField("is needed", field=_path(model, each["loc"])))
        elif each["type"] not in ("missing", "extra_forbidden"):
            found.append(_wrong(_path(model, each["loc"]), each))
    first, *others = found
    first.hint = "\n".join(filter(None, [first.hint, *map(str, (*others, *also))])) or None
    return first


def _wrong(field: str, complaint: ErrorDetails) -> InvalidField:
    """The error of a value; the lines behind the first one of its message are what would work."""
    message = str(complaint["msg"]).removeprefix("Value error, ")
    message, _, hint = (message[:1].lower() + message[1:]).partition("\n")
    given = complaint.get("input")
    return InvalidField(message, field=field, given=None if isinstance(given, type) else given, hint=hint or None)


def _path(model: type[Declaration], location: tuple[int | str, ...]) -> str:
    path = model.__name__
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path
