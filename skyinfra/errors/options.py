"""Checks of options, in words that name the option where Python would name a function of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from skyinfra.errors.base import did_you_mean
from skyinfra.errors.declarations import InvalidField
from skyinfra.errors.peers import meant

P = ParamSpec("P")
R = TypeVar("R")

# Variables of ours that are for users to set: tracebacks of commands, and how ranks of JAX meet.
_OF_USERS = ("SKYINFRA_DEBUG", "SKYINFRA_JAX_DISTRIBUTED")


def nearest(name: str, known: Collection[str], *, of: str, given: object = None) -> str:
    """Returns what the unknown *name* of *of* means, to begin a hint: it is another tool's word, or misspelled.

    given: its value.
    """
    if said := meant(name, of, known, given):
        return f"{said}\n"
    near = did_you_mean(name, known)
    return f"{near} " if near else ""


def unknown_option(name: str, known: Iterable[str], *, of: str, given: object = None) -> InvalidField:
    """Returns the error for an option that *of* has not, with the nearest of the *known* ones."""
    known = sorted(known)
    hint = f"{nearest(name, known, of=of, given=given)}{of} has: {', '.join(known)}."
    return InvalidField(f"no option of {of}", field=name, hint=hint)


def check_options(given: Iterable[str], known: Collection[str], *, of: str) -> None:
    """Raises `InvalidField` for the first of the *given* names that is not *known*."""
    for name in given:
        if name not in known:
            value = given[name] if isinstance(given, Mapping) else None
            raise unknown_option(name, known, of=of, given=value)


def check_kind(field: str, value: object, kind: type[Any] | tuple[type[Any], ...], words: str) -> None:
    """Raises `InvalidField` unless *value* is a *kind*, which is *words*; True and False are no numbers."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise InvalidField(f"expected {words}", field=field, given=value)


def is_ours(variable: str) -> bool:
    """Returns whether the runner alone sets *variable*: it says where files, slots and secrets of a task are."""
    return variable.startswith("SKYINFRA_") and variable not in _OF_USERS


def check_mapping(field: str, value: object) -> None:
    """Raises `InvalidField` unless *value* is variables for a process: strings by strings, and none that `is_ours`."""
    pairs = value.items() if isinstance(value, Mapping) else [(value, None)]
    for name, text in pairs:
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidField("expected variables, such as {'NAME': 'value'}", field=field, given=name)
        if not name or "=" in name or "\0" in name or "\0" in text:
            raise InvalidField("no process can have such a variable", field=field, given=name)
        if is_ours(name):
            raise InvalidField(
                "the runner sets this variable",
                field=field,
                given=name,
                hint="Give yours another name than SKYINFRA_...",
            )


def no_attribute(name: str, of: str) -> AttributeError:
    """Returns the error for an attribute that *of* has not, with what it is here where it is another tool's."""
    said = meant(name, of, None)
    return AttributeError(f"{of} has no {name!r}{f'. {said}' if said else ''}")


def refuses_unknown_options(of: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: a keyword that the function has not is an `InvalidField` with the nearest one.

    So are more arguments than it takes, where another tool takes as many.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code = function.__code__
        names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
        known = [name for name in names if name != "self"]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check_options(kwargs, known, of=of)
            if len(args) > code.co_argcount and (said := meant("*", of, None)):
                raise InvalidField("takes other arguments", field=of, hint=said)
            return function(*args, **kwargs)

        return call

    return decorate
