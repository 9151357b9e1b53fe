"""Progress of Terraform: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from skyinfra.terraform.text import Event

_DONE = {"create": "created", "update": "updated", "delete": "destroyed", "replace": "replaced", "read": "read"}

# Output of a local node while it waits for tasks.
_WAITING = "skyinfra: waiting: "


class Reporter:
    """Shows the events of one plan or apply on stderr. Use it as a ``with`` block; call it with each `Event`.

    title: what is done to what, such as ``deploy quickstart``. total: number of changes, where known. in_place:
    addresses of resources that change in place, also where Terraform makes them anew. on_event: gets each event, too,
    as it is shown, with the seconds since its start.
    """

    def __init__(
        self,
        title: str,
        *,
        total: int | None = None,
        in_place: Collection[str] = (),
        console: Console | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.title = title
        self.total = total
        self.in_place = in_place
        self.on_event = on_event
        self._started: dict[str, float] = {}
        self._bar: Progress | None = None

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
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
        if event.kind == "start":
            self._started[event.address] = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, description=f"{self.title}: {short(event.address)}")
        elif event.kind == "done":
            seconds = time.monotonic() - self._started.pop(event.address, time.monotonic())
            self._line(f"{short(event.address)} {_DONE.get(event.action, event.action)} ({seconds:.1f} s)")
            if self._bar is not None:
                self._bar.advance(self._task)
        elif event.kind == "failed":
            self._line(f"{short(event.address)} failed")
        elif event.kind == "output" and event.text.startswith(_WAITING):
            self._line(event.text.removeprefix("skyinfra: ").strip())
        elif event.kind == "text" and event.text.strip():
            self._line(event.text)

    def _line(self, text: str) -> None:
        console = self._bar.console if self._bar is not None else self.console
        console.print(f"{self.title}: {text}", highlight=False, markup=False, soft_wrap=True)


def short(address: str) -> str:
    """A resource's address as a person names it: ``module.mig.terraform_data.node["mig-0"]`` is ``mig node mig-0``."""
    parts = address.removeprefix("module.").replace("terraform_data.", "")
    return parts.replace('["', " ").replace('"]', "").replace(".", " ")
