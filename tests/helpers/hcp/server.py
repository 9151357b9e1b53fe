"""HCP Terraform on this machine: as much of its API as Terraform's cloud backend uses, with runs that really run.

One organization; its workspaces are made when they are first used. In the execution mode ``local`` it keeps states; in
``remote`` it takes the uploaded folder and runs Terraform there itself. What the requests are is described at
https://developer.hashicorp.com/terraform/cloud-docs/api-docs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import ssl
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hcp.api import Answer, Route, errors, listed, one
from hcp.runs import Run, Runs

ORGANIZATION = "fleet-company"
TOKEN = "token-of-a-person"


@dataclass
class Workspace:
    """A workspace. states: its state versions, the last one is current. version: of the Terraform that it is for."""

    id: str
    name: str
    mode: str
    version: str = "1.0.0"
    states: list[bytes] = field(default_factory=list)
    locked: bool = False


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has read enough hangs up; anything else is an error of the tests."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Hcp:
    """The server. mode: the execution mode of workspaces that it makes. environment: of the Terraform that it runs."""

    def __init__(self, folder: Path, program: str, *, mode: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.program = program
        self.mode = mode
        self.environment = {**os.environ, **(environment or {})}
        self.workspaces: dict[str, Workspace] = {}
        self._ids = itertools.count(1)
        self._runs = Runs(self)
        pem, key = certificate(folder)
        self._server = _Server(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.hostname = f"localhost:{self._server.server_port}"
        self.authority = pem
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def runs(self) -> dict[str, Run]:
        """The runs that it has carried out, by their ids."""
        return self._runs.runs

    def wait(self) -> None:
        """Until all runs that were begun have ended."""
        self._runs.wait()

    def close(self) -> None:
        self.wait()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def client_environment(self, configuration: str = "") -> dict[str, str]:
        """The variables with which a Terraform finds this server, and is let in. configuration: of its own, besides."""
        file = self.folder / "terraformrc"
        file.write_text(f'credentials "{self.hostname}" {{\n  token = "{TOKEN}"\n}}\n{configuration}')
        return {"TF_CLI_CONFIG_FILE": str(file), "SSL_CERT_FILE": str(self.authority)}

    def state(self, workspace: str) -> dict[str, Any]:
        """The current state of a workspace."""
        found: dict[str, Any] = json.loads(self.workspaces[workspace].states[-1])
        return found

    # Requests -----------------------------------------------------------------------------------------------------

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                code, text = answer(self.command, self.path, body, self.headers.get("Authorization") or "")
                self.send_response(code)
                self.send_header(
                    "Content-Type",
                    "application/json" if self.path.startswith("/.well-known") else "application/vnd.api+json",
                )
                self.send_header("TFP-API-Version", "2.6")
                self.send_header("TFP-AppName", "HCP Terraform")
                self.send_header("Content-Length", str(len(text)))
                # One request for each connection: none is left open when the server ends.
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(text)
                self.close_connection = True

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _do  # noqa: N815 - as http.server names them

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _answer(self, method: str, path: str, body: bytes, authorization: str) -> Answer:
        path, _, query = path.partition("?")
        if path == "/.well-known/terraform.json":
            return 200, json.dumps({"tfe.v2": "/api/v2/", "state.v2": "/api/v2/"}).encode()
        path = path.removeprefix("/api/v2")
        for pattern, wanted, open_to_all, act in self._routes():
            found = re.fullmatch(pattern, path)
            if found and method == wanted:
                if not open_to_all and authorization != f"Bearer {TOKEN}":
                    return 401, errors(401, "unauthorized")
                return act(*found.groups(), body=body, query=query)
        return 404, errors(404, "not found")

    def _routes(self) -> list[Route]:
        named, own = rf"/organizations/{ORGANIZATION}/workspaces/([\w-]+)", r"/workspaces/([\w-]+)"
        return [
            ("/ping", "GET", False, lambda **_: (204, b"")),
            (f"/organizations/{ORGANIZATION}/entitlement-set", "GET", False, self._entitlements),
            (named, "GET", False, self._workspace_named),
            (f"/organizations/{ORGANIZATION}/workspaces", "POST", False, self._make_workspace),
            (own, "GET", False, lambda id, **_: (200, self.describe(self.workspace(id)))),
            (own, "PATCH", False, self._set_version),
            (f"{own}/(?:all-)?vars", "GET", False, lambda id, **_: (200, listed([]))),
            (f"{own}/(?:effective-)?tag-bindings", "GET", False, lambda id, **_: (200, listed([]))),
            (f"{own}/actions/(lock|unlock)", "POST", False, self._lock),
            (f"{own}/current-state-version", "GET", False, self._current_state),
            (f"{own}/current-state-version-outputs", "GET", False, self._outputs),
            (r"/state-version-outputs/([\w-]+)-(\d+)-(\w+)", "GET", False, self._output),
            (f"{own}/state-versions", "POST", False, self._make_state),
            (r"/state-versions/([\w-]+)-(\d+)", "GET", False, lambda id, at, **_: (200, self._state(id, int(at)))),
            # What is behind an address that was given out is let in by the address alone.
            (r"/blobs/([\w-]+)-(\d+)", "GET", True, lambda id, at, **_: (200, self.workspace(id).states[int(at)])),
            (r"/blobs/([\w-]+)-(\d+)", "PUT", True, self._keep_state),
            ("/unread", "PUT", True, lambda **_: (200, b"")),
            *self._runs.routes(),
        ]

    def workspace(self, id: str) -> Workspace:
        """The workspace of that id."""
        return next(each for each in self.workspaces.values() if each.id == id)

    def number(self) -> int:
        """Another one each time, for an id."""
        return next(self._ids)

    def address(self, path: str) -> str:
        """The address of *path* of the API."""
        return f"https://{self.hostname}/api/v2{path}"

    def _entitlements(self, **_: Any) -> Answer:
        attributes = {"operations": True, "state-storage": True, "private-module-registry": True}
        return 200, one("entitlement-sets", "org-1", attributes)

    def _workspace_named(self, name: str, **_: Any) -> Answer:
        found = self.workspaces.get(name)
        return (200, self.describe(found)) if found else (404, errors(404, "not found"))

    def _make_workspace(self, *, body: bytes, **_: Any) -> Answer:
        name = json.loads(body)["data"]["attributes"]["name"]
        self.workspaces[name] = Workspace(f"ws-{self.number()}", name, self.mode)
        return 201, self.describe(self.workspaces[name])

    def _set_version(self, id: str, *, body: bytes, **_: Any) -> Answer:
        """What Terraform asks for after it had a workspace made: its own version."""
        self.workspace(id).version = json.loads(body)["data"]["attributes"]["terraform-version"]
        return 200, self.describe(self.workspace(id))

    def describe(self, workspace: Workspace) -> bytes:
        """A workspace, as the API shows it."""
        may = ("can-update", "can-queue-run", "can-queue-apply", "can-queue-destroy", "can-lock", "can-unlock")
        attributes = {
            "name": workspace.name,
            "execution-mode": workspace.mode,
            "operations": workspace.mode == "remote",
            "terraform-version": workspace.version,
            "locked": workspace.locked,
            "structured-run-output-enabled": True,
            "permissions": dict.fromkeys(may, True),
        }
        organization = {"data": {"id": ORGANIZATION, "type": "organizations"}}
        return one("workspaces", workspace.id, attributes, {"organization": organization})

    # States -------------------------------------------------------------------------------------------------------

    def _lock(self, id: str, wanted: str, **_: Any) -> Answer:
        workspace = self.workspace(id)
        if workspace.locked == (wanted == "lock"):
            return 409, errors(409, f"workspace already {wanted}ed")
        workspace.locked = wanted == "lock"
        return 200, self.describe(workspace)

    def _current_state(self, id: str, **_: Any) -> Answer:
        states = self.workspace(id).states
        return (200, self._state(id, len(states) - 1)) if states else (404, errors(404, "not found"))

    def _state(self, id: str, at: int) -> bytes:
        blob = self.address(f"/blobs/{id}-{at}")
        attributes = {
            "serial": at,
            "status": "finalized" if self.workspace(id).states[at] else "pending",
            "hosted-state-download-url": blob,
            "hosted-state-upload-url": blob,
            "hosted-json-state-upload-url": self.address("/unread"),
            "resources-processed": True,
        }
        return one("state-versions", f"{id}-{at}", attributes)

    def _make_state(self, id: str, *, body: bytes, **_: Any) -> Answer:
        """A state version without its content, which comes next."""
        assert self.workspace(id).locked and "state" not in json.loads(body)["data"]["attributes"]
        self.workspace(id).states.append(b"")
        return 201, self._state(id, len(self.workspace(id).states) - 1)

    def _keep_state(self, id: str, at: str, *, body: bytes, **_: Any) -> Answer:
        self.workspace(id).states[int(at)] = body
        return 200, b""

    def _outputs(self, id: str, **_: Any) -> Answer:
        """All of them; the value of one that is sensitive only by its own address, as HCP Terraform does it."""
        states = self.workspace(id).states
        if not states:
            return 404, errors(404, "not found")
        at = len(states) - 1
        found = json.loads(states[at])["outputs"]
        return 200, listed([self._described(id, at, name, found[name], all=False) for name in sorted(found)])

    def _output(self, id: str, at: str, name: str, **_: Any) -> Answer:
        value = json.loads(self.workspace(id).states[int(at)])["outputs"][name]
        return 200, json.dumps({"data": self._described(id, int(at), name, value, all=True)}).encode()

    def _described(self, id: str, at: int, name: str, output: dict[str, Any], *, all: bool) -> dict[str, Any]:
        hidden = output.get("sensitive", False)
        attributes = {
            "name": name,
            "sensitive": hidden,
            "type": "string" if output["type"] == "string" else "array",
            "detailed-type": output["type"],
            "value": output["value"] if all or not hidden else None,
        }
        return {"id": f"{id}-{at}-{name}", "type": "state-version-outputs", "attributes": attributes}


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this machine's name that stands for itself, and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    begin, end, number = now - timedelta(hours=1), now + timedelta(days=1), x509.random_serial_number()
    made = x509.CertificateBuilder(name, name, key.public_key(), number, begin, end)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "server.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    (folder / "server.key").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return folder / "server.pem", folder / "server.key"
