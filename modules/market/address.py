"""Asks a marketplace where a container is reached: `address.py find`, `address.py forget`.

In the environment: FILE, to which "ADDRESS PORT" is written, or which is removed. CONTAINER: its id. PORT: of the
container, which the marketplace maps. WAIT: for how many seconds. ANSWERS: the folder of answers.py, which is the part
of one marketplace: its NAME, the variables KEY_VARIABLE and ADDRESS_VARIABLE of its API with its ADDRESS, the `path` of
a container, and `read`: its status, whether that is an end, and where a port of it is reached.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ["ANSWERS"])
import answers

PAUSE_S = float(os.environ.get("SKYINFRA_PAUSE", "5"))


def ask(container: str) -> Any:
    """What the API says of the container; None where it may say more another time."""
    key = os.environ.get(answers.KEY_VARIABLE) or sys.exit(
        f"skyinfra: {answers.KEY_VARIABLE} is not set, with which {answers.NAME} is asked for the port of the head"
    )
    base = os.environ.get(answers.ADDRESS_VARIABLE) or answers.ADDRESS
    request = urllib.request.Request(  # noqa: S310 - of the account's own choice
        base.rstrip("/") + answers.path(container),
        headers={"Authorization": f"Bearer {key}", "User-Agent": "skyinfra"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            sys.exit(
                f"skyinfra: {answers.NAME} answers {error.code} ({error.reason}) when it is asked for {container}, "
                "the head"
            )
    except (OSError, ValueError):
        pass
    return None


def find(file: Path) -> None:
    container, port, until = os.environ["CONTAINER"], int(os.environ["PORT"]), float(os.environ["WAIT"])
    until += time.monotonic()
    status = "not known"
    while time.monotonic() < until:
        answer = ask(container)
        if answer is not None:
            status, ended, reached = answers.read(answer, port)
            if ended:
                sys.exit(
                    f"skyinfra: {container}, the head, is {status} instead of starting: its log at {answers.NAME} "
                    "says why"
                )
            if reached is not None:
                file.write_text("{} {}\n".format(*reached))
                return
        time.sleep(PAUSE_S)
    sys.exit(
        f"skyinfra: {container}, the head, has no public port for {port} within {os.environ['WAIT']} s: its status is "
        f"{status}. An image that is large takes longer: raise wait_seconds"
    )


def forget(file: Path) -> None:
    file.unlink(missing_ok=True)


if __name__ == "__main__":
    {"find": find, "forget": forget}[sys.argv[1]](Path(os.environ["FILE"]))
