"""What every action answers: refusals that a test asks for, as AWS gives them; and the same again to who asks again.

An SDK sends a request again where the answer was lost on its way. moto would do the action twice, which few of them
allow; under the same number of the SDK's it is answered as before.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult, BaseResponse

from moto_ext import world

# How often each row was met since the test wrote it.
_met: Counter[tuple[int, str]] = Counter()
# By the SDK's number of the request, the latest ones.
_done: OrderedDict[str, Any] = OrderedDict()
_KEPT = 1000


class Refused(ServiceException):
    # moto takes the service's description from the module of an exception that is its own, which it knows by its name.
    __module__ = "answers"


def install() -> None:
    plain = BaseResponse.call_action

    def call_action(self: Any) -> Any:
        row = _row(self._get_action())
        if row is None:
            number = self.headers.get("Amz-Sdk-Invocation-Id")
            if number in _done:
                return _done[number]
            answer = plain(self)
            if number and answer[0] < 400:
                _done[number] = answer
                while len(_done) > _KEPT:
                    _done.popitem(last=False)
            return answer
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
