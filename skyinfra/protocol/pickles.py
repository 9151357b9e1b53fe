"""Pickling by which a node and its clients hand values to one another.

As `cloudpickle` does, but for three things. Functions and classes of a script that is the module ``__main__`` of both
are named rather than copied, so that a value that comes back has the class that its client knows. The members of an
enumeration that is copied keep their aliases and attributes. And code that is copied keeps the name of its file: from
3.1.3 on, cloudpickle writes ``<dynamic-code>`` for all, and tracebacks have neither file nor source then.

Exceptions are pickled so that they arrive as they were raised, or not at all; those within values as they are, where
their classes do not say how they are made.
"""

from __future__ import annotations

import contextlib
import enum
import io
import operator
import pickle
import re
import reprlib
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import cloudpickle

# A variable of the module ``__main__`` where it is the script of a client; see `skyinfra.program.main`.
MARK = "__skyinfra_program__"
# Attributes of a member that `enum` sets.
_OF_ENUM = {"_value_", "_name_", "_sort_order_", "_inverted_", "__objclass__"}
# The place of the file name among the arguments of CodeType, from Python 3.11 on.
_FILE = 10
# Arguments of an exception above that many bytes are shortened in texts.
_BRIEF = 65_536
# Sequences of more parts are compared by their lengths.
_LONG = 1000
# Modules whose values are what their repr says.
_SAID = {"datetime", "decimal", "fractions", "pathlib", "uuid"}
_ADDRESS = re.compile("0x[0-9a-fA-F]+")


def _code(code: types.CodeType) -> tuple[Any, ...]:
    kind, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return kind, (*arguments[:_FILE], code.co_filename, *arguments[_FILE + 1 :])


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as `cloudpickle.Pickler` does, and names what stands in the script."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """As `pickle.Pickler.reducer_override`."""
        if isinstance(obj, types.FunctionType | type) and _is_of_script(obj):
            return NotImplemented
        if isinstance(obj, BaseException) and _has_own_init(type(obj)):
            return _unmade(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, enum.EnumMeta) and isinstance(reduced, tuple) and len(reduced) == 6:
            return _enumeration(obj, reduced)
        return reduced


def dumps(value: object) -> bytes:
    """Returns *value*, pickled in one piece. Raises what pickling it raises."""
    with io.BytesIO() as file:
        Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


def _is_of_script(value: Any) -> bool:
    main = sys.modules.get("__main__")
    if getattr(value, "__module__", None) != "__main__" or main is None or MARK not in vars(main):
        return False
    try:
        return operator.attrgetter(value.__qualname__)(main) is value
    except AttributeError:
        return False


# The copy that `cloudpickle` makes of an enumeration has its canonical members, and nothing that a constructor of the
# user's gave them.


def _enumeration(kind: type[Any], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    make, (bases, name, qualname, _, *rest), (names, slots), *_, setter = reduced
    members: dict[str, Any] = dict(kind.__members__)
    values = {each: member.value for each, member in members.items()}
    attributes = {
        each: {key: value for key, value in vars(member).items() if key not in _OF_ENUM}
        for each, member in members.items()
    }
    state = {key: value for key, value in names.items() if key not in members}, slots
    arguments = (bases, name, qualname, values, *rest)
    return make, arguments, (state, setter, attributes), None, None, _set_enumeration


def _set_enumeration(kind: type[Any], given: tuple[Any, Any, dict[str, dict[str, Any]]]) -> None:
    state, setter, attributes = given
    setter(kind, state)
    members: dict[str, Any] = dict(kind.__members__)
    for name, found in attributes.items():
        vars(members[name]).update(found)


# Exceptions ---------------------------------------------------------------------------------------------------------


def said(error: BaseException) -> str | None:
    """Returns the text of *error*, with large arguments shortened; None where its ``__str__`` raises an exception."""
    args = error.args
    plain = type(error).__str__ is BaseException.__str__
    if plain and len(args) == 1 and isinstance(args[0], str):
        return str(args[0])
    if plain and sum(map(sys.getsizeof, args)) > _BRIEF:
        return _short.repr(args[0] if len(args) == 1 else args)
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - it is code of the user
        return None


class _Short(reprlib.Repr):
    def repr_bytes(self, value: bytes, _level: int) -> str:
        """Returns the first bytes, and how many there are."""
        return f"{value[:60]!r}... ({len(value)} bytes)" if len(value) > 60 else repr(value)


_short = _Short()
_short.maxstring = _short.maxother = 1000


def dumped(error: BaseException, text: str | None) -> bytes | None:
    """*error* pickled, or None where what arrives would be another one. It has no chain and no traceback meanwhile."""
    for reduced in (_reduced, _unmade, _made_anew, _completed):
        with contextlib.suppress(Exception):
            file = io.BytesIO()
            _Exceptions(file, reduced).dump(error)
            data = file.getvalue()
            made = pickle.loads(data)  # noqa: S301 - what was pickled here in this moment
            if isinstance(error, BaseExceptionGroup):
                made = made(error.exceptions)
            if _same(error, made, text):
                return data
    return None


class _Exceptions(Pickler):
    """Pickles exceptions as *reduced* does, whatever Dask registers for their classes: that loses the code of a
    SystemExit, and ships chains and tracebacks."""

    def __init__(self, file: io.BytesIO, reduced: Callable[[BaseException], Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._reduced = reduced

    def reducer_override(self, obj: Any) -> Any:
        """As `pickle.Pickler.reducer_override`."""
        return self._reduced(obj) if isinstance(obj, BaseException) else super().reducer_override(obj)


def _has_own_init(kind: type[BaseException]) -> bool:
    """Returns whether *kind* may take other arguments than it keeps, and does not say how it is pickled."""
    ways = next(each for each in kind.__mro__ if {"__reduce__", "__reduce_ex__"} & set(vars(each)))
    own = isinstance(kind.__init__, types.FunctionType)
    return own and ways.__module__ == "builtins" and not issubclass(kind, BaseExceptionGroup)


def _reduced(error: BaseException) -> Any:
    """As the class wants it. An ``__init__`` that is called again may compute other arguments, of which not all tell
    whether they are the same."""
    return _unmade(error) if _has_own_init(type(error)) else _made_anew(error)


def _made_anew(error: BaseException) -> Any:
    """As the class wants it, with its ``__init__``, which may set what does not travel."""
    if isinstance(error, BaseExceptionGroup):
        return _unmade(error)
    return error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _unmade(error: BaseException) -> Any:
    """To be made without ``__init__``, which may take other arguments than it hands to ``Exception``."""
    if isinstance(error, BaseExceptionGroup):
        return partial, (_grouped, type(error), error.message, dict(error.__dict__), _slots(error))
    return rebuild, (type(error), error.args, dict(error.__dict__), _slots(error))


def _completed(error: BaseException) -> Any:
    """As the class wants it, with what its ``__reduce__`` leaves out, such as notes, or gives other values."""
    ways = (kind for kind in type(error).__mro__ if {"__reduce__", "__reduce_ex__"} & set(vars(kind)))
    if next(ways).__module__ == "builtins":
        raise TypeError("its class does not say how it is pickled")
    make, given = _reduced(error)[:2]
    state = {name: value for name, value in error.__dict__.items() if _picklable(value)}
    return _made, (make, given, error.args, state)


def _made(
    make: Callable[..., BaseException], given: Sequence[object], args: tuple[object, ...], state: dict[str, object]
) -> BaseException:
    return _filled(make(*given), args, state, {})


def _slots(error: BaseException) -> dict[str, object]:
    """Returns what *error* holds outside of its ``__dict__``, such as the ``filename`` of an OSError."""
    found: dict[str, object] = {}
    for kind in type(error).__mro__:
        for name, member in vars(kind).items():
            # The object of an AttributeError may be anything, and does not travel in Python either.
            if isinstance(member, types.MemberDescriptorType) and (kind, name) != (AttributeError, "obj"):
                value = getattr(error, name, None)
                # Set to None, some change the text.
                if value is not None and name not in ("message", "exceptions", "__suppress_context__"):
                    found[name] = value
    return found


def rebuild(
    kind: type[BaseException],
    args: tuple[object, ...],
    state: dict[str, object],
    slots: Mapping[str, object] = types.MappingProxyType({}),
) -> BaseException:
    """Makes an exception without its ``__init__`` and ``__new__``."""
    plain: Any = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    error: BaseException = plain.__new__(kind, *args)
    return _filled(error, args, state, slots)


def _grouped(
    kind: type[BaseExceptionGroup[Any]],
    message: str,
    state: dict[str, object],
    slots: Mapping[str, object],
    members: Sequence[BaseException],
) -> BaseException:
    """Makes a group of *members*."""
    error: BaseException = BaseExceptionGroup.__new__(kind, message, list(members))
    return _filled(error, (message, list(members)), state, slots)


def _filled(
    error: BaseException, args: tuple[object, ...], state: dict[str, object], slots: Mapping[str, object]
) -> BaseException:
    for name, value in [("args", args), *slots.items()]:
        BaseException.__setattr__(error, name, value)
    error.__dict__.update(state)
    return error


def _same(error: BaseException, made: object, text: str | None) -> bool:
    """Returns whether *made* is what *error* is, whose text is *text*."""
    if type(made) is not type(error) or not isinstance(made, BaseException):
        return False
    if not isinstance(error, BaseExceptionGroup) and not _alike(error.args, made.args):
        return False
    # Else it is that of the arguments, of which some tell what does not travel: a tensor has no grad_fn there.
    plain = type(error).__str__ in (BaseException.__str__, KeyError.__str__)
    if not plain and _compared(text) != _compared(said(made)):
        return False
    # A class may leave out what cannot be pickled.
    return all(
        _alike(value, made.__dict__[name]) if name in made.__dict__ else not _picklable(value)
        for name, value in error.__dict__.items()
    )


def _compared(text: str | None) -> list[str] | None:
    """Returns *text* without addresses; sets may have another order."""
    return None if text is None else sorted(_ADDRESS.sub("", text))


def _alike(one: object, other: object, seen: frozenset[int] = frozenset()) -> bool:
    """Whether both are of one type, and equal where they are plain values: other objects may be equal to nothing."""
    if type(one) is not type(other):
        return False
    for kind in (str, bytes, int):
        if isinstance(one, kind) and isinstance(other, kind):
            # That of the kind itself: a class may say anything.
            equal: Any = kind.__eq__
            return bool(equal(one, other))
    if isinstance(one, float) and isinstance(other, float):
        return float.__repr__(one) == float.__repr__(other)  # a NaN is not equal to itself
    if id(one) in seen:  # it is in itself
        return True
    seen |= {id(one)}
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and (
            len(one) > _LONG or all(_alike(*each, seen) for each in zip(one, other, strict=False))
        )
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = zip(dict.items(one), dict.items(other), strict=False)
        return len(one) == len(other) and (len(one) > _LONG or all(_alike(*each, seen) for each in pairs))
    if isinstance(one, BaseException) and isinstance(other, BaseException):
        return _alike(one.args, other.args, seen)
    if type(one) is complex or type(one).__module__.partition(".")[0] in _SAID:
        return _compared(repr(one)) == _compared(repr(other))
    return True


def _picklable(value: object) -> bool:
    try:
        _Exceptions(io.BytesIO(), _reduced).dump(value)
    except Exception:  # noqa: BLE001 - __reduce__ and __getstate__ may raise anything
        return False
    return True
