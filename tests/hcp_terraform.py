"""HCP Terraform on this machine: as much of its API as Terraform's cloud backend uses, with runs that really run.

One organization; its workspaces are made when they are first used. In the execution mode ``local`` it keeps states; in
``remote`` it takes the uploaded folder and runs Terraform there itself. What the requests are is described at
https://developer.hashicorp.com/terraform/cloud-docs/api-docs.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ORGANIZATION = "fleet-company"
TOKEN = "token-of-a-person"
# What a run's log begins with, before the lines of Terraform itself; the client leaves it out of an apply's.
_PREAMBLE = "Terraform v1.11.4\non linux_amd64\nInitializing plugins and modules...\n"

Answer = tuple[int, bytes]


@dataclass
class Workspace:
    """A workspace. states: its state versions, the last one is current. lock: who holds it."""

    id: str
    name: str
    mode: str
    version: str = "1.11.4"
    states: list[bytes] = field(default_factory=list)
    locked: bool = False
    runs: list[Run] = field(default_factory=list)


@dataclass
class Run:
    """A run in the execution mode ``remote``: a plan, and its apply once that is asked for."""

    id: str
    workspace: Workspace
    folder: Path
    destroy: bool
    replace: list[str]
    saved: bool
    status: str = "planning"
    changes: bool = False
    logs: dict[str, bytearray] = field(default_factory=lambda: {"plan": bytearray(b"\2"), "apply": bytearray(b"\2")})
    redacted: bytes = b"{}"


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
        self.runs: dict[str, Run] = {}
        self.uploads: dict[str, bytes | None] = {}
        self.requests: list[str] = []
        self._ids = itertools.count(1)
        self._threads: list[threading.Thread] = []
        certificate, key = _certificate(folder)
        self._server = _Server(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.hostname = f"localhost:{self._server.server_port}"
        self.authority = certificate
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def wait(self) -> None:
        """Until all runs that were begun have ended."""
        for thread in self._threads:
            thread.join()

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
        self.requests.append(f"{method} {path}")
        path = path.removeprefix("/api/v2")
        for pattern, wanted, open_to_all, act in self._routes():
            found = re.fullmatch(pattern, path)
            if found and method == wanted:
                if not open_to_all and authorization != f"Bearer {TOKEN}":
                    return 401, _errors(401, "unauthorized")
                return act(*found.groups(), body=body, query=query)
        return 404, _errors(404, "not found")

    def _routes(self) -> list[tuple[str, str, bool, Callable[..., Answer]]]:
        named, one = rf"/organizations/{ORGANIZATION}/workspaces/([\w-]+)", r"/workspaces/([\w-]+)"
        return [
            ("/ping", "GET", False, lambda **_: (204, b"")),
            (f"/organizations/{ORGANIZATION}/entitlement-set", "GET", False, self._entitlements),
            (named, "GET", False, self._workspace_named),
            (f"/organizations/{ORGANIZATION}/workspaces", "POST", False, self._make_workspace),
            (one, "GET", False, lambda id, **_: (200, self._workspace(self._of(id)))),
            (one, "PATCH", False, lambda id, **_: (200, self._workspace(self._of(id)))),
            (f"{one}/(?:all-)?vars", "GET", False, lambda id, **_: (200, _list([]))),
            (f"{one}/tag-bindings", "GET", False, lambda id, **_: (200, _list([]))),
            (f"{one}/(?:effective-)?tag-bindings", "GET", False, lambda id, **_: (200, _list([]))),
            (f"{one}/actions/(lock|unlock)", "POST", False, self._lock),
            (f"{one}/current-state-version", "GET", False, self._current_state),
            (f"{one}/current-state-version-outputs", "GET", False, self._outputs),
            (r"/state-version-outputs/([\w-]+)-(\d+)-(\w+)", "GET", False, self._output),
            (f"{one}/state-versions", "POST", False, self._make_state),
            (r"/state-versions/([\w-]+)-(\d+)", "GET", False, lambda id, at, **_: (200, self._state(id, int(at)))),
            # What is behind an address that was given out is let in by the address alone.
            (r"/blobs/([\w-]+)-(\d+)", "GET", True, lambda id, at, **_: (200, self._of(id).states[int(at)])),
            (r"/blobs/([\w-]+)-(\d+)", "PUT", True, self._keep_state),
            ("/unread", "PUT", True, lambda **_: (200, b"")),
            (f"{one}/configuration-versions", "POST", False, self._make_configuration),
            (r"/configuration-versions/([\w-]+)", "GET", False, lambda id, **_: (200, self._configuration(id))),
            (r"/uploads/([\w-]+)", "PUT", True, self._upload),
            ("/runs", "POST", False, self._make_run),
            (r"/runs/([\w-]+)", "GET", False, lambda id, **_: (200, self._run(self.runs[id]))),
            (r"/runs/([\w-]+)/run-events", "GET", False, lambda id, **_: (200, _list([]))),
            (r"/runs/([\w-]+)/actions/apply", "POST", False, self._apply),
            (r"/plans/plan-([\w-]+)", "GET", False, lambda id, **_: (200, self._phase(self.runs[id], "plan"))),
            (r"/plans/plan-([\w-]+)/json-output-redacted", "GET", False, lambda id, **_: (200, self.runs[id].redacted)),
            (r"/applies/apply-([\w-]+)", "GET", False, lambda id, **_: (200, self._phase(self.runs[id], "apply"))),
            (r"/logs/(plan|apply)/([\w-]+)", "GET", True, self._log),
        ]

    def _of(self, id: str) -> Workspace:
        return next(each for each in self.workspaces.values() if each.id == id)

    def _address(self, path: str) -> str:
        return f"https://{self.hostname}/api/v2{path}"

    def _entitlements(self, **_: Any) -> Answer:
        attributes = {"operations": True, "state-storage": True, "private-module-registry": True}
        return 200, _one("entitlement-sets", "org-1", attributes)

    def _workspace_named(self, name: str, **_: Any) -> Answer:
        found = self.workspaces.get(name)
        return (200, self._workspace(found)) if found else (404, _errors(404, "not found"))

    def _make_workspace(self, *, body: bytes, **_: Any) -> Answer:
        name = json.loads(body)["data"]["attributes"]["name"]
        self.workspaces[name] = Workspace(f"ws-{next(self._ids)}", name, self.mode)
        return 201, self._workspace(self.workspaces[name])

    def _workspace(self, workspace: Workspace) -> bytes:
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
        return _one("workspaces", workspace.id, attributes, {"organization": organization})

    # States -------------------------------------------------------------------------------------------------------

    def _lock(self, id: str, wanted: str, **_: Any) -> Answer:
        workspace = self._of(id)
        if workspace.locked == (wanted == "lock"):
            return 409, _errors(409, f"workspace already {wanted}ed")
        workspace.locked = wanted == "lock"
        return 200, self._workspace(workspace)

    def _current_state(self, id: str, **_: Any) -> Answer:
        states = self._of(id).states
        return (200, self._state(id, len(states) - 1)) if states else (404, _errors(404, "not found"))

    def _state(self, id: str, at: int) -> bytes:
        blob = self._address(f"/blobs/{id}-{at}")
        attributes = {
            "serial": at,
            "status": "finalized" if self._of(id).states[at] else "pending",
            "hosted-state-download-url": blob,
            "hosted-state-upload-url": blob,
            "hosted-json-state-upload-url": self._address("/unread"),
            "resources-processed": True,
        }
        return _one("state-versions", f"{id}-{at}", attributes)

    def _make_state(self, id: str, *, body: bytes, **_: Any) -> Answer:
        """A state version without its content, which comes next."""
        assert self._of(id).locked and "state" not in json.loads(body)["data"]["attributes"]
        self._of(id).states.append(b"")
        return 201, self._state(id, len(self._of(id).states) - 1)

    def _keep_state(self, id: str, at: str, *, body: bytes, **_: Any) -> Answer:
        self._of(id).states[int(at)] = body
        return 200, b""

    def _outputs(self, id: str, **_: Any) -> Answer:
        """All of them; the value of one that is sensitive only by its own address, as HCP Terraform does it."""
        states = self._of(id).states
        if not states:
            return 404, _errors(404, "not found")
        at = len(states) - 1
        found = json.loads(states[at])["outputs"]
        return 200, _list([self._described(id, at, name, found[name], all=False) for name in sorted(found)])

    def _output(self, id: str, at: str, name: str, **_: Any) -> Answer:
        value = json.loads(self._of(id).states[int(at)])["outputs"][name]
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

    # Runs ---------------------------------------------------------------------------------------------------------

    def _make_configuration(self, id: str, **_: Any) -> Answer:
        name = f"cv-{next(self._ids)}"
        self.uploads[name] = None
        return 201, self._configuration(name)

    def _configuration(self, id: str) -> bytes:
        status = "pending" if self.uploads[id] is None else "uploaded"
        attributes = {"status": status, "upload-url": self._address(f"/uploads/{id}")}
        return _one("configuration-versions", id, attributes)

    def _upload(self, id: str, *, body: bytes, **_: Any) -> Answer:
        self.uploads[id] = body
        return 200, b""

    def _make_run(self, *, body: bytes, **_: Any) -> Answer:
        data = json.loads(body)["data"]
        uploaded = self.uploads[data["relationships"]["configuration-version"]["data"]["id"]]
        workspace = self._of(data["relationships"]["workspace"]["data"]["id"])
        assert uploaded is not None and workspace.mode == "remote"
        attributes = data["attributes"]
        name = f"run-{next(self._ids)}"
        folder = self.folder / name
        with tarfile.open(fileobj=io.BytesIO(uploaded)) as archive:
            archive.extractall(folder, filter="tar")
        saved = bool(attributes.get("save-plan"))
        replace = attributes.get("replace-addrs") or []
        run = Run(name, workspace, folder, bool(attributes.get("is-destroy")), replace, saved)
        self.runs[name] = run
        workspace.runs.append(run)
        self._begin(self._plan, run)
        return 201, self._run(run)

    def _apply(self, id: str, **_: Any) -> Answer:
        run = self.runs[id]
        assert run.status in ("planned", "planned_and_saved") and run.changes
        run.status = "applying"
        self._begin(self._carry_out, run)
        return 202, b""

    def _begin(self, act: Callable[[Run], None], run: Run) -> None:
        self._threads.append(threading.Thread(target=act, args=(run,)))
        self._threads[-1].start()

    def _plan(self, run: Run) -> None:
        _without_backend(run.folder)
        if run.workspace.states:
            (run.folder / "terraform.tfstate").write_bytes(run.workspace.states[-1])
        self._terraform(run, None, "init", "-input=false", "-no-color")
        options = [*(["-destroy"] if run.destroy else []), *(f"-replace={each}" for each in run.replace)]
        run.logs["plan"] += _PREAMBLE.encode()
        code = self._terraform(
            run, "plan", "plan", "-input=false", "-json", "-detailed-exitcode", "-out=.plan", *options
        )
        run.changes = code == 2
        if code != 1:
            shown = json.loads(self._printed(run, "show", "-json", ".plan"))
            schemas = json.loads(self._printed(run, "providers", "schema", "-json"))
            known = ("output_changes", "resource_changes", "resource_drift", "relevant_attributes")
            run.redacted = json.dumps(
                {
                    "plan_format_version": shown["format_version"],
                    "provider_format_version": schemas["format_version"],
                    "provider_schemas": schemas.get("provider_schemas", {}),
                    **{each: shown[each] for each in known if each in shown},
                }
            ).encode()
        done = "planned_and_saved" if run.saved else "planned"
        run.status = "errored" if code == 1 else done if run.changes else "planned_and_finished"
        run.logs["plan"] += b"\3"

    def _carry_out(self, run: Run) -> None:
        run.logs["apply"] += _PREAMBLE.encode()
        code = self._terraform(run, "apply", "apply", "-input=false", "-json", ".plan")
        run.workspace.states.append((run.folder / "terraform.tfstate").read_bytes())
        run.status = "errored" if code else "applied"
        run.logs["apply"] += b"\3"

    def _terraform(self, run: Run, phase: str | None, *arguments: str) -> int:
        """One command, whose lines go to the log of *phase* as they come."""
        with subprocess.Popen(
            [self.program, *arguments],
            cwd=run.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if phase is not None:
                    run.logs[phase] += line
        return process.returncode

    def _printed(self, run: Run, *arguments: str) -> bytes:
        return subprocess.run(
            [self.program, *arguments], cwd=run.folder, env=self.environment, capture_output=True, check=True
        ).stdout

    def _run(self, run: Run) -> bytes:
        attributes = {
            "status": run.status,
            "has-changes": run.changes,
            "is-destroy": run.destroy,
            "save-plan": run.saved,
            "actions": {"is-confirmable": run.status in ("planned", "planned_and_saved")},
            "permissions": {"can-apply": True},
        }
        workspace = json.loads(self._workspace(run.workspace))["data"]
        plan = json.loads(self._phase(run, "plan"))["data"]
        relationships = {
            "workspace": {"data": {"id": run.workspace.id, "type": "workspaces"}},
            "plan": {"data": {"id": f"plan-{run.id}", "type": "plans"}},
            "apply": {"data": {"id": f"apply-{run.id}", "type": "applies"}},
        }
        return _one("runs", run.id, attributes, relationships, included=[workspace, plan])

    def _phase(self, run: Run, phase: str) -> bytes:
        over = run.logs[phase].endswith(b"\3")
        failed = over and run.status == "errored"
        attributes = {
            "status": "errored" if failed else "finished" if over else "running",
            "has-changes": run.changes,
            "log-read-url": self._address(f"/logs/{phase}/{run.id}"),
        }
        return _one("plans" if phase == "plan" else "applies", f"{phase}-{run.id}", attributes)

    def _log(self, phase: str, id: str, *, query: str, **_: Any) -> Answer:
        asked = dict(each.split("=") for each in query.split("&"))
        begin = int(asked["offset"])
        return 200, bytes(self.runs[id].logs[phase][begin : begin + int(asked["limit"])])


def _without_backend(folder: Path) -> None:
    """Runs keep their state where the server puts it, whatever the uploaded folder says."""
    for file in folder.glob("*.tf.json"):
        declared = json.loads(file.read_text())
        declared.get("terraform", {}).pop("cloud", None)
        file.write_text(json.dumps(declared))


def _one(
    kind: str,
    id: str,
    attributes: Mapping[str, Any],
    relationships: Mapping[str, Any] | None = None,
    included: list[Any] | None = None,
) -> bytes:
    data = {"id": id, "type": kind, "attributes": attributes, "relationships": relationships or {}}
    return json.dumps({"data": data, **({"included": included} if included else {})}).encode()


def _list(items: list[Any]) -> bytes:
    page = {"current-page": 1, "total-pages": 1, "total-count": len(items), "page-size": 100}
    return json.dumps({"data": items, "meta": {"pagination": page}}).encode()


def _errors(code: int, title: str) -> bytes:
    return json.dumps({"errors": [{"status": str(code), "title": title}]}).encode()


def _certificate(folder: Path) -> tuple[Path, Path]:
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
