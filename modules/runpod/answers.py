"""What RunPod's API says of a pod: https://docs.runpod.io/api-reference-v2/pods/get-a-pod."""

from __future__ import annotations

from typing import Any

NAME, KEY_VARIABLE, ADDRESS_VARIABLE = "RunPod", "RUNPOD_API_KEY", "RUNPOD_API_BASE_URL"
ADDRESS = "https://api.runpod.io"


def path(pod: str) -> str:
    return f"/v2/pods/{pod}"


def read(answer: Any, port: int) -> tuple[str, bool, tuple[str, int] | None]:
    status = str(answer.get("status"))
    for each in (answer.get("runtime") or {}).get("ports") or []:
        if each.get("private") == port and each.get("type") == "tcp" and each.get("ip") and each.get("public"):
            return status, False, (each["ip"], each["public"])
    return status, status in ("EXITED", "ERROR", "TERMINATED"), None
