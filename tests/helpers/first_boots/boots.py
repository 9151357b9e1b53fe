"""First boots in a temporary folder: real steps of the real program, with places of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import skyinfra

SECRET = "0123456789abcdef" * 4
PACKAGE = Path(skyinfra.__file__).parent


def _oldest() -> str | None:
    """The oldest Python that the program has to run under, where this machine has one."""
    beside = sorted(Path(sys.base_prefix).parent.glob("3.8*/bin/python3.8"))
    for python in (shutil.which("python3.8"), *map(str, beside)):
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


OLDEST = _oldest()


class FirstBoot:
    """The folder *path* as far as a first boot goes."""

    def __init__(self, path: Path, *, head: bool = True, scheduler: str = "127.0.0.1:2", python: str = "") -> None:
        self.path = path
        self.python = python or sys.executable
        self.node = path / "var" / "node.json"
        self.node.parent.mkdir(parents=True)
        config = {"stack": "s", "pool": "p", "node": "p-0", "head": head, "scheduler": scheduler}
        self.node.write_text(json.dumps(config, separators=(",", ":")))
        self.secret = path / "secret"
        self.secret.write_text(SECRET)
        self.log = path / "log" / "boot.jsonl"
        self.status = path / "var" / "status.json"
        self.failure = path / "run" / "failure.json"
        self.file = path / "steps.json"

    def write(self, *steps: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        places = {name: str(getattr(self, name)) for name in ("node", "secret", "log", "status", "failure")}
        document = {**places, "version": 1, "report_unit": None, "environment": environment or {}, "steps": steps}
        self.file.write_text(json.dumps(document))

    def command(self, verb: str, *more: str) -> list[str]:
        return [self.python, "-m", "first_boot", verb, str(self.file), *more]

    def run(self, *, path: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **variables, **({"PATH": path} if path is not None else {})}
        return subprocess.run(
            self.command("run"), cwd=PACKAGE, capture_output=True, text=True, timeout=60, env=environment, check=False
        )

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def states(self) -> list[tuple[str, str]]:
        return [(line["step"], line["state"]) for line in self.lines()]


def step(
    operation: str, *, name: str = "", timeout_s: float = 20, attempts: int = 1, **arguments: Any
) -> dict[str, Any]:
    """One step as the node reads it."""
    return {
        "name": name or operation,
        "timeout_s": timeout_s,
        "attempts": attempts,
        "operation": operation,
        "arguments": arguments,
    }


def program(folder: Path, name: str, script: str) -> None:
    """A program of that name, in place of the machine's."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
