"""What is private to Dask: a file for each of its parts uses it; and what is ours hides nothing of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from skyinfra.engine import dask_comms
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.worker.process import SlotWorker

# Attributes that are no public part of Dask, and modules that hold none.
PRIVATE = {
    "_broker",
    "_create_taskstate_from_graph",
    "_send_to_scheduler",
    "all_running_tasks",
    "batched_send",
    "handle_stimulus",
    "recent_message_log",
    "scheduler_comm",
}
MODULES = ("dask._", "distributed.comm.tcp", "distributed.protocol", "distributed.spans", "distributed.worker_state")


def test_no_other_file_uses_what_is_private_to_dask() -> None:
    engine = Path(dask_comms.__file__).parent
    own = {engine / f"dask_{part}.py" for part in ("client", "comms", "scheduler", "worker")}
    assert set(engine.glob("dask_*.py")) == own
    for path in {*engine.parent.rglob("*.py")} - own:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in PRIVATE, f"{path}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith(MODULES), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("ours", "meant"),
    [
        (
            FleetScheduler,
            {
                "add_worker",
                "close",
                "handle_stream",
                "handle_worker",
                "handle_worker_status_change",
                "identity",
                "listen",
                "log_worker_event",
                "remove_client",
                "remove_worker",
                "stimulus_cancel",
                "worker_objective",
            },
        ),
        (SlotWorker, {"close", "execute", "get_startup_information", "heartbeat", "start_unsafe"}),
    ],
)
def test_what_is_ours_hides_nothing_of_dask_by_accident(ours: type, meant: set[str]) -> None:
    """A method `report` of the scheduler once took the place of Dask's, which cut clients off that cancelled a task."""
    base = ours.__bases__[0]
    hidden = {name for name in vars(ours) if not name.startswith("_") and hasattr(base, name)}
    assert hidden == meant
