"""What Dask logs and warns of reaches no terminal of a client; who uses Dask by himself keeps it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import python_path

SAYS = """
import logging, threading, warnings
import distributed
{before}
from skyinfra.engine.loop import LoopThread
loop = LoopThread()
{after}

def say():
    where = threading.current_thread().name
    # Of a module that is imported later as well.
    for name in (*filter(lambda each: each.startswith(("distributed", "tornado")), [*logging.root.manager.loggerDict]),
                 "distributed.later", "dask.later", "tornado.access", "mine", "distributed_of_mine"):
        logging.getLogger(name).error("%s says it in %s", name, where)
    for module in ("distributed.client", "dask.base", "mine"):
        warnings.warn_explicit(f"{module} warns in {where}", UserWarning, "file.py", 1, module=module)

async def in_loop():
    say()

loop.run(in_loop())
say()
other = threading.Thread(target=say, name="Dask-Offload_0")
other.start(), other.join()
loop.close()
"""


def said(before: str = "", after: str = "") -> list[str]:
    program = SAYS.replace("{before}", before).replace("{after}", after)
    ended = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, env={"PYTHONPATH": python_path()}, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if " says it in " in line or " warns in " in line]
    return [line.rpartition(" - ")[2].rpartition("UserWarning: ")[2] for line in lines]


def of_dask(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("distributed.", "dask.", "tornado."))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("logging.basicConfig()", ""),
        ("", "logging.basicConfig()"),
        ("logging.basicConfig()", "logging.basicConfig(force=True)"),
    ],
    ids=["plain", "configured before", "configured later", "configured anew"],
)
def test_nothing_of_dask_is_said_and_all_of_the_program_itself(before: str, after: str) -> None:
    """dask/dask#3484, dask/distributed#2801: lines about event loops and garbage collections fill the terminal."""
    lines = said(before, after)
    assert of_dask(lines) == []
    # A line for each handler of the program.
    assert sum("mine says it" in line for line in lines) >= 6, "three threads, two loggers"
    assert "mine warns in MainThread" in lines


def test_who_uses_dask_keeps_its_messages_but_for_those_of_our_thread() -> None:
    lines = said("own = distributed.Client(processes=False, n_workers=1, dashboard_address=None)")
    assert "distributed.core says it in MainThread" in lines
    assert "distributed.later says it in Dask-Offload_0" in lines
    assert "distributed.client warns in MainThread" in lines
    assert [line for line in of_dask(lines) if "says it in skyinfra-client" in line] == []


def test_a_heartbeat_that_no_head_answers_is_one_line() -> None:
    """Of a worker: its log has no traceback of Dask's for a head that is away."""
    text = (
        "import logging\nfrom skyinfra.engine import settings\nlogging.basicConfig()\nsettings.quiet()\n"
        "for said in ('Failed to communicate with scheduler during heartbeat.', 'Another'):\n"
        "    try: raise OSError('closed')\n"
        "    except OSError: logging.getLogger('distributed.worker').exception(said)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    heartbeat, another, *rest = done.stderr.splitlines()
    assert "Failed to communicate" in heartbeat and "Another" in another and rest[0].startswith("Traceback")
