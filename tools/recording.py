"""Record the quickstart in a terminal: ``python -m tools.recording`` runs it, and writes the recording and its picture.

docs/pictures/quickstart.cast is a recording as asciinema has them (version 2); quickstart.svg is the end of its screen,
made of the recording alone: with ``--picture`` nothing is run.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import struct
import sys
import tempfile
import termios
import time
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
_SILENT_S = 0.2


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


def _run(command: str, project: Path) -> list[str]:
    """Returns what the *command* writes to a terminal, in pieces. Raises ChildProcessError where it fails."""
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
    while True:
        select.select([terminal], [], [], _SILENT_S)
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        pieces.append(data.decode("utf-8", "replace"))
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise ChildProcessError(f"{command}: exit code {code}\n{''.join(pieces)}")
    return pieces


def screen(cast: str) -> list[str]:
    """Returns the lines that are left on the screen, with their colours."""
    text = "".join(event[2] for event in map(json.loads, cast.splitlines()[1:]))
    # What a progress bar writes is taken back: the cursor goes up, and the line is erased.
    lines = [""]
    for piece in re.split(r"(\r\n|\n|\r|\x1b\[\d*A|\x1b\[\d*K|\x1b\[\?25[lh])", text):
        if piece in ("\r\n", "\n"):
            lines.append("")
        elif re.fullmatch(r"\x1b\[\d*A", piece):
            lines = lines[: -int(piece[2:-1] or 1)] or [""]
        elif piece == "\r" or re.fullmatch(r"\x1b\[\d*K", piece):
            lines[-1] = "" if piece != "\r" else lines[-1]
        elif not piece.startswith("\x1b[?25"):
            lines[-1] += piece
    return lines


def svg(cast: str) -> str:
    """Returns the picture of the recording. The same recording gives the same bytes."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for line in screen(cast):
        console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)
    return _FONT.sub("", console.export_svg(title="skyinfra", unique_id="quickstart"))


def main() -> None:
    """Writes both files; --picture makes the picture of the recording that there is."""
    if "--picture" not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            CAST.write_text(record(Path(folder)), encoding="utf-8")
    CAST.with_suffix(".svg").write_text(svg(CAST.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
