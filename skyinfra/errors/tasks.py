"""Errors of tasks, jobs and gangs. See `skyinfra.errors` for the whole tree."""

from __future__ import annotations

from skyinfra.errors.base import SkyinfraError


class TaskError(SkyinfraError):
    """A task could not be run. What a task itself raises arrives as it is."""


class TaskFailed(TaskError):
    """The task raised what cannot be shipped, and the message has its text and traceback; or what would act on the
    program here (KeyboardInterrupt, SystemExit, StopIteration, CancelledError ...), and it is the cause.

    Cure: mend the task by the traceback; exceptions that can be pickled arrive as they are.
    """


class TaskNotPicklable(TaskError):
    """The function, its arguments or its result cannot be shipped.

    Cure: make connections, locks and open files inside of the task, and return plain values.
    """


class TaskAttemptsExceeded(TaskError):
    """The task ended its worker process several times and is not tried again.

    Cure: look whether its memory ran out (`skyinfra logs --task ID`), and ask for a larger slot.
    """


class TaskTooLarge(TaskError):
    """The call of a task, or its result, is larger than can be shipped.

    Cure: sync large inputs with `includes`, and write large results to a file or a bucket.
    """


class TaskTimeout(TaskError):
    """The task ran for longer than it may and was stopped. Waiting in vain for a result raises TimeoutError instead.

    Cure: give it a longer `timeout`, or less to do.
    """


class ScriptFailed(TaskError):
    """The script of a job ended with an exit code other than 0, or by a signal.

    Cure: see its output: `skyinfra jobs logs STACK/POOL NAME`.

    code: the exit code, negative for the signal that ended it.
    """

    code: int = 1


class GangFailed(TaskError):
    """A rank of a gang ended without an exception of its own: with an exit code, by a signal, or with its slot.

    Cure: see the log of that rank; `max_restarts` starts the gang again when a slot is lost.

    rank: the first one that did. code: its exit code, negative for a signal; None where its slot was lost.
    """

    rank: int | None = None
    code: int | None = None


class JobNotFound(TaskError):
    """The head keeps no job of that name.

    Cure: take a name that `skyinfra jobs STACK/POOL` lists.
    """


class JobNameTaken(TaskError):
    """A job of that name exists already.

    Cure: take another name, or `replace=True`.
    """


class JobCancelled(TaskError):
    """The job was cancelled; there is no result.

    Cure: submit it again if it was wanted.
    """


class SlotFailed(TaskError):
    """Slots could not run the task for reasons of their own: a full disk, a file system that is read-only, no memory.

    It was sent to others, which used none of its retries, until it had met so many that it may be the reason itself.

    Cure: `skyinfra status` and `skyinfra doctor` name the nodes and what they lack; once they have that, their slots
    take tasks again by themselves.
    """


class SlotLost(TaskError):
    """The slot that the task was bound to is gone.

    Cure: submit it again; without `node` or a bound slot it may run on any.
    """


class SlotsHeld(TaskError):
    """A task waits for other tasks of its own fleet, and all slots on which they may run are held by tasks that wait.

    Cure: call the function in the task itself, submit it from the client, or let fewer tasks wait than there are slots.
    """


class TaskInputsLost(TaskError):
    """The inputs of the task are gone from the head and have changed on the client: submit the task again.

    Cure: submit the task again.
    """


class SecretNotFound(TaskError):
    """The value of a secret was not found here, or the task was not given it.

    Cure: set the variable, or `keyring set skyinfra NAME`; name it in `secrets=[...]` of the task.
    """


class NotSynced(TaskError):
    """The path was not synced.

    Cure: name the path in `includes` of `sky.connect`, or call `pool.sync`.
    """


class NotInTask(TaskError):
    """The instance was asked for outside of a task.

    Cure: call it inside of a function that a slot runs.
    """
