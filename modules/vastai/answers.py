"""What Vast.ai's API says of an instance: https://docs.vast.ai/api-reference/instances/show-instance."""

from __future__ import annotations

from typing import Any

NAME, KEY_VARIABLE, ADDRESS_VARIABLE = "Vast.ai", "VASTAI_API_KEY", "VASTAI_API_URL"
ADDRESS = "https://console.vast.ai"


def path(instance: str) -> str:
    return f"/api/v0/instances/{instance}/?owner=me"


def read(answer: Any, port: int) -> tuple[str, bool, tuple[str, int] | None]:
    instance = answer.get("instances") or {}
    status = str(instance.get("actual_status"))
    mapped = (instance.get("ports") or {}).get(f"{port}/tcp") or []
    address = (instance.get("public_ipaddr") or "").strip()
    if status == "running" and address and mapped:
        return status, False, (address, int(mapped[0]["HostPort"]))
    return status, status in ("exited", "stopped", "offline"), None
