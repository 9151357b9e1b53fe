"""The calls and messages that the head's scheduler takes, of those of Dask's.

The others run code of their sender in it, or nobody of ours needs them.

Members of a fleet run code on its nodes, as tasks; not in the scheduler, which answers all of them. It keeps nobody out
of the head for good: tasks of the head's slots run as its user.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler

from skyinfra.errors import NotSupported

# What clients, workers and their Nannies ask of it.
_CALLS = {
    "broadcast",
    "connection_stream",
    "gather",
    "heartbeat_worker",
    "identity",
    "log_event",
    "processing",
    "register-client",
    "register-worker",
    "register_nanny",
    "unregister",
    "versions",
    "who_has",
}
# On the streams of clients and workers.
_MESSAGES = {
    "add-keys",
    "cancel-keys",
    "client-desires-keys",
    "client-releases-keys",
    "close-client",
    "heartbeat-client",
    "keep-alive",
    "log-event",
    "long-running",
    "release-worker-data",
    "report-key",
    "request-refresh-who-has",
    "reschedule",
    "steal-response",
    "subscribe-topic",
    "task-erred",
    "task-finished",
    "unsubscribe-topic",
    "worker-status-change",
}


def refuse_others(scheduler: Scheduler) -> None:
    """Makes *scheduler* refuse every call and message of Dask's that is not named above, those of other versions too.

    Who calls gets an error; who sends one on a stream loses that.
    """
    scheduler.blocked_handlers = sorted(scheduler.handlers.keys() - _CALLS)
    for name in scheduler.stream_handlers.keys() - _MESSAGES:
        scheduler.stream_handlers[name] = _refusing(name)


def _refusing(name: str) -> Any:
    def refuse(**_: Any) -> None:
        raise NotSupported("the head of a fleet does not take this message", given=name)

    return refuse
