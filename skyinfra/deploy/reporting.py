"""Progress of Terraform: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from skyinfra import folding
from skyinfra.console import console as clean_console
from skyinfra.console import is_one_terminal
from skyinfra.errors.printable import printable
from skyinfra.terraform.text import Event

if TYPE_CHECKING:
    from rich.console import Console

_DONE = {"create": "created", "update": "updated", "delete": "destroyed", "replace": "replaced", "read": "read"}

# Output of a local node while it waits for tasks.
_WAITING = "skyinfra: waiting: "


class Reporter:
    """Shows the events of one plan or apply on stderr. Use it as a ``with`` block; call it with each `Event`.

    title: what is done to what, such as ``deploy quickstart``. total: number of changes, where known. in_place:
    addresses of resources that change in place, also where Terraform makes them anew. on_event: gets each event, too,
    as it is shown, with the seconds since its start. line: shows them; what
    failed and what Terraform says besides has lines of its own.
    """

    def __init__(
        self,
        title: str,
        *,
        total: int | None = None,
        in_place: Collection[str] = (),
        console: Console | None = None,
        on_event: Callable[[Event], object] | None = None,
        line: Line | None = None,
    ) -> None:
        self.console = console or (line.console if line is not None else clean_console(to_stderr=True))
        self.line = line
        self.title = title
        self.total = total
        self.in_place = in_place
        self.on_event = on_event
        self._started: dict[str, float] = {}
        self._bar: Progress | None = None

    def __enter__(self) -> Reporter:
        if self.console.is_terminal and self.line is None:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
                redirect_stdout=is_one_terminal(),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Shows *event*."""
        if event.address in self.in_place:
            if event.action == "delete":
                return
            event = dataclasses.replace(event, action="update")
        if self.on_event is not None:
            began = self._started.get(event.address, time.monotonic())
            self.on_event(dataclasses.replace(event, seconds=time.monotonic() - began))
        if self.line is not None:
            self.line.take(event)
        if event.kind == "start":
            self._started[event.address] = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, description=f"{self.title}: {short(event.address)}")
        elif event.kind == "done":
            seconds = time.monotonic() - self._started.pop(event.address, time.monotonic())
            if self.line is None:
                self._line(f"{short(event.address)} {_DONE.get(event.action, event.action)} ({seconds:.1f} s)")
            if self._bar is not None:
                self._bar.advance(self._task)
        elif event.kind == "failed":
            self._line(f"{short(event.address)} failed")
        elif event.kind == "output" and event.text.startswith(_WAITING) and self.line is None:
            self._line(event.text.removeprefix("skyinfra: ").strip())
        elif event.kind == "text" and event.text.strip():
            self._line(event.text)

    def _line(self, text: str) -> None:
        console = self._bar.console if self._bar is not None else self.console
        folding.say(console, Text(f"{self.title}: {text}"))


class Line:
    """One line on stderr that changes while a ``with`` block of a pool begins or ends; plain lines elsewhere.

    name: of its stack. A line stays of where it began, and of how it ended.
    """

    def __init__(self, name: str, console: Console | None = None) -> None:
        self._name = name
        self.console = console or clean_console(to_stderr=True)
        self._began = time.monotonic()
        self._about = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Line:
        if self.console.is_terminal:
            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            self._bar = Progress(*columns, console=self.console, transient=True, redirect_stdout=is_one_terminal())
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, text: str) -> None:
        """Says what is done; where nobody watches, with a line."""
        self._about = text
        self.say("")
        if self._bar is None:
            self._print(f"{text} ...")

    def say(self, text: str) -> None:
        """Changes the line."""
        if self._bar is not None:
            about = ": ".join(filter(None, (self._about, text)))
            self._bar.update(self._task, description=f"{self._name}: {about}")

    def take(self, event: Event) -> None:
        """Shows the step of Terraform that begins, or what a node waits for."""
        if event.kind == "start":
            self.say(short(event.address))
        elif event.kind == "output" and event.text.startswith(_WAITING):
            self.say(event.text.removeprefix("skyinfra: ").strip())

    def end(self, text: str) -> None:
        """Says how it ended, in a line that stays."""
        self._print(f"{text} ({time.monotonic() - self._began:.1f} s)")

    def _print(self, text: str) -> None:
        folding.say(self.console, Text(f"{self._name}: {text}"))


def say(text: str) -> None:
    """Says a sentence on stderr, that of a notebook too.

    Not by its console: a line that moves has taken the stream, and writes what others do above it.
    """
    console = clean_console(to_stderr=True, force_jupyter=False)
    shown, width = Text(printable(text, None)), sys.maxsize
    if console.is_terminal:
        shown.expand_tabs(8)
        width = console.width
    sys.stderr.write("".join(line.plain + "\n" for line in folding.sentences(shown, width)))
    sys.stderr.flush()


def short(address: str) -> str:
    """A resource's address as a person names it: ``module.mig.terraform_data.node["mig-0"]`` is ``mig node mig-0``.

    Which module of its pool a resource stands in is left out.
    """
    parts = re.sub(r"\.module\.\w+", "", address.removeprefix("module.")).replace("terraform_data.", "")
    return parts.replace("__", " ").replace('["', " ").replace('"]', "").replace(".", " ")
