"""Refusals that a test asks for, of any action of any service, in the form and with the status that AWS gives them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult, BaseResponse

from moto_ext import world

# How often each row was met since the test wrote it.
_met: Counter[tuple[int, str]] = Counter()


class Refused(ServiceException):
    # moto takes the service's description from the module of an exception that is its own, which it knows by its name.
    __module__ = "answers"


def install() -> None:
    plain = BaseResponse.call_action

    def call_action(self: Any) -> Any:
        row = _row(self._get_action())
        if row is None:
            return plain(self)
        status, headers, body = self.serialized(ActionResult(Refused(row["code"], row["message"])))
        headers, body = self._enrich_response({**headers, "status": row.get("status", status)}, body)
        return int(headers["status"]), headers, body

    BaseResponse.call_action = call_action


def _row(action: str) -> dict[str, Any] | None:
    """The refusal of this call of *action*; None where the call goes on to moto."""
    for row in world.told("refuse"):
        if row["action"] != action:
            continue
        written = Path(os.environ[world.FILE]).stat().st_mtime_ns
        key = (written, json.dumps(row, sort_keys=True))
        _met[key] += 1
        first = row.get("after", 0)
        if first < _met[key] <= first + row.get("times", 10**9):
            return row
    return None
