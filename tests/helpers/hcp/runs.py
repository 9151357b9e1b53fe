"""Runs of HCP Terraform that really run: the uploaded folder, and a Terraform of this machine."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import unpack

from hcp.api import Answer, Route, listed, one

if TYPE_CHECKING:
    from hcp.server import Hcp, Workspace

# What a run's log begins with, before the lines of Terraform itself; the client leaves it out of an apply's.
_PREAMBLE = "Terraform v1.0.0\non linux_amd64\nInitializing plugins and modules...\n"


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


class Runs:
    """The runs of a *server*, by their ids, and what it answers about them."""

    def __init__(self, server: Hcp) -> None:
        self.runs: dict[str, Run] = {}
        self.uploads: dict[str, bytes | None] = {}
        self._server = server
        self._threads: list[threading.Thread] = []

    def wait(self) -> None:
        """Until all that were begun have ended."""
        for thread in self._threads:
            thread.join()

    def routes(self) -> list[Route]:
        """What is asked about runs."""
        return [
            (r"/workspaces/([\w-]+)/configuration-versions", "POST", False, self._make_configuration),
            (r"/configuration-versions/([\w-]+)", "GET", False, lambda id, **_: (200, self._configuration(id))),
            (r"/uploads/([\w-]+)", "PUT", True, self._upload),
            ("/runs", "POST", False, self._make_run),
            (r"/runs/([\w-]+)", "GET", False, lambda id, **_: (200, self._run(self.runs[id]))),
            (r"/runs/([\w-]+)/run-events", "GET", False, lambda id, **_: (200, listed([]))),
            (r"/runs/([\w-]+)/actions/apply", "POST", False, self._apply),
            (r"/plans/plan-([\w-]+)", "GET", False, lambda id, **_: (200, self._phase(self.runs[id], "plan"))),
            (r"/plans/plan-([\w-]+)/json-output-redacted", "GET", False, lambda id, **_: (200, self.runs[id].redacted)),
            (r"/applies/apply-([\w-]+)", "GET", False, lambda id, **_: (200, self._phase(self.runs[id], "apply"))),
            (r"/logs/(plan|apply)/([\w-]+)", "GET", True, self._log),
        ]

    def _make_configuration(self, _id: str, **_: Any) -> Answer:
        name = f"cv-{self._server.number()}"
        self.uploads[name] = None
        return 201, self._configuration(name)

    def _configuration(self, id: str) -> bytes:
        status = "pending" if self.uploads[id] is None else "uploaded"
        attributes = {"status": status, "upload-url": self._server.address(f"/uploads/{id}")}
        return one("configuration-versions", id, attributes)

    def _upload(self, id: str, *, body: bytes, **_: Any) -> Answer:
        self.uploads[id] = body
        return 200, b""

    def _make_run(self, *, body: bytes, **_: Any) -> Answer:
        data = json.loads(body)["data"]
        uploaded = self.uploads[data["relationships"]["configuration-version"]["data"]["id"]]
        workspace = self._server.workspace(data["relationships"]["workspace"]["data"]["id"])
        assert uploaded is not None and workspace.mode == "remote"
        attributes = data["attributes"]
        name = f"run-{self._server.number()}"
        folder = self._server.folder / name
        unpack(uploaded, folder)
        saved = bool(attributes.get("save-plan"))
        replace = attributes.get("replace-addrs") or []
        run = Run(name, workspace, folder, bool(attributes.get("is-destroy")), replace, saved)
        self.runs[name] = run
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
            [self._server.program, *arguments],
            cwd=run.folder,
            env=self._server.environment,
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
            [self._server.program, *arguments],
            cwd=run.folder,
            env=self._server.environment,
            capture_output=True,
            check=True,
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
        workspace = json.loads(self._server.describe(run.workspace))["data"]
        plan = json.loads(self._phase(run, "plan"))["data"]
        relationships = {
            "workspace": {"data": {"id": run.workspace.id, "type": "workspaces"}},
            "plan": {"data": {"id": f"plan-{run.id}", "type": "plans"}},
            "apply": {"data": {"id": f"apply-{run.id}", "type": "applies"}},
        }
        return one("runs", run.id, attributes, relationships, included=[workspace, plan])

    def _phase(self, run: Run, phase: str) -> bytes:
        over = run.logs[phase].endswith(b"\3")
        failed = over and run.status == "errored"
        attributes = {
            "status": "errored" if failed else "finished" if over else "running",
            "has-changes": run.changes,
            "log-read-url": self._server.address(f"/logs/{phase}/{run.id}"),
        }
        return one("plans" if phase == "plan" else "applies", f"{phase}-{run.id}", attributes)

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
