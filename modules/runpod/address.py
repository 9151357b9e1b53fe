"""Asks RunPod's API where a pod is reached: `address.py find`, `address.py forget`.

In the environment: FILE, to which "ADDRESS PORT" is written, or which is removed. POD: its id. PORT: of the pod, which
RunPod maps. WAIT: for how many seconds. RUNPOD_API_KEY: of the account. RUNPOD_API_BASE_URL: another server.
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


def ask(pod: str) -> Any:
    """The pod as https://docs.runpod.io/api-reference-v2/pods/get-a-pod describes it; None where that may pass."""
    key = os.environ.get("RUNPOD_API_KEY") or sys.exit(
        "skyinfra: RUNPOD_API_KEY is not set, with which RunPod is asked for the port of the head"
    )
    base = os.environ.get("RUNPOD_API_BASE_URL", "https://api.runpod.io").rstrip("/").removesuffix("/v2")
    request = urllib.request.Request(  # noqa: S310 - of the account's own choice
        f"{base}/v2/pods/{pod}", headers={"Authorization": f"Bearer {key}", "User-Agent": "skyinfra"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            sys.exit(f"skyinfra: RunPod answers {error.code} ({error.reason}) when it is asked for the pod {pod}")
    except (OSError, ValueError):
        pass
    return None


def reached(pod: Any, port: int) -> tuple[str, int] | None:
    """Its public address and port; None while it has none."""
    for each in (pod.get("runtime") or {}).get("ports") or []:
        if each.get("private") == port and each.get("type") == "tcp" and each.get("ip") and each.get("public"):
            return each["ip"], each["public"]
    return None


def find(file: Path) -> None:
    pod, port, until = os.environ["POD"], int(os.environ["PORT"]), time.monotonic() + float(os.environ["WAIT"])
    status = "not known"
    while time.monotonic() < until:
        answer = ask(pod)
        if answer is not None:
            status = answer.get("status")
            if status in ("EXITED", "ERROR", "TERMINATED"):
                sys.exit(
                    f"skyinfra: the pod {pod} of the head is {status} instead of starting: its log in RunPod says why"
                )
            if found := reached(answer, port):
                file.write_text("{} {}\n".format(*found))
                return
        time.sleep(PAUSE)
    sys.exit(
        f"skyinfra: the pod {pod} of the head has no public port for {port} within {os.environ['WAIT']} s: its status "
        f"is {status}. An image that is large takes longer: raise wait_seconds"
    )


def forget(file: Path) -> None:
    file.unlink(missing_ok=True)


if __name__ == "__main__":
    {"find": find, "forget": forget}[sys.argv[1]](Path(os.environ["FILE"]))
