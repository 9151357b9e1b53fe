"""The magic ``%%remote`` of notebooks, which runs a cell on a slot. ``%load_ext skyinfra`` brings it."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
import traceback
import types
from collections.abc import Iterable
from typing import Any, NoReturn

from skyinfra.blobs import payload, unpicklable
from skyinfra.client import Pool, connect
from skyinfra.errors import (
    FleetError,
    InvalidField,
    NotSupported,
    SkyinfraError,
    TaskNotPicklable,
    did_you_mean,
)
from skyinfra.errors.printable import coloured, printable
from skyinfra.notebook.names import used
from skyinfra.tasks import cells, pickling
from skyinfra.tasks.task import Task

_NAME = "remote"


def load_ipython_extension(shell: Any) -> None:
    """Adds the magics to *shell*, an IPython."""
    shell.register_magic_function(Remote(shell).remote, "cell", _NAME)


def unload_ipython_extension(shell: Any) -> None:
    """Removes the magics, and closes their connections."""
    found = shell.magics_manager.magics["cell"].pop(_NAME, None)
    if found is not None:
        found.__self__.close()


class Remote:
    """The magic of *shell*. Its connections stay open for the next cells."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._pools: dict[str, Pool] = {}

    def close(self) -> None:
        """Closes all connections."""
        while self._pools:
            self._pools.popitem()[1].close()

    def remote(self, line: str, cell: str) -> None:
        """Runs the cell on a slot: ``%%remote STACK/POOL``, a manifest file, or a variable that is a pool.

        --profile PROFILE   on a slot of that profile
        --node NODE         on a slot of that node
        --in NAME,...       sends these names, and not all that the cell uses
        --out NAME,...      brings these names back, and not all that the cell assigns

        The names that the cell uses are sent by value; those that it assigns are here afterwards, but for modules and
        names that begin with an underscore. Its output stands in this cell, and so does the value of its last
        expression. An interrupt cancels it.
        """
        # With a line for that of the magic: the lines of tracebacks count as those of the cell do.
        source = f"# %%remote\n{cell}"
        number = len(self._shell.history_manager.input_hist_parsed) - 1
        file = str(self._shell.compile.cache(source, number))
        try:
            self._run(line, source, file)
        except (Exception, KeyboardInterrupt) as error:
            _shorten(self._shell, error, file)
            raise

    def _run(self, line: str, source: str, file: str) -> None:
        options = _parser().parse_args(shlex.split(line))
        names = self._names(source, file, _split(options.sent))
        wanted = _split(options.out)
        pool = self._pool(options.fleet)
        try:
            selected = pool.select(profile=options.profile, node=options.node)
            ran = _ran(selected, Task(cells.cell, (source, file, names, wanted)), names)
        except FleetError:
            # The fleet may have been deployed anew: the next cell reads its manifest again.
            if self._pools.pop(options.fleet, None) is not None:
                pool.close()
            raise
        values, unread = ran.values()
        self._shell.push(values)
        if ran.shown:
            from IPython.display import display

            display(ran.shown, raw=True)
        missing = ran.missing | unread
        if missing and wanted is not None:
            raise InvalidField("; ".join(f"{name}: {why}" for name, why in missing.items()), field="--out")
        for name, why in missing.items():
            sys.stderr.write(f"{name} stayed on the slot: {printable(why)}\n")

    def _pool(self, name: str) -> Pool:
        given = self._shell.user_ns.get(name)
        if isinstance(given, Pool):
            return given
        if name not in self._pools:
            self._pools[name] = connect(name)
        return self._pools[name]

    def _names(self, source: str, file: str, selected: list[str] | None) -> dict[str, object]:
        """Returns the names for the cell, with their values. Raises `InvalidField`, also for what is no Python."""
        there, hidden = self._shell.user_ns, self._shell.user_ns_hidden
        try:
            found = used(source, file)
        except SyntaxError as error:
            foreign = next((each for each in source.splitlines() if re.match(r"\s*[!%]", each)), None)
            if foreign is None:
                what = f"line {error.lineno}: {error.msg}"
                raise InvalidField(what, field="%%remote", given=(error.text or "").strip()) from None
            raise InvalidField(
                "a line that begins with ! or % is for the notebook, and the cell runs on a slot",
                field="%%remote",
                given=foreign.strip(),
                hint='subprocess.run(["nvidia-smi"]) runs a program there.',
            ) from None
        for name in selected or ():
            if name not in there:
                hint = did_you_mean(name, (each for each in there if each not in hidden))
                raise InvalidField("there is no such name", field="--in", given=name, hint=hint)
        if selected is None:
            # What IPython has put there itself is not sent.
            selected = [n for n in found if n in there and n not in hidden and not n.startswith("__")]
        return {name: there[name] for name in selected}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidField(message, field="%%remote", hint=self.format_usage().strip())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="%%remote", add_help=False)
    parser.add_argument("fleet", metavar="STACK/POOL")
    parser.add_argument("--profile")
    parser.add_argument("--node")
    parser.add_argument("--in", dest="sent", action="append", metavar="NAME")
    parser.add_argument("--out", action="append", metavar="NAME")
    return parser


def _split(given: Iterable[str] | None) -> list[str] | None:
    return None if given is None else [name for text in given for name in re.split(r"[,\s]+", text) if name]


def _ran(pool: Pool, task: Task[cells.Ran], names: dict[str, object]) -> cells.Ran:
    """Runs *task* and waits for it. Raises what it raises, and `TaskNotPicklable` with the name it is about."""
    try:
        future = pool.submit(task)
    except TaskNotPicklable:
        _check_picklable(names)
        raise
    try:
        return future.result()
    except ModuleNotFoundError as error:
        if error.name == cells.__name__:
            hint = f"`skyinfra upgrade {pool.manifest.fleet}` brings it to this version."
            raise NotSupported("the fleet is too old to run cells", hint=hint) from None
        raise


def _check_picklable(names: dict[str, object]) -> None:
    for name, value in names.items():
        try:
            pickling.dump_call(Task(cells.cell, (value,)))
        except TaskNotPicklable as error:
            why = unpicklable.described(value, payload.pack, error.__cause__ or error)
            raise TaskNotPicklable(
                f"{name!r}, which the cell uses, cannot be pickled: {why}",
                hint="Make it inside the cell; --in says what is sent.",
            ) from None


def _shorten(shell: Any, error: BaseException, file: str) -> None:
    """Makes IPython show *error* with the frames of the cell alone, and without any where it is ours.

    Its text and notes come from a task, and are `printable`; IPython's colours stay.
    """
    frames = _frames_of(error, file)
    if frames is not None:
        shown = shell.InteractiveTB.structured_traceback(type(error), error, frames)
    elif isinstance(error, SkyinfraError | KeyboardInterrupt):
        shown = [text.rstrip("\n") for text in traceback.format_exception_only(error)]
    else:
        return
    shown = [coloured(text) for text in shown]
    with contextlib.suppress(AttributeError):  # a class with slots
        error._render_traceback_ = lambda: shown  # type: ignore[attr-defined]


def _frames_of(error: BaseException, file: str) -> types.TracebackType | None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != file:
        frames = frames.tb_next
    return frames
