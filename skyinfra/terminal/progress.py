"""Progress of a command that prints nothing else yet: a moving line on a terminal, plain lines elsewhere; on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from skyinfra.terminal import tables
from skyinfra.terraform.project import Project, SynthesizedStack

# Shorter work is not mentioned.
_SHORT_S = 1.0
_MENTIONED_S = 5.0


@contextmanager
def working(text: str) -> Iterator[None]:
    """Says *text* while the block runs, and for how long it ran; nothing where that is less than a second.

    On a terminal, which shows the time all along, a line stays only of what took longer.
    """
    out = tables.console(to_stderr=True)
    began = time.monotonic()
    mentioned = _MENTIONED_S if out.is_terminal else _SHORT_S
    if out.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=out, transient=True) as bar:
            bar.add_task(text, total=None)
            yield
    else:
        timer = threading.Timer(_SHORT_S, _line, [f"{text} ..."])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
    seconds = time.monotonic() - began
    if seconds >= mentioned:
        _line(f"{text}: {seconds:.1f} s")


def synthesized(project: Project) -> tuple[SynthesizedStack, ...]:
    """Synthesizes *project* and says so. Raises what `Project.synth` raises."""
    with working(f"synth: {project.app}"):
        return project.synth()


def _line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
