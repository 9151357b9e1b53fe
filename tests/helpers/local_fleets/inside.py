"""Scripts of tests inside of runners: the head runs nothing that a client sends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support import python_path

# Makes the scheduler of the process `scheduler`; what comes after it is the test's.
_SCHEDULER = "from distributed import Scheduler\nscheduler = next(iter(Scheduler._instances))\n"

# Ends the scheduler, as an error of it would.
ENDS = "import asyncio\nasyncio.get_running_loop().create_task(scheduler.close())\n"


def environment(script: Path) -> dict[str, str]:
    """Variables of a process in which `run` is to run *script*."""
    folder = Path(__file__).parent / "inside_processes"
    return {"PYTHONPATH": python_path(folder), "SKYINFRA_TEST_SCRIPT": str(script)}


def run(pid: int, script: Path, text: str) -> None:
    """Runs *text* in the process *pid*, which was started with *script*."""
    script.write_text(_SCHEDULER + text)
    os.kill(pid, signal.SIGUSR2)
