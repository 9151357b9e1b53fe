"""The script of this process, which nodes get as the module ``__main__``.

A node runs what stands outside of ``if __name__ == "__main__":``, as `multiprocessing` does in the processes that it
spawns. A global variable that is set in that block is not there: one that a function uses travels with each call. A
script that connects outside of such a block would connect on the node again; its functions travel by value, as do those
of notebooks, which are no files.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.util
import operator
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle

from skyinfra import syntax
from skyinfra.tasks import modules
from skyinfra.tasks.modules import Source
from skyinfra.tasks.task import undecorated

NAME = "__main__"
# A script that reads its arguments outside of the block gets those of this process.
_READS_ARGUMENTS = {"argv", "parse_args", "parse_known_args"}
# Of a value, pickled.
_SMALL = 2**20


@dataclass(frozen=True)
class Script:
    """A script with such a block. source: as a module of its own name. package: that of ``python -m``, else empty."""

    source: Source
    package: str
    tree: ast.Module

    @property
    def main(self) -> tuple[str, ...]:
        """Its path below the folder of own modules, its package, and its arguments where an import reads them."""
        return (self.source.path, self.package, *(sys.argv[1:] if self._reads_arguments else ()))

    @cached_property
    def blocks(self) -> list[ast.If]:
        """The blocks for the main program."""
        return [each for each in self.tree.body if isinstance(each, ast.If) and _is_block(each)]

    @cached_property
    def _outside(self) -> list[ast.stmt]:
        """The other statements, with the alternatives to the blocks."""
        return [each for each in self.tree.body if each not in self.blocks] + [
            each for block in self.blocks for each in block.orelse
        ]

    @cached_property
    def top(self) -> frozenset[str]:
        """The global names that importing it sets, but for those that a block sets as well."""
        inside = {name for block in self.blocks for each in block.body for name in _bound(each)}
        outside = (name for each in self._outside for name in (*_bound(each), *_starred(each, self.package)))
        return frozenset(outside) - inside

    @cached_property
    def _altered(self) -> frozenset[str]:
        """The global names whose values a block changes in place, as in ``config.rate = 1``."""
        return frozenset(name for block in self.blocks for each in block.body for name in _changed(each))

    @cached_property
    def _literals(self) -> dict[str, object]:
        """The values of global names that are plain data at the end of an import, whichever machine runs it."""
        found: dict[str, object] = {}
        # What a function sets is computed where the import calls it.
        declared = {
            each.name: {name for node in ast.walk(each) if isinstance(node, ast.Global) for name in node.names}
            for each in self._outside
            if isinstance(each, ast.FunctionDef)
        }
        for each in self._outside:
            calls = (node.func for node in _walk(each) if isinstance(node, ast.Call))
            called = [function.id for function in calls if isinstance(function, ast.Name)]
            for name in (*_bound(each), *(name for one in called for name in declared.get(one, ()))):
                found.pop(name, None)
            if not isinstance(each, ast.Assign | ast.AnnAssign) or each.value is None:
                continue
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            with contextlib.suppress(ValueError, TypeError, ArithmeticError, MemoryError, RecursionError):
                value = _plain(each.value)
                for target in targets:
                    names, values = [target], [value]
                    if isinstance(target, ast.Tuple | ast.List):
                        names, values = target.elts, value
                    parts = zip(names, values, strict=True)
                    found.update({name.id: part for name, part in parts if isinstance(name, ast.Name)})
        return found

    def has_changed(self, name: str, value: object) -> bool:
        """Returns whether *value*, of a global name, is data that this process has changed since it was set.

        What is large and was None first is not: a model that is loaded here is loaded there too.
        """
        if name not in self._literals:
            kinds = types.ModuleType | types.FunctionType | type
            return name in self._altered and not isinstance(value, kinds) and _can_travel(value, large=False)
        before = self._literals[name]
        try:
            changed = type(value) is not type(before) or bool(value != before)
        except Exception:  # noqa: BLE001 - a comparison of the user's may raise anything; arrays do
            changed = True
        return changed and _can_travel(value, large=before is not None)

    @cached_property
    def _reads_arguments(self) -> bool:
        nodes = [node for each in self._outside for node in _walk(each)]
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return bool(_READS_ARGUMENTS & (names | {node.id for node in nodes if isinstance(node, ast.Name)}))

    def has(self, value: object) -> bool:
        """Returns whether importing the script makes *value*, a function or class, under the name that it has."""
        name = getattr(value, "__qualname__", "")
        if name.partition(".")[0] not in self.top:
            return False
        try:
            found = operator.attrgetter(name)(sys.modules[NAME])
        except AttributeError:
            return False
        code = value.__code__ if isinstance(value, types.FunctionType) else None
        # That of a decorator's wrapper is of another file.
        line = code.co_firstlineno if code is not None and code.co_filename == sys.modules[NAME].__file__ else 0
        inside = any(block.lineno <= line <= (block.end_lineno or 0) for block in self.blocks)
        return undecorated(found) is value and not inside


def current() -> Script | None:
    """Returns the script of this process, where nodes can import it."""
    main = sys.modules.get(NAME)
    if main is None or not isinstance(getattr(main, "__file__", None), str):
        return None
    script = _read(main)
    return script if script is not None and _runs_in_block(script, main) else None


@functools.lru_cache(maxsize=1)
def _read(main: types.ModuleType) -> Script | None:
    path = Path(str(main.__file__)).absolute()
    spec = getattr(main, "__spec__", None)
    if not modules.is_own_file(path):
        return None
    name = spec.name if spec is not None else path.stem
    try:
        data = path.read_bytes()
        tree = syntax.parsed(data)
    except (OSError, SyntaxError, ValueError):
        return None
    script = Script(Source(name, path, data), str(getattr(main, "__package__", None) or ""), tree)
    return script if script.blocks else None


def _runs_in_block(script: Script, main: types.ModuleType) -> bool:
    """Returns whether the statement of the script that runs now, if one does, stands in a block."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals is main.__dict__ and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
            return any(block.lineno <= line <= (block.end_lineno or 0) for block in script.blocks)
        frame = frame.f_back
    return True


def values_used(code: types.CodeType, script: Script) -> dict[str, object]:
    """Returns the global variables of the script that *code* uses and that have another value than an import gives."""
    space = vars(sys.modules[NAME])
    return {
        name: space[name]
        for name in used(code)
        if name in space and (name not in script.top or script.has_changed(name, space[name]))
    }


@functools.lru_cache(maxsize=1024)
def used(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global names that *code* reads, with those of the functions in it. Builtin names are among them, of
    which a module may have another value; ``__name__`` and the like are not: each module has its own."""
    names = dict.fromkeys(_global_names(code))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(used(constant)))
    return tuple(name for name in names if not (name.startswith("__") and hasattr(builtins, name)))


def _global_names(code: types.CodeType) -> Iterator[str]:
    import dis  # not a part of what `import skyinfra.client` needs

    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and isinstance(each.argval, str):
            yield each.argval


# What makes plain data, besides literals.
_KINDS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (dict, float, frozenset, list, set, tuple)}
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.BitOr: operator.or_,
}
_MOST_EXPONENT = 64


def _plain(node: ast.expr | None) -> Any:
    """Returns the value of literals, of arithmetic with them, and of calls such as ``dict(lr=0.1)``.

    Raises ValueError for any other expression, and what computing the value raises.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=parts) | ast.Set(elts=parts) | ast.Tuple(elts=parts):
            return _KINDS[type(node).__name__.lower()](map(_plain, parts))
        case ast.Dict(keys=keys, values=values):
            return dict(zip(map(_plain, keys), map(_plain, values), strict=True))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if name in _KINDS and all(
            word.arg for word in words
        ):
            return _KINDS[name](*map(_plain, args), **{str(word.arg): _plain(word.value) for word in words})
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_plain(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            first, second = _plain(left), _plain(right)
            if _is_small(first, operation, second):
                return _OPERATIONS[type(operation)](first, second)
    raise ValueError("is no plain data")


def _is_small(first: Any, operation: ast.operator, second: Any) -> bool:
    """Returns whether the result is about as large as its operands: another one costs time and memory once more."""
    numbers = isinstance(first, int | float | complex) and isinstance(second, int | float | complex)
    match operation:
        case ast.Pow() | ast.LShift():
            return numbers and bool(second <= _MOST_EXPONENT)
        case ast.Mod():
            return numbers
        case ast.Mult():
            return numbers or (isinstance(second, int) and len(first) * second <= _SMALL)
    return True


class _LargeError(Exception):
    """A value is large."""


class _Limited:
    """A file to pickle into, which takes no more than `_SMALL` bytes."""

    def __init__(self) -> None:
        self._left = _SMALL

    def write(self, data: bytes | memoryview | pickle.PickleBuffer) -> int:
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise _LargeError
        return size


def _can_travel(value: object, *, large: bool) -> bool:
    """Returns whether *value* can be pickled, as far as is seen before it is *large*, which it may be."""
    try:
        cloudpickle.Pickler(_Limited()).dump(value)
    except _LargeError:
        return large
    except Exception:  # noqa: BLE001 - __reduce__ may raise anything
        return False
    return True


def _is_block(statement: ast.If) -> bool:
    """Returns whether *statement* is ``if __name__ == "__main__":``, perhaps with another condition."""
    test = statement.test
    tests = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    for each in tests:
        if isinstance(each, ast.Compare) and len(each.ops) == 1 and isinstance(each.ops[0], ast.Eq):
            sides = {ast.unparse(each.left), ast.unparse(each.comparators[0])}
            if sides == {"__name__", "'__main__'"}:
                return True
    return False


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _walk(node: ast.AST, stop: tuple[type[ast.AST], ...] = _FUNCTIONS) -> Iterator[ast.AST]:
    """The nodes that run where *node* does: those of *stop* are among them, and what is in these is not."""
    yield node
    if not isinstance(node, stop):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, stop)


def _changed(statement: ast.stmt) -> Iterator[str]:
    """The names whose values *statement* changes in place, by an attribute or an item."""
    for node in _walk(statement, (*_FUNCTIONS, ast.ClassDef)):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            base: ast.expr = node
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                yield base.id


def _starred(statement: ast.stmt, package: str) -> Iterator[str]:
    """The names that ``from MODULE import *`` has set here."""
    for node in _walk(statement):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            try:
                name = importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
            except ImportError:  # it has failed here too, in a `try`
                continue
            module = sys.modules.get(name)
            space = vars(module) if module is not None else {}
            yield from space.get("__all__", [each for each in space if not each.startswith("_")])


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that *statement* sets in the scope that it stands in."""
    for node in _walk(statement, (*_FUNCTIONS, ast.ClassDef)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (each.asname or each.name.partition(".")[0] for each in names)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
