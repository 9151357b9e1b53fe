"""Jobs for tests."""

from __future__ import annotations

import pickle
from typing import Any

from skyinfra.protocol.calls import Header, Outcome
from skyinfra.protocol.jobs import VERSION, Submission

IDENTITY = "0123456789abcdef" * 2
CALL = bytes(range(256)) * 8
OUTCOME = Outcome(result=pickle.dumps(42))


def wanted(name: str = "nightly", identity: str = IDENTITY, **fields: Any) -> Submission:
    """A job that any slot takes."""
    header = Header("train-1", "train", "").dumps().decode()
    base: dict[str, Any] = {
        "task": "train",
        "kind": "function",
        "submitter": "ann@host",
        "priority": 0,
        "header": header,
        "size": len(CALL),
        "resources": {"slot": 1},
        **fields,
    }
    return Submission(VERSION, identity, name, **base)
