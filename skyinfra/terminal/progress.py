"""Progress of a command that prints nothing else yet: a moving line on a terminal, plain lines elsewhere; on stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from skyinfra.console import is_one_terminal
from skyinfra.terminal import tables
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client import Pool
    from skyinfra.client.questions import Questions
    from skyinfra.protocol.manifest import Manifest
    from skyinfra.protocol.secrets import Secret

# Shorter work is not mentioned.
_SHORT_S = 1.0
_MENTIONED_S = 5.0


@contextmanager
def working(text: str, *, unwatched_s: float = _SHORT_S) -> Iterator[None]:
    """Says *text* while the block runs, and for how long it ran; nothing where that is less than a second.

    On a terminal, which shows the time all along, a line stays only of what took longer. unwatched_s: seconds after
    which it is said where nobody watches, in a log or a pipe.
    """
    out = tables.console(to_stderr=True)
    began = time.monotonic()
    mentioned = _MENTIONED_S if out.is_terminal else unwatched_s
    if out.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=out, transient=True, redirect_stdout=is_one_terminal()) as bar:
            bar.add_task(text, total=None)
            yield
    else:
        timer = threading.Timer(unwatched_s, _line, [f"{text} ..."])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
    seconds = time.monotonic() - began
    if seconds >= mentioned:
        _line(f"{text}: {seconds:.1f} s")


def asked(fleet: str) -> Questions:
    """Returns *fleet* for who asks it alone, and says that its head is waited for. Raises what `ask` raises."""
    from skyinfra.client import ask

    with _connecting(fleet):
        return ask(fleet)


def connected(fleet: str, secrets: Sequence[Secret] = ()) -> Pool:
    """Returns a connection to *fleet*, and says that its head is waited for. Raises what `connect` raises."""
    from skyinfra.client import connect

    with _connecting(fleet):
        return connect(fleet, secrets=secrets)


def synthesized(project: Project, *, fresh: bool = True) -> tuple[SynthesizedStack, ...]:
    """Synthesizes *project* and says so; not *fresh*: where it may write something else than stands there, alone.

    Raises what `Project.synth` raises.
    """
    if not fresh and (since := project.unchanged_since()) is not None:
        _line(f"synth: nothing has changed since {time.strftime('%H:%M:%S', time.localtime(since))} (--fresh: anew)")
        return project.stacks()
    with working(f"synth: {project.app}"):
        return project.synth()


def every_stack(project: Project) -> tuple[SynthesizedStack, ...]:
    """Returns the stacks of *project*, synthesized anew, and those of ``with`` blocks. Raises as `Project.synth`."""
    declared = synthesized(project) if project.app else ()
    return (*declared, *(block.stack for block in project.blocks()))


def deployed(fleet: str) -> tuple[SynthesizedStack, Manifest]:
    """Returns the stack of the fleet ``STACK/POOL`` as it is declared now, and the manifest. Raises `FleetError`."""
    name, _, pool = fleet.partition("/")
    project = Project.find()
    stack = project.stack(name, stacks=every_stack(project))
    return stack, stack.fleet(pool or stack.only_pool)


def _connecting(fleet: str) -> AbstractContextManager[None]:
    # Scripts read stderr of what they run; a second more or less is of no concern to them.
    return working(f"{fleet}: connecting to its head", unwatched_s=_MENTIONED_S)


def _line(text: str) -> None:
    tables.say(text, to_stderr=True)
