"""Kernels of notebooks: real ones, whose messages are kept for each cell, whenever they come."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import python_path

from skyinfra.protocol.manifest import Manifest


class Cell:
    """The output of one run of a cell, as a front end shows it."""

    def __init__(self) -> None:
        self.streams = ""
        # By display; results of cells have none.
        self.displays: dict[str, dict[str, str]] = {}
        self.error: dict[str, Any] | None = None
        self.idle = False

    def take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            self.streams += content["text"]
        elif kind in ("display_data", "update_display_data", "execute_result"):
            key = content.get("transient", {}).get("display_id") or str(len(self.displays))
            self.displays[key] = content["data"]
        elif kind == "error":
            self.error = content
        elif kind == "status":
            self.idle = content["execution_state"] == "idle"

    @property
    def traceback(self) -> str:
        """Without colours."""
        assert self.error is not None, self.streams
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.error["traceback"]))

    def shown(self, kind: str = "text/plain") -> list[str]:
        return [data[kind] for data in self.displays.values() if kind in data]


class Kernel:
    """A kernel of IPython in *folder*."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        self.cells: dict[str, Cell] = {}
        self.manager = KernelManager(connection_file=str(folder / "kernel.json"))
        environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": python_path()}
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self._connect()

    def start(self, code: str) -> Cell:
        """Starts a cell, without waiting for it or for those before it."""
        # A kernel leaves out the cells that come right after one that failed, if it is not told otherwise.
        cell = self.cells[self.client.execute(code, stop_on_error=False)] = Cell()
        return cell

    def run(self, code: str, *, fails: bool = False) -> Cell:
        """Runs a cell."""
        cell = self.start(code)
        self.until(lambda: cell.idle)
        assert fails or cell.error is None, cell.traceback
        return cell

    def until(self, condition: Callable[[], object], timeout: float = 60.0) -> None:
        """Takes messages until *condition* holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, {key: vars(cell) for key, cell in self.cells.items()}
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=0.2)
                cell = self.cells.get(message["parent_header"].get("msg_id"))
                if cell is not None:
                    cell.take(message["header"]["msg_type"], message["content"])

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Writes fleet.json, as `sky.connect` reads it."""
    file = folder / "fleet.json"
    file.write_text(json.dumps(manifest.to_json()))
    file.chmod(0o600)
    return file


@pytest.fixture
def kernel(fleet: Any, tmp_path: Path) -> Iterator[Kernel]:
    """A kernel beside fleet.json, the manifest of the fleet of the tests."""
    write_manifest(tmp_path, fleet.manifest)
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()
