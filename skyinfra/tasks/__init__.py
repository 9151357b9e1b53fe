"""Tasks: ``@sky.compute``, ``@sky.cls`` and pickling. Travels to nodes, which import the modules of tasks."""

from __future__ import annotations

from skyinfra.tasks.stateful import Handle, Stateful, cls
from skyinfra.tasks.task import Compute, Gather, Options, Task, compute, gather

__all__ = ["Compute", "Gather", "Handle", "Options", "Stateful", "Task", "cls", "compute", "gather"]
