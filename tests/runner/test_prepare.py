"""The message of a node where the packages of the image cannot be installed."""

from __future__ import annotations

import asyncio
import sys
import zipfile
from pathlib import Path

import pytest

from skyinfra.errors import NodeFailed
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.runner import prepare


class _Folder:
    def __init__(self, path: Path) -> None:
        self.path = path


PIP = r"""
import sys
print("Looking in links: /none")
for number in range(30): print("  progress", number)
print("ERROR: Could not find a version that satisfies the requirement nosuch==9 (from versions: none)")
print("ERROR: No matching distribution found for nosuch==9")
sys.exit(1)
"""


def test_a_failed_installation_is_told_by_the_errors_of_pip_alone(tmp_path: Path) -> None:
    with pytest.raises(NodeFailed) as caught:
        asyncio.run(prepare._execute([sys.executable, "-c", PIP], _Folder(tmp_path), {}))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "Image.pip: pip could not install what the image asks for\n"
        "ERROR: Could not find a version that satisfies the requirement nosuch==9 (from versions: none)\n"
        "ERROR: No matching distribution found for nosuch==9"
    )


def test_what_a_person_has_set_for_pip_hinders_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip takes no PIP_USER together with --target."""
    monkeypatch.setenv("PIP_USER", "1")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run", "--target", str(tmp_path / "packages")]
    asyncio.run(prepare._execute([*pip, str(_wheel(tmp_path))], _Folder(tmp_path), {}))  # type: ignore[arg-type]


def _wheel(folder: Path) -> Path:
    path = folder / "nothing-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("nothing-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1\n")
        wheel.writestr("nothing-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("nothing-1.dist-info/RECORD", "")
    return path


def test_a_failed_command_shows_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(NodeFailed, match="ended with exit code 3: echo ERROR: no") as caught:
        asyncio.run(prepare._execute(["/bin/sh", "-c", "echo ERROR: no; exit 3"], _Folder(tmp_path), {}))  # type: ignore[arg-type]
    assert caught.value.hint == "ERROR: no"


UV = r"""
import sys
print("Using Python 3.11")
print("  progress")
print("error: No solution found when resolving dependencies")
print("  Caused by: because nosuch was not found in the provided package locations")
print("hint: another index")
sys.exit(1)
"""


def test_the_reason_of_uv_stands_below_its_error(tmp_path: Path) -> None:
    with pytest.raises(NodeFailed) as caught:
        asyncio.run(prepare._execute([sys.executable, "-c", UV], _Folder(tmp_path), {}))  # type: ignore[arg-type]
    assert caught.value.hint == (
        "error: No solution found when resolving dependencies\n"
        "  Caused by: because nosuch was not found in the provided package locations"
    )


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_what_a_power_cut_left_of_the_digests_is_none(tmp_path: Path, text: str) -> None:
    """A file without fsync may be there, and empty: the runner would not start any more."""
    directory = NodeDirectory(tmp_path)
    directory.prepared_file.write_text(text)
    config = NodeConfig(1, "demo", "mig", "n1", "local", True, "127.0.0.1:0", cpu_slots=1, run=("echo once >>ran",))
    for _ in range(2):
        asyncio.run(prepare.prepare(config, directory))
    assert (tmp_path / "ran").read_text() == "once\n"
