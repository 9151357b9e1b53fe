"""The notice to the tasks of a node that is taken out of service: a file in the node's folder."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

# In the node's folder, for as long as tasks are to end.
FILE = "interrupted.json"


@dataclass(frozen=True)
class Interruption:
    """Why the node of this task is taken out of service, in words, and when what still runs there is ended.

    until: Unix time in seconds; None where running tasks may end by themselves.
    """

    why: str
    until: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Until running tasks are ended, at least 0; None where they are not."""
        return None if self.until is None else max(0.0, self.until - time.time())

    def dumps(self) -> str:
        """Returns the text of `FILE`."""
        return json.dumps(asdict(self)) + "\n"
