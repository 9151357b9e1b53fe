"""What importing costs."""

from __future__ import annotations

import subprocess
import sys

from support import ROOT


def test_declaring_tasks_imports_no_dask():
    program = "import sys, skyinfra as sky\n@sky.compute\ndef f(): ...\nf()\nprint('distributed' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "False"


def test_a_command_of_the_runner_imports_what_it_needs():
    """A node runs some of them while it boots, and for each change."""
    program = "import sys; from skyinfra.runner import cli; cli._parser(); print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"asyncio", "http", "pynvml", "distributed"} & set(printed.stdout.split())
