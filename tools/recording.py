"""Record the quickstart in a terminal: ``python -m tools.recording`` runs it, and writes the recording and its picture.

docs/pictures/quickstart.cast is a recording as asciinema has them (version 2); quickstart.svg is the end of its screen,
made of the recording alone, which plays it: with ``--picture`` nothing is run.
"""

from __future__ import annotations

import bisect
import codecs
import fcntl
import io
import itertools
import json
import os
import pty
import re
import shutil
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tools.pictures import FOLDER, ROOT

COLUMNS, ROWS = 100, 40
COMMANDS = (
    "skyinfra deploy --auto-approve",
    "python tasks.py",
    "skyinfra status",
    "skyinfra destroy --auto-approve",
)
CAST = FOLDER / "quickstart.cast"
# Rich's picture asks another host for its font.
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
# The picture plays in this time at most, with pauses of at most one second; the height of a line is Rich's.
_PLAYS_S, _PAUSE_S, _LINE = 12.0, 1.0, 24.4


def record(folder: Path) -> str:
    """Runs the commands in a copy of the quickstart below *folder*; returns the recording, a JSON document a line."""
    project = folder / "quickstart"
    shutil.copytree(
        ROOT / "stacks" / "quickstart", project, ignore=shutil.ignore_patterns("cdktf.out", ".sky*", "*.tfs*")
    )
    began = time.monotonic()
    lines = [json.dumps({"version": 2, "width": COLUMNS, "height": ROWS, "title": "skyinfra quickstart"})]

    def said(text: str) -> None:
        lines.append(json.dumps([round(time.monotonic() - began, 3), "o", text]))

    for command in COMMANDS:
        said(f"$ {command}\r\n")
        for text in _run(command, project):
            said(text)
    return "\n".join(lines) + "\n"


def _run(command: str, project: Path) -> Iterator[str]:
    """Yields what the *command* writes to a terminal, when it does. Raises ChildProcessError where it fails."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(project)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        terminal_of = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
        os.execvpe(  # noqa: S606 - the commands are those above
            "sh", ["sh", "-c", command], {**os.environ, "PATH": path, **terminal_of}
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    pieces: list[str] = []
    # A character may come in two pieces.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        pieces.append(decoder.decode(data))
        yield pieces[-1]
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise ChildProcessError(f"{command}: exit code {code}\n{''.join(pieces)}")


def screen(cast: str) -> list[str]:
    """Returns the lines that are left on the screen, with their colours."""
    return [line for line, _ in _lines(cast)]


def _lines(cast: str) -> list[tuple[str, float]]:
    """Returns the lines that are left on the screen, and the seconds after which the recording has each whole."""
    events = [json.loads(line) for line in cast.splitlines()[1:]]
    ends = list(itertools.accumulate(len(event[2]) for event in events))
    # What a progress bar writes is taken back: the cursor goes up, and the line is erased.
    lines, at = [("", 0.0)], 0
    text = "".join(event[2] for event in events)
    for piece in re.split(r"(\r\n|\n|\r|\x1b\[\d*A|\x1b\[\d*K|\x1b\[\?25[lh])", text):
        at += len(piece)
        when = events[bisect.bisect_left(ends, at)][0]
        if piece in ("\r\n", "\n"):
            lines.append(("", when))
        elif re.fullmatch(r"\x1b\[\d*A", piece):
            lines = lines[: -int(piece[2:-1] or 1)] or [("", when)]
        elif re.fullmatch(r"\x1b\[\d*K", piece):
            lines[-1] = ("", when)
        elif piece and piece != "\r" and not piece.startswith("\x1b[?25"):
            lines[-1] = (lines[-1][0] + piece, when)
    return lines


def delays(cast: str) -> list[float]:
    """Returns the seconds after which the picture shows each line: as recorded, without the long pauses."""
    times = [when for _, when in _lines(cast)]
    pauses = [min(later - when, _PAUSE_S) for when, later in itertools.pairwise([0.0, *times])]
    faster = min(1.0, _PLAYS_S / (sum(pauses) or 1.0))
    return [round(at * faster, 2) for at in itertools.accumulate(pauses)]


def svg(cast: str) -> str:
    """Returns the picture of the recording, which plays once. The same recording gives the same bytes."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for line in screen(cast):
        console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)
    picture = _FONT.sub("", console.export_svg(title="skyinfra", unique_id="quickstart"))
    return picture.replace("</style>", f"{_plays(delays(cast))}    </style>", 1)


def _plays(shown: list[float]) -> str:
    """Returns the style that shows each line after its seconds. Where nothing is animated, all of them are there."""
    style = [
        "@media screen and (prefers-reduced-motion: no-preference) {",
        "@keyframes line { from { opacity: 0 } }",
        '[clip-path^="url(#quickstart-line"], [shape-rendering] { animation: line 1ms backwards }',
    ]
    for number, delay in enumerate(shown):
        # The text, and the colour behind it.
        place = f'[clip-path="url(#quickstart-line-{number})"], [shape-rendering][y="{number * _LINE + 1.5:g}"]'
        style.append(f"{place} {{ animation-delay: {delay}s }}")
    # A narrow page shows the end of the screen alone: the lines come from below.
    style.append("@keyframes screen {")
    for delay, number in dict(zip(shown, range(len(shown)), strict=True)).items():
        below = 41 + (len(shown) - 1 - number) * _LINE
        style.append(f"{100 * delay / (shown[-1] or 1):.4g}% {{ transform: translate(9px, {below:g}px) }}")
    style += ["}", "@media (max-width: 500px) {"]
    style += [f'[clip-path="url(#quickstart-clip-terminal)"] {{ animation: screen {shown[-1]}s step-end }}', "}", "}"]
    return "".join(f"{line}\n" for line in style)


def main() -> None:
    """Writes both files; --picture makes the picture of the recording that there is."""
    if "--picture" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            CAST.write_text(record(Path(folder)), encoding="utf-8")
    CAST.with_suffix(".svg").write_text(svg(CAST.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
