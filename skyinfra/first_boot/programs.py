"""Programs and files, as the operations use them."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


class Failed(Exception):
    """A step cannot be done; the message is for a person."""


def command(*arguments: str, env: dict[str, str] | None = None) -> None:
    """Runs a program; what it prints is what the step prints. Raises `Failed`."""
    print("+ " + " ".join(arguments), flush=True)
    try:
        code = subprocess.call(arguments, env=env)
    except OSError as error:
        raise Failed(f"{arguments[0]} cannot be run: {error.strerror}") from None
    if code:
        raise Failed(f"{' '.join(arguments)[:200]} ended with exit code {code}")


def output(*arguments: str) -> str:
    """Returns the output of a program; empty where there is no such program."""
    try:
        done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return ""
    return done.stdout.decode(errors="replace").strip()


def apt_get(*arguments: str) -> None:
    """Raises `Failed`."""
    options = ["-q", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
    command("apt-get", *options, *arguments, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def on_volumes(column: str, volumes: list[str]) -> list[str]:
    """Returns the values of lsblk for *volumes* and everything on them, empty ones left out."""
    lines = output("lsblk", "-nrpo", column, *volumes).splitlines()
    return [line.strip() for line in lines if line.strip()]


def signatures(device: str) -> list[str]:
    """Returns what stands on *device*, each as label and kind: nothing on a new one. Raises `Failed`.

    Read from the device itself, for udev may not have looked at it yet.
    """
    done = subprocess.run(["wipefs", "-n", "-p", device], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise Failed(f"what {device} holds cannot be read")
    rows = done.stdout.decode(errors="replace").splitlines()
    return [" ".join(row.split(",")[2:]).strip() for row in rows if row[0] != "#"]


def nvidia_driver() -> str:
    """The version of NVIDIA's driver. NVML loads its kernel module where nothing has. Raises OSError."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    text = ctypes.create_string_buffer(96)
    code = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    if code:
        raise OSError(f"NVML answers with code {code}")
    return text.value.decode()


def numbers(version: str) -> list[int]:
    """The version, to be compared."""
    return [int(part) for part in re.findall(r"\d+", version)]


def read(path: str) -> str:
    """The text of a file."""
    return Path(path).read_text(encoding="utf-8")


def read_json(path: str) -> Any:
    """Returns the content of a JSON file."""
    return json.loads(read(path))


def replace(path: str, text: str) -> None:
    """Replaces *path* at once, and on the disk. Its folder may be another user's, so no name in it is followed."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=str(file.parent))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), 0o644)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except OSError:
        Path(name).unlink()
        raise
