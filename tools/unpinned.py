"""Tests what users install: the newest versions, and the oldest that pyproject.toml admits. No constraints.txt.

python -m tools.unpinned FOLDER [newest] [oldest]

Each is a virtual environment in FOLDER, which stays for the next run. An oldest version of which there is no wheel for
this Python is left out, which is said; what stands in for it is the newest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("cdktf", "toolchain")
# For notebooks; what the tests need besides, in the versions of constraints.txt where these stand there.
NOTEBOOK = ("ipykernel", "nbclient")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "psutil", "jsonschema", "numpy")
# README, a failing task in a terminal and in a notebook, a deploy, and the fast tests.
TESTS = (
    "tests/integration/test_pages.py::test_the_example_of_the_readme_prints_what_stands_there",
    "tests/integration/test_failing_script.py",
    "tests/notebook/test_notebook_kernel.py::test_exceptions_are_readable",
    "tests/integration/test_quickstart.py::test_status_shows_every_slot_with_its_own_partition",
)
FAST = (
    "tests/blobs",
    "tests/cli/test_cli_help.py",
    "tests/cli/test_cli_offers.py",
    "tests/engine/test_dask_comms.py",
    "tests/engine/test_dask_private.py",
    "tests/protocol",
    "tests/tasks",
    "tests/terminal/test_terminal_tables.py",
    "tests/test_compiler.py",
    "tests/test_pool.py",
    "tests/worker/test_secrets.py",
)


def main(arguments: Sequence[str]) -> int:
    """Returns the number of environments whose tests fail."""
    folder, *selected = arguments
    return sum(not passes(Path(folder), each) for each in selected or ("newest", "oldest"))


def passes(folder: Path, which: str) -> bool:
    """Whether the tests pass with the versions *which*."""
    start = time.monotonic()
    place = (folder / which).absolute()
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True, symlinks=True)
    wanted = [f"{ROOT}[{','.join(EXTRAS)}]", *NOTEBOOK, *tools()]
    if which == "oldest":
        wanted += oldest(python, folder.absolute() / "wheels")
    pip(python, "install", "--no-compile", "--upgrade", "--upgrade-strategy", "eager", "--editable", *wanted)
    shown = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    print(f"{which}: {' '.join(re.findall('(?m)^[^#-].*==.*$', shown))}", flush=True)
    # Old packages warn of newer ones; warnings of ours are errors in the other tests.
    options = ["-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run([python, "-m", "pytest", *options, *TESTS, *FAST], cwd=ROOT, env={**os.environ, "PATH": path})
    result = "passed" if done.returncode == 0 else "FAILED"
    print(f"{which}: {result} after {time.monotonic() - start:.0f} s", flush=True)
    return done.returncode == 0


def tools() -> Iterator[str]:
    """The requirements of the tests."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name in TOOLS:
        pin = re.search(rf"(?m)^{name}==.*$", pins)
        yield pin[0] if pin else name


def oldest(python: Path, wheels: Path) -> list[str]:
    """The oldest versions that pyproject.toml admits, of which there are wheels for this Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    notebook = [each for each in extras["dev"] if each.startswith(NOTEBOOK)]
    found = []
    for need in [*project["dependencies"], *(need for extra in EXTRAS for need in extras[extra]), *notebook]:
        match = re.match(r"([\w-]+)>=([\d.]+)", need)
        if match is None:
            continue
        pin = f"{match[1]}=={match[2]}"
        try:
            pip(python, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), pin)
        except subprocess.CalledProcessError as error:
            print(f"oldest: {pin} is left out: {error.stderr.strip().splitlines()[-1]}", flush=True)
        else:
            found.append(pin)
    return found


def pip(python: Path, command: str, *arguments: str) -> None:
    """Runs pip. Raises CalledProcessError, with its output where it downloads."""
    quiet = ["-qq", "--disable-pip-version-check"]
    subprocess.run(
        [python, "-m", "pip", command, *quiet, *arguments],
        check=True,
        stderr=subprocess.PIPE if command == "download" else None,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
