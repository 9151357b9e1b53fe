"""Servers that answer as the documents of RunPod and Vast.ai say, of what stands in a world of the mock bed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mock_provider.world import World

KEY = "key-0a1b2c3d"


class Marketplace(ThreadingHTTPServer):
    """``asked`` are the paths. ``status`` is answered in place of the right one, ``statuses`` are in turn. ``later``
    times nothing is mapped yet; ``moved`` is added to the ports. ``changed`` is in place of what is so else."""

    daemon_threads = True

    def __init__(self, answers: Callable[[Marketplace, str], Any], world: World) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.world = world
        self.answers = answers
        self.asked: list[str] = []
        self.status: int | None = None
        self.statuses: list[int] = []
        self.later = 0
        self.moved = 0
        self.changed: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Marketplace

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        allowed = self.headers["Authorization"] == f"Bearer {KEY}"
        found = self.server.answers(self.server, self.path) if allowed else {"detail": "missing bearer token"}
        status = (
            self.server.statuses.pop(0)
            if self.server.statuses
            else self.server.status or (401 if not allowed else 200 if found else 404)
        )
        body = json.dumps(found or {"title": "Not Found", "status": 404, "detail": "pod not found"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _pod(server: Marketplace, path: str) -> Any:
    """https://docs.runpod.io/api-reference-v2/pods/get-a-pod, shortened."""
    for n, pod in enumerate(server.world.existing("runpod_pod").values(), 1):
        if path == f"/v2/pods/{pod['id']}":
            ports: Any = [
                {
                    "private": int(each.partition("/")[0]),
                    "public": 43000 + n + server.moved,
                    "type": "tcp",
                    "ip": f"192.0.2.{n}",
                }
                for each in pod["ports"] or []
            ]
            server.later -= 1
            running = server.later < 0
            found = {
                "id": pod["id"],
                "name": pod["name"],
                "status": "RUNNING" if running else "STARTING",
                "runtime": {
                    "uptime": 3600,
                    "ports": [{"private": 8888, "public": None, "type": "http", "ip": None}, *ports],
                }
                if running
                else None,
            }
            return found | server.changed
    return None


@contextmanager
def answering(answers: Callable[[Marketplace, str], Any], world: World) -> Iterator[Marketplace]:
    server = Marketplace(answers, world)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def runpod(world: World) -> Iterator[tuple[Marketplace, dict[str, str]]]:
    """The server, and the variables with which Terraform finds it."""
    with answering(_pod, world) as server:
        yield server, {"RUNPOD_API_KEY": KEY, "RUNPOD_API_BASE_URL": server.url, "SKYINFRA_PAUSE": "0.05"}


def _instance(server: Marketplace, path: str) -> Any:
    """https://docs.vast.ai/api-reference/instances/show-instance, shortened."""
    for n, instance in enumerate(server.world.existing("vastai_instance").values(), 1):
        if path == f"/api/v0/instances/{instance['id']}/?owner=me":
            asked = [name.rpartition(":")[2] for name in instance["env"] if name.startswith("-p ")]
            server.later -= 1
            running = server.later < 0
            mapped = {
                f"{each}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(43000 + n + server.moved)}] for each in asked
            }
            found = {
                "id": instance["id"],
                "actual_status": "running" if running else "loading",
                "public_ipaddr": f"192.0.2.{n}\n",
                "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "40022"}], **mapped} if running else None,
            }
            return {"instances": found | server.changed}
    return None


@contextmanager
def vastai(world: World) -> Iterator[tuple[Marketplace, dict[str, str]]]:
    """The server, and the variables with which Terraform finds it."""
    with answering(_instance, world) as server:
        yield server, {"VASTAI_API_KEY": KEY, "VASTAI_API_URL": server.url, "SKYINFRA_PAUSE": "0.05"}
