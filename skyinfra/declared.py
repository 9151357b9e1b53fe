"""The base of everything that is declared: frozen, strict, unknown fields refused, errors in our own words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from skyinfra.errors import InvalidField, did_you_mean


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
                raise _translate(type(self), error) from None


def _translate(model: type[Declaration], error: ValidationError) -> InvalidField:
    """The first of pydantic's complaints, with the others behind it."""
    complaints = error.errors(include_url=False)
    first = complaints[0]
    field = _path(model, first["loc"])
    if first["type"] == "extra_forbidden":
        known = sorted(model.model_fields)
        hint = did_you_mean(str(first["loc"][-1]), known)
        hint = f"{hint} {model.__name__} has: {', '.join(known)}.".strip()
        return InvalidField("unknown field", field=field, hint=hint)
    if first["type"] == "missing":
        return InvalidField("is needed", field=field)
    others = "\n".join(f"{_path(model, c['loc'])}: {c['msg']}" for c in complaints[1:])
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return InvalidField(message, field=field, given=first.get("input"), hint=others or None)


def _path(model: type[Declaration], location: tuple[int | str, ...]) -> str:
    path = model.__name__
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path
