"""Prepares a node before its first slot starts: installs the image's packages and runs its commands.

``prepared.json`` holds a digest of what is done, so that the next boot does not repeat it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import ssl
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from skyinfra.errors import NodeFailed
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.protocol.packages import PackageSource

logger = logging.getLogger("skyinfra.runner")

_TAIL_LINES = 15
_LINE_LIMIT = 2**20
# The lines of pip's and uv's own errors.
_PIP_SAYS = ("ERROR: ", "error: ", "  \N{MULTIPLICATION SIGN} ", "  \N{BOX DRAWINGS LIGHT ARC UP AND RIGHT}")


async def prepare(config: NodeConfig, directory: NodeDirectory) -> None:
    """Installs ``config.pip`` and runs ``config.run``, each unless it is done already. Raises `NodeFailed`."""
    file = directory.prepared_file
    done = _done(file)
    variables = _variables(config.packages, directory) if config.packages is not None else {}
    steps: dict[str, tuple[Sequence[str], list[list[str]]]] = {}
    if config.pip:
        commands = _pip_commands(config, directory, only=["--no-index"] if "PIP_NO_INDEX" in variables else [])
        steps["pip"] = [sys.version.split()[0], *config.pip], commands
    if config.run:
        steps["run"] = config.run, [["/bin/sh", "-c", command] for command in config.run]
    for key, (asked, commands) in steps.items():
        digest = hashlib.sha256(json.dumps(list(asked)).encode()).hexdigest()
        if done.get(key) != digest:
            for command in commands:
                await _execute(command, directory, variables)
            # What the digest stands for is on the disk before it: after a power cut nobody looks at that again.
            await asyncio.to_thread(os.sync)
            done[key] = digest
            directory.write(file, json.dumps(done) + "\n", durable=True)


def _done(file: Path) -> dict[str, str]:
    """Returns the digests of what is done; none where a power cut has left no document."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _variables(source: PackageSource, directory: NodeDirectory) -> dict[str, str]:
    """Returns the variables that set the package source for pip, uv and the image's commands."""
    bundle = directory.path / "ca.pem"
    if source.ca_certificate is not None:
        known = ssl.get_default_verify_paths().cafile
        system = Path(known).read_text(encoding="utf-8") if known is not None else ""
        directory.write(bundle, f"{system.rstrip()}\n{source.ca_certificate}")
    return source.environment(bundle=str(bundle))


def _pip_commands(config: NodeConfig, directory: NodeDirectory, *, only: list[str]) -> list[list[str]]:
    target = [*only, "--target", str(directory.packages), "--upgrade", *config.pip]
    if importlib.util.find_spec("pip") is not None:
        return [[sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *target]]
    uv = shutil.which("uv")
    if uv is not None:
        return [[uv, "pip", "install", "--python", sys.executable, *target]]
    raise NodeFailed(
        "the image asks for packages, but this Python has neither pip nor uv",
        field="pip",
        given=list(config.pip),
        hint=f"Install one of them: `{sys.executable} -m ensurepip`.",
    )


async def _execute(command: Sequence[str], directory: NodeDirectory, variables: dict[str, str]) -> None:
    """Runs *command* in the node's directory. Logs its output; the last lines also go into the error."""
    shown = command[-1] if command[0] == "/bin/sh" else " ".join(command)
    logger.info("running: %s", shown)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory.path,
        # `user = true` in pip's configuration goes with neither an environment nor --target.
        env={**os.environ, "PIP_USER": "0", **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_LINE_LIMIT,
    )
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        if process.stdout is not None:
            async for line in process.stdout:
                text = line.decode(errors="replace").rstrip()
                tail.append(text)
                logger.info("%s", text)
        code = await process.wait()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if code != 0:
        errors = [number for number, line in enumerate(tail) if line.startswith(_PIP_SAYS)]
        if command[0] != "/bin/sh" and errors:
            # The errors of pip, or that of uv with its reasons below it, say it all; the rest is in the log.
            said = [
                line for number, line in enumerate(tail) if number in errors or (line[:1] == " " and number > errors[0])
            ]
            raise NodeFailed("pip could not install what the image asks for", field="Image.pip", hint="\n".join(said))
        raise NodeFailed(f"a command of the image ended with exit code {code}: {shown}", hint="\n".join(tail) or None)
