"""Builds the fake driver: ``python tests/fake_nvml/build.py FOLDER`` prints the folder when it is done.

In FOLDER stand ``libnvidia-ml.so.1``, ``nvidia-smi``, ``fake-nvml-ctl``, and in ``old/`` the library of a driver before
R510, which lacks the versioned functions. README.md says how they are used. Needs a C compiler (``$CC``, gcc).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fake_nvml import boards  # noqa: E402

FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror")
LIBRARY = "libnvidia-ml.so.1"
SHARED = ("-shared", "-fPIC", "-fvisibility=hidden", "-pthread", f"-Wl,-soname,{LIBRARY}")
SOURCES = ("api.c", "calls.c", "compute.c", "devices.c", "machine.c", "mig.c", "readings.c")
PROGRAMS = {"nvidia-smi": "nvidia_smi.c", "fake-nvml-ctl": "ctl.c"}


def compiler() -> str | None:
    """The C compiler, if this machine has one."""
    return shutil.which(os.environ.get("CC") or "gcc")


def build(folder: Path) -> Path:
    """Builds it in *folder*, unless what stands there is of the same sources. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    text = boards.source()
    stamp, wanted = folder / "stamp", _digest(text)
    with (folder / "build.lock").open("a") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                (Path(scratch) / "boards.c").write_text(text)
                _compile(Path(scratch), folder)
            stamp.write_text(wanted)
    return folder


def _compile(scratch: Path, folder: Path) -> None:
    tables = str(scratch / "boards.c")
    sources = [str(HERE / source) for source in SOURCES] + [tables]
    _gcc(*SHARED, *sources, "-ldl", output=folder / LIBRARY)
    (folder / "old").mkdir(exist_ok=True)
    _gcc(*SHARED, "-DFAKE_OLD_DRIVER", *sources, "-ldl", output=folder / "old" / LIBRARY)
    for program, source in PROGRAMS.items():
        common = [str(HERE / source), str(HERE / "machine.c"), tables]
        _gcc("-DFAKE_NVML_PROGRAM", *common, output=folder / program)


def _gcc(*arguments: str, output: Path) -> None:
    # A library that a process has loaded must not change under it: the new one takes its name.
    new = output.with_name(f"{output.name}.new")
    command = [compiler() or "gcc", *FLAGS, "-I", str(HERE), *arguments, "-o", str(new)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    new.replace(output)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for file in sorted([*HERE.glob("*.[ch]"), HERE / "build.py"]):
        digest.update(file.read_bytes())
    digest.update(str(compiler()).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    if compiler() is None:
        sys.exit("The fake driver needs a C compiler: apt-get install gcc libc6-dev, or set CC.")
    try:
        print(build(Path(sys.argv[1]).absolute()))
    except subprocess.CalledProcessError as error:
        sys.exit(f"The compiler failed: {error}")
