"""A program on a terminal: a pseudo terminal of a given size, whose output is returned."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

from support import python_path

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    *arguments: str,
    columns: int = 80,
    folder: Path | None = None,
    keys: str = "",
    program: Sequence[str] = ("-m", "skyinfra.cli"),
    **environment: str,
) -> tuple[int, str]:
    """Runs ``skyinfra ARGUMENTS`` on a terminal of so many *columns*, types *keys*; returns exit code and output.

    program: another one, as Python takes it.
    """
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    settings = {**kept, "TERM": "xterm-256color", "PYTHONPATH": python_path(), **environment}
    settings["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{settings.get('PATH', os.defpath)}"
    command = [sys.executable, *program, *arguments]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=settings, start_new_session=True
    )
    os.close(terminal)
    if keys:
        os.write(main, keys.encode())
    found = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # Linux says so that no program has the terminal any more
            break
        if not part:
            break
        found += part
    os.close(main)
    return process.wait(), found.decode(errors="replace").replace("\r\n", "\n")


class Leaving:
    """A program on a terminal that closes before it ends, as a window does, or a link of ssh that breaks."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._main, terminal = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)

    def read(self) -> None:
        """Takes what was printed so far, without which the program would wait."""
        while select.select([self._main], [], [], 0.05)[0]:
            os.read(self._main, 65536)

    def close(self) -> int:
        """Closes the terminal. Returns the exit code."""
        os.close(self._main)
        return self.process.wait(180)


def plain(text: str) -> str:
    """*text* without the codes for colours and the cursor."""
    return _CODES.sub("", text)
