"""Questions of a client to the nodes of a fleet, by way of the head: nothing but the head's port has to be open.

The scheduler of the head answers three calls. `ASK_CALL` is a client's: it waits for the node's answer. The runner of
each other node waits with `QUESTIONS_CALL` for what it is asked and answers with `ANSWER_CALL`; so a node is reached
through the connection that it has made. A question has a name and arguments, an answer is a JSON object:
``{"answer": ...}``, or ``{"error": [class name, message]}``.
"""

from __future__ import annotations

from typing import Any

ASK_CALL = "skyinfra_ask"
QUESTIONS_CALL = "skyinfra_questions"
ANSWER_CALL = "skyinfra_answer"

# What nodes know to answer; see `skyinfra.runner.answers`.
DOCTOR = "doctor"
METRICS = "metrics"
LOG = "log"
START = "start"
OUTPUT = "output"
END = "end"
STOP = "stop"
PUT = "put"
GET = "get"

Answer = dict[str, Any]


def refused(error: Exception) -> Answer:
    """The answer that *error* is."""
    return {"error": [type(error).__name__, str(error)]}
