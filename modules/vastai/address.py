"""Asks Vast.ai's API where an instance is reached: `address.py find`, `address.py forget`.

In the environment: FILE, to which "ADDRESS PORT" is written, or which is removed. INSTANCE: its id. PORT: of the
container, which Vast.ai maps. WAIT: for how many seconds. VASTAI_API_KEY: of the account. VASTAI_API_URL: another
server.
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

PAUSE = float(os.environ.get("SKYINFRA_PAUSE", "5"))


def ask(instance: str) -> Any:
    """The instance as https://docs.vast.ai/api-reference/instances/show-instance says; None where that may pass."""
    key = os.environ.get("VASTAI_API_KEY") or sys.exit(
        "skyinfra: VASTAI_API_KEY is not set, with which Vast.ai is asked for the port of the head"
    )
    base = os.environ.get("VASTAI_API_URL", "https://console.vast.ai").rstrip("/")
    request = urllib.request.Request(  # noqa: S310 - of the account's own choice
        f"{base}/api/v0/instances/{instance}/?owner=me",
        headers={"Authorization": f"Bearer {key}", "User-Agent": "skyinfra"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)["instances"]
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            sys.exit(
                f"skyinfra: Vast.ai answers {error.code} ({error.reason}) when it is asked for instance {instance}"
            )
    except (OSError, ValueError, KeyError):
        pass
    return None


def reached(instance: Any, port: int) -> tuple[str, int] | None:
    """Its public address and port; None while it has none."""
    mapped = (instance.get("ports") or {}).get(f"{port}/tcp") or []
    address = (instance.get("public_ipaddr") or "").strip()
    return (address, int(mapped[0]["HostPort"])) if address and mapped else None


def find(file: Path) -> None:
    instance, port = os.environ["INSTANCE"], int(os.environ["PORT"])
    until = time.monotonic() + float(os.environ["WAIT"])
    status = "not known"
    while time.monotonic() < until:
        answer = ask(instance)
        if answer is not None:
            status = answer.get("actual_status")
            if status in ("exited", "stopped", "offline"):
                sys.exit(f"skyinfra: instance {instance} of the head is {status} instead of starting: see its log")
            if found := reached(answer, port):
                file.write_text("{} {}\n".format(*found))
                return
        time.sleep(PAUSE)
    sys.exit(
        f"skyinfra: instance {instance} of the head has no public port for {port} within {os.environ['WAIT']} s: its "
        f"status is {status}. An image that is large takes longer: raise wait_seconds"
    )


def forget(file: Path) -> None:
    file.unlink(missing_ok=True)


if __name__ == "__main__":
    {"find": find, "forget": forget}[sys.argv[1]](Path(os.environ["FILE"]))
