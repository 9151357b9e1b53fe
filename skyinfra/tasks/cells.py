"""Runs the cell of a notebook, as a task."""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import linecache
import pickle
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyinfra import syntax
from skyinfra.blobs import payload, unpicklable
from skyinfra.protocol.pickles import Pickler

# Of a text that is shown.
_LONGEST = 20_000


@dataclass(frozen=True)
class Ran:
    """The result of a cell.

    stream, buffers: the pickled values of its names, together. plain: those of builtin types once more, each alone,
    for a client that lacks a module of the others. missing: why other names are not among them. shown: the value of
    its last expression, by MIME type; empty where there is none.
    """

    stream: bytes
    buffers: list[pickle.PickleBuffer]
    plain: dict[str, bytes]
    missing: dict[str, str]
    shown: dict[str, str]

    def values(self) -> tuple[dict[str, object], dict[str, str]]:
        """Returns the values that can be read here, and why the others cannot."""
        try:
            # Over mutual TLS, from the fleet itself.
            return dict(pickle.loads(self.stream, buffers=self.buffers)), {}  # noqa: S301
        except Exception as error:  # noqa: BLE001 - what is unpickled may raise anything
            read = {name: pickle.loads(data) for name, data in self.plain.items()}  # noqa: S301
            others = f"cannot be read here: {type(error).__name__}: {error}"
            return read, {"the rest of what the cell assigned": others}


def cell(source: str, file: str, names: dict[str, object], wanted: Sequence[str] | None) -> Ran:
    """Runs *source*, the text of a cell, with *names* as its globals. Raises what it raises.

    file: the name of the text in tracebacks. wanted: the names whose values are returned; None is all that the cell has
    assigned, but for modules and names that begin with an underscore.
    """
    # For tracebacks here, and for compilers of kernels, which read the source of a function.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = {"__name__": "__main__", "__builtins__": builtins, **names}
    tree = syntax.parsed(source, file)
    last = tree.body[-1] if tree.body and not source.rstrip().endswith(";") else None
    value = None
    if isinstance(last, ast.Expr):
        exec(_compiled(ast.Module(tree.body[:-1], []), file, "exec"), space)  # noqa: S102 - the cell of the user
        value = eval(_compiled(ast.Expression(last.value), file, "eval"), space)  # noqa: S307 - as above
    else:
        exec(_compiled(tree, file, "exec"), space)  # noqa: S102 - as above
    selected = _assigned(space, names) if wanted is None else [name for name in wanted if name in space]
    values = {name: space[name] for name in selected}
    missing = {name: "the cell has no such name" for name in wanted or () if name not in values}
    stream, buffers, failed = _pickled(values)
    return Ran(stream, buffers, _plain(values), missing | failed, _shown(value))


def _compiled(tree: ast.Module | ast.Expression, file: str, mode: str) -> types.CodeType:
    code: types.CodeType = compile(tree, file, mode, dont_inherit=True)
    return code


def _assigned(space: Mapping[str, object], before: Mapping[str, object]) -> list[str]:
    return [
        name
        for name, value in space.items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and (name not in before or value is not before[name])
    ]


def _pickled(values: dict[str, object]) -> tuple[bytes, list[pickle.PickleBuffer], dict[str, str]]:
    """Returns the values that can be pickled, and why the others cannot."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        file = io.BytesIO()
        Pickler(file, protocol=5, buffer_callback=buffers.append).dump(values)
        return file.getvalue(), buffers, {}
    except Exception:
        failed: dict[str, str] = {}
        for name, value in values.items():
            try:
                payload.pack(value)
            except Exception as error:  # noqa: BLE001 - as above
                failed[name] = f"cannot be pickled: {unpicklable.described(value, payload.pack, error)}"
        if not failed:
            raise
        stream, buffers, _ = _pickled({name: value for name, value in values.items() if name not in failed})
        return stream, buffers, failed


def _plain(values: dict[str, object]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, value in values.items():
        if type(value) in (bool, int, float, complex, str):
            found[name] = pickle.dumps(value)
    return found


def _shown(value: object) -> dict[str, str]:
    """Returns the picture of *value* for a notebook, made here: its class may not be there."""
    if value is None:
        return {}
    made = {"text/plain": repr, "text/html": getattr(type(value), "_repr_html_", None)}
    shown = {}
    for kind, make in made.items():
        # What the values were computed for is not lost by a picture of one.
        with contextlib.suppress(Exception):
            text = make(value) if make is not None else None
            if isinstance(text, str):
                shown[kind] = text if len(text) <= _LONGEST or kind != "text/plain" else f"{text[:_LONGEST]}…"
    return shown
