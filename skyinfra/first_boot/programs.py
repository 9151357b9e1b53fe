"""Programs and files, as the operations use them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import re
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

# MB that the runner needs for its own files.
NEEDED = 64
# The lock that apt takes to fetch lists of packages, and for how long it is waited for, as for that of dpkg.
LISTS = "/var/lib/apt/lists/lock"
LOCK_S = 300.0
# By the code with which NVML refuses: what the driver does, or is. For the first boot, the runner and doctor.
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html (nvmlReturn_t)
NVML = {9: "not loaded", 18: "updated: reboot"}


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
    # Its own limit is for dpkg's lock alone.
    _until_free(LISTS, arguments[0] == "update")
    options = ["-q", "-o", f"DPkg::Lock::Timeout={LOCK_S:g}", "-o", "Acquire::Retries=3"]
    command("apt-get", *options, *arguments, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def _until_free(lock: str, wanted: bool) -> None:
    """Waits for the lock of the package lists. Raises `Failed`."""
    until, said = time.monotonic() + LOCK_S, ""
    while wanted and Path(lock).exists():
        with open(lock, "rb") as file:  # noqa: PTH123
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return
        name = output("ps", "-o", "args=", "-p", str(pid))[:100]
        if time.monotonic() > until:
            raise Failed(f"{lock} is held for more than {LOCK_S:g} s by process {pid}: {name}")
        if said != name:
            print(f"waiting for {lock}, which process {pid} holds: {name}", flush=True)
            said = name
        time.sleep(1)


def no_space(folder: str, said: str = "") -> str | None:
    """A sentence where the disk of *folder* is full for others than root, or where a program has *said* that one is."""
    while not os.path.isdir(folder):  # noqa: PTH112
        folder = os.path.dirname(folder)  # noqa: PTH120
    full = os.strerror(errno.ENOSPC) in said
    if full:
        # It does not say which.
        folder = min(folder, "/opt", "/tmp", key=_free)  # noqa: S108
    free = _free(folder)
    if free < 0:
        return f"no inodes left on {folder}: remove files"
    todo = "remove files, or give the node a larger disk (disk_gb)"
    return f"no space left on {folder}: {free} MB free, more needed: {todo}" if full or free < NEEDED else None


def _free(folder: str) -> int:
    """MB that others than root have; less than none where there are no inodes. Some file systems count none."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize // 10**6 if found.f_favail or not found.f_files else -1


def changed_units(venv: str, folder: str) -> dict[str, str]:
    """Path and text of each unit that the runner in *venv* brings and that is another one in *folder*.

    Raises `Failed` where it brings none.
    """
    found = glob.glob(f"{venv}/lib/python*/site-packages/skyinfra/node/units/*.*")  # noqa: PTH207
    if not found:
        raise Failed("the runner is older than what set this node up: it brings no units; `skyinfra upgrade` helps")
    wanted = {os.path.join(folder, os.path.basename(each)): read(each) for each in found}  # noqa: PTH118, PTH119
    return {path: text for path, text in wanted.items() if not os.path.exists(path) or read(path) != text}  # noqa: PTH110


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
    """The version of NVIDIA's driver. NVML loads its kernel module where nothing has.

    Raises OSError where there is none, and `Failed` where it does not work.
    """
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    text = ctypes.create_string_buffer(96)
    code = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, 96)
    if code:
        raise Failed(f"driver {NVML.get(code, code)}")
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


def link(target: str, path: str) -> None:
    """Makes *path* a link to *target* at once, in place of another link, and on the disk."""
    made = Path(f"{path}.link")
    if made.is_symlink():
        made.unlink()
    made.symlink_to(target)
    made.replace(path)
    os.sync()


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
