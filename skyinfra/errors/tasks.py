"""Errors of tasks, jobs and gangs. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from skyinfra.errors.base import SkyinfraError


class TaskError(SkyinfraError):
    """A task could not be run. What a task itself raises arrives as it is."""


class TaskFailed(TaskError):
    """The task raised an exception that cannot be shipped; the message carries its text and traceback."""


class TaskNotPicklable(TaskError):
    """The function, its arguments or its result cannot be shipped."""


class TaskAttemptsExceeded(TaskError):
    """The task ended its worker process several times and is not tried again."""


class TaskTooLarge(TaskError):
    """The call of a task, or its result, is larger than can be shipped."""


class TaskTimeout(TaskError):
    """The task ran for longer than it may and was stopped. Waiting in vain for a result raises TimeoutError instead."""


class ScriptFailed(TaskError):
    """The script of a job ended with an exit code other than 0, or by a signal.

    code: the exit code, negative for the signal that ended it.
    """

    code: int = 1


class GangFailed(TaskError):
    """A rank of a gang ended without an exception of its own: with an exit code, by a signal, or with its slot.

    rank: the first one that did. code: its exit code, negative for a signal; None where its slot was lost.
    """

    rank: int | None = None
    code: int | None = None


class JobNotFound(TaskError):
    """The head keeps no job of that name."""


class JobNameTaken(TaskError):
    """A job of that name exists already."""


class JobCancelled(TaskError):
    """The job was cancelled; there is no result."""


class SlotLost(TaskError):
    """The slot that the task was bound to is gone."""


class TaskInputsLost(TaskError):
    """The inputs of the task are gone from the head and have changed on the client: submit the task again."""


class SecretNotFound(TaskError):
    """The value of a secret was not found here, or the task was not given it."""


class NotSynced(TaskError):
    """The path was not synced."""


class NotInTask(TaskError):
    """The instance was asked for outside of a task."""
