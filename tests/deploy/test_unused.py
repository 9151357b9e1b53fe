"""Whether a stack may be destroyed: heads that answer, that do not, that are older, and machines that are gone."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from skyinfra import client
from skyinfra.cli import destroy
from skyinfra.deploy import affected_nodes
from skyinfra.deploy.affected_nodes import Use
from skyinfra.errors import CredentialsRefused, FleetUnreachable, InvalidField, NodeError, SkyinfraError
from skyinfra.protocol.fleet import FleetState
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot
from skyinfra.submission.fleet import RunningTask
from skyinfra.submission.snapshot import Snapshot
from skyinfra.terraform.program import Plan
from skyinfra.terraform.state import Resource

AWS = 'provider["registry.terraform.io/hashicorp/aws"]'
NODES = (ManifestNode("gpu-0", "i-0", "10.0.0.1", head=True), ManifestNode("gpu-1", "i-1", "10.0.0.2"))
MACHINES = (
    Resource("gpu", "aws_instance", "head", AWS, {"id": "i-0", "instance_type": "g6.xlarge"}),
    Resource("gpu", "aws_instance", "worker", AWS, {"id": "i-1", "instance_type": "g6.xlarge"}, key="gpu-1"),
)
VPC = Resource("gpu", "aws_vpc", "this", AWS, {"id": "vpc-1"})


def manifest(**given: Any) -> Manifest:
    head = Endpoint("10.0.0.1", 8786)
    slots = (ManifestSlot(0, "gpu", "L4", None, 0),)
    return Manifest(1, "demo", "gpu", "aws", head, given.pop("nodes", NODES), slots, "0" * 64, **given)


class Stack:
    """A stack with one fleet on AWS, as its state has it."""

    name = "demo"

    def __init__(self, fleet: Manifest | None = None, **pool: Any) -> None:
        self.pools = ({"name": "gpu", "provider": "aws", **pool},)
        self._fleets = {} if fleet is None else {"gpu": fleet}

    def fleets(self) -> dict[str, Manifest]:
        return self._fleets

    def resources(self) -> tuple[Resource, ...]:
        return (*MACHINES, VPC)


def plan(*there: Resource, run: str | None = None) -> Plan:
    """The plan of a destroy, in which what the cloud has not found is missing."""
    return Plan(Path("plan"), changes=tuple(("delete", each.address) for each in there), run=run)


class Asked:
    """A fleet whose head answers."""

    def __init__(
        self, idle_s: float | None, answers: dict[str, Any], tasks: Any = (), jobs: Any = (), group: Any = ()
    ) -> None:
        self.manifest = manifest(nodes=NODES[:1], group_nodes=2) if group else manifest()
        self._slots = tuple(InstanceInfo(name, 0, f"{name}/0", "gpu", "demo/gpu") for name in group)
        # The head remembers a node of the group that was preempted long ago.
        self._state = FleetState(1, slots={"gpu-9": ("gpu-9/0",)}, idle_s=idle_s)
        self._answers, self._tasks, self._jobs = answers, tasks, jobs

    def look(self) -> Snapshot:
        return Snapshot(self._slots, (), self._state)

    def running(self) -> dict[str, list[RunningTask]]:
        return {"gpu-1/0": list(self._tasks)}

    def jobs(self) -> Any:
        return self._jobs

    def ask_all(self, nodes: list[str], question: str, **_: Any) -> dict[str, Any]:
        assert question == "use" and nodes == [*self._answers]
        return self._answers


def said(idle_s: float, keep_s: float = 0.0) -> dict[str, float]:
    return {"idle_s": idle_s, "keep_s": keep_s}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has heads answer as the given one does, or fail."""

    def answer(what: Asked | SkyinfraError) -> None:
        @contextmanager
        def opened(_: Manifest, **__: Any) -> Any:
            if isinstance(what, SkyinfraError):
                raise what
            yield what

        monkeypatch.setattr(client, "open_questions", opened)

    return answer


def used(stack: Stack, made: Plan | None = None) -> Use:
    (found,) = affected_nodes.uses(stack, made)  # type: ignore[arg-type]
    return found


def test_the_least_that_the_head_and_its_nodes_say_counts(answers: Any) -> None:
    answers(Asked(900.0, {"gpu-0": said(910.0), "gpu-1": said(2000.0)}))
    assert used(Stack(manifest())) == Use("demo/gpu", 900.0)
    # A shell on a worker, of which the head knows nothing (skypilot#6292).
    answers(Asked(900.0, {"gpu-0": said(910.0), "gpu-1": said(20.0)}))
    assert used(Stack(manifest())) == Use("demo/gpu", 20.0)


def test_the_nodes_of_a_group_that_are_there_are_asked(answers: Any) -> None:
    answers(Asked(900.0, {"gpu-0": said(910.0), "gpu-a": said(20.0)}, group=("gpu-a",)))
    assert used(Stack(manifest())) == Use("demo/gpu", 20.0)


def test_what_uses_it_is_said(answers: Any) -> None:
    tasks = [RunningTask(f"train-{n}", "train", 3.0) for n in range(5)]
    answers(Asked(0.0, {}, tasks=tasks))
    found = used(Stack(manifest()))
    assert found.idle_s == 0.0
    assert found.what == "task train on gpu-1/0, task train on gpu-1/0, task train on gpu-1/0 and 2 more"
    answers(Asked(0.0, {"gpu-0": said(0.0, 3600.0), "gpu-1": said(50.0)}))
    assert used(Stack(manifest())) == Use("demo/gpu", 0.0, kept_s=3600.0)


def test_nobody_knows_of_an_older_head_or_node(answers: Any) -> None:
    answers(Asked(None, {"gpu-0": said(910.0)}))
    found = used(Stack(manifest()))
    assert (found.idle_s, found.silent) == (None, False) and "skyinfra upgrade demo/gpu" in found.what
    answers(Asked(900.0, {"gpu-0": said(910.0), "gpu-1": NodeError("does not know this question")}))
    found = used(Stack(manifest()), plan(*MACHINES, VPC))
    assert (found.idle_s, found.what) == (None, "gpu-1: does not know this question")


def test_a_head_that_cannot_be_reached_is_not_idle(answers: Any) -> None:
    """dstack#2531."""
    answers(FleetUnreachable("the head does not answer"))
    for made in (None, plan(*MACHINES, VPC), plan(MACHINES[1], VPC), plan(VPC, run="https://app.terraform.io/run-1")):
        assert used(Stack(manifest()), made) == Use("demo/gpu", None, "the head does not answer", silent=True)
    answers(CredentialsRefused("another program listens there"))
    assert used(Stack(manifest()), plan(*MACHINES, VPC)).idle_s is None


def test_machines_that_are_gone_are_used_by_nobody(answers: Any) -> None:
    answers(FleetUnreachable("the head does not answer"))
    assert used(Stack(manifest()), plan(VPC)).idle_s == math.inf
    # Its address belongs to somebody else now.
    answers(CredentialsRefused("the head has another fleet secret"))
    assert used(Stack(manifest()), plan(VPC)).idle_s == math.inf
    # A worker that has ended, whose head serves on.
    answers(Asked(900.0, {"gpu-0": said(910.0), "gpu-1": NodeError("does not answer")}))
    assert used(Stack(manifest()), plan(MACHINES[0], VPC)).idle_s == 900.0
    assert used(Stack(manifest()), None).silent


def test_machines_that_have_stopped_are_used_by_nobody(answers: Any) -> None:
    """A destroy finds those, and ends their disks."""
    answers(FleetUnreachable("the head does not answer"))
    made, addresses = plan(*MACHINES, VPC), [each.address for each in MACHINES]
    assert used(Stack(manifest()), replace(made, stopped=frozenset(addresses[1:]))).idle_s is None
    assert used(Stack(manifest()), replace(made, stopped=frozenset(addresses))).idle_s == math.inf


class OnGoogle(Stack):
    """Machines whose id in the manifest is another attribute than the id of their resource."""

    def resources(self) -> tuple[Resource, ...]:
        google, kind = 'provider["registry.terraform.io/hashicorp/google"]', "google_compute_instance"
        ids = {node.name: {"id": f"projects/p/zones/z/instances/{node.name}", "instance_id": node.id} for node in NODES}
        machine = {"machine_type": "g2-standard-8", "zone": "z"}
        return tuple(
            Resource("gpu", kind, "node", google, {**each, **machine}, key=name, inside="module.google")
            for name, each in ids.items()
        )


def test_machines_of_google_cloud_are_found_by_their_other_id(answers: Any) -> None:
    answers(FleetUnreachable("the head does not answer"))
    stack = OnGoogle(manifest())
    made = plan(*stack.resources())
    assert used(stack, made).idle_s is None
    stopped = frozenset(each.address for each in stack.resources())
    assert used(stack, replace(made, stopped=stopped)).idle_s == math.inf
    assert used(stack, plan()).idle_s == math.inf


def test_the_nodes_of_a_group_are_gone_where_they_end_themselves(answers: Any) -> None:
    """The state does not have them: without an end that is declared, nobody knows."""
    answers(FleetUnreachable("the head does not answer"))
    group = manifest(nodes=NODES[:1], group_nodes=2)
    assert used(Stack(group), plan(MACHINES[1], VPC)).idle_s is None
    assert used(Stack(group, stop_after_idle="30m"), plan(MACHINES[1], VPC)).idle_s == math.inf


def test_a_pool_without_a_head_is_not_idle() -> None:
    found = used(Stack())
    assert found.idle_s is None and "partly deployed" in found.what


def check(*found: Use, made: Plan | None = None) -> int | None:
    """The exit code of the command; None where it goes on."""
    patch = pytest.MonkeyPatch()
    patch.setattr(destroy, "uses", lambda *_: list(found))
    try:
        destroy._Unused(Stack(), 1800.0).check(made)  # type: ignore[arg-type]
    except typer.Exit as ended:
        return ended.exit_code
    finally:
        patch.undo()
    return None


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    idle, busy = Use("demo/a", 1800.0), Use("demo/b", 5.0, "job nightly, running")
    silent, older = Use("demo/c", None, "no answer", silent=True), Use("demo/d", None, "older")
    assert check(idle) is None and check() is None and check(Use("demo/a", math.inf)) is None
    assert capsys.readouterr() == ("", "")
    assert check(idle, busy) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("demo: not destroyed\n", "demo/b: in use: job nightly, running\n")
    # Before the plan, a head that does not answer decides nothing.
    assert check(idle, silent) is None
    assert check(idle, silent, made=plan()) == 1
    assert "demo/c: nobody knows whether it is used: no answer" in capsys.readouterr().err
    assert check(older) == 1
    # That it is used is known whatever the others say.
    assert check(busy, older) == 0
    assert check(Use("demo/b", 125.0)) == 0
    assert "demo/b: was used 2m ago" in capsys.readouterr().err
    assert check(Use("demo/b", 0.0, kept_s=7200.0)) == 0
    assert "demo/b: kept from being idle for 2h (`skyinfra keep`)" in capsys.readouterr().err


IDLE, USED = Use("demo/gpu", 1800.0), Use("demo/gpu", 5.0)
SILENT = Use("demo/gpu", None, "no answer", silent=True)


@pytest.mark.parametrize(
    "answers",
    [
        [IDLE, IDLE, IDLE],
        # Used while Terraform planned, while jobs were copied, and both.
        [IDLE, USED, IDLE, IDLE, IDLE],
        [IDLE, IDLE, USED, IDLE, IDLE, IDLE],
        [IDLE, USED, USED, IDLE, IDLE, USED, IDLE, IDLE, IDLE],
        # Before the plan that decides nothing.
        [SILENT, SILENT, SILENT, IDLE, IDLE],
    ],
)
def test_who_waits_goes_on_until_it_is_destroyed(
    answers: list[Use], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left, done, slept = list(answers), list[str](), list[float]()

    def carry_out(_: Any, *, approve: Any, before: Any, **__: Any) -> Plan:
        made = plan(*MACHINES)
        assert approve(made)
        before(made)
        done.append("destroyed")
        return made

    stack = SimpleNamespace(name="demo", folder=tmp_path)
    project = SimpleNamespace(blocks=list, app=None, folder=tmp_path, base_of=lambda _: tmp_path)
    monkeypatch.setattr(destroy, "Project", SimpleNamespace(find=lambda: project))
    monkeypatch.setattr(destroy, "stack_to_destroy", lambda *_: stack)
    monkeypatch.setattr(destroy, "uses", lambda *_: [left.pop(0)])
    monkeypatch.setattr(destroy, "Approval", lambda *_: lambda _: True)
    monkeypatch.setattr(destroy, "carry_out", carry_out)
    monkeypatch.setattr(destroy.time, "sleep", slept.append)
    for name in ("keep_jobs", "forget", "stray_lines", "kept_lines"):
        monkeypatch.setattr(destroy, name, lambda *_, **__: ())
    monkeypatch.setattr(destroy.hosts, "forget_hosts", lambda *_: None)
    destroy.destroy("demo", auto_approve=True, gone=False, when_idle="30m", wait=True)
    assert done == ["destroyed"] and left == []
    assert len(slept) == sum(each is USED for each in answers) + (answers[0] is SILENT)
    assert capsys.readouterr().out == "demo: destroyed\n"


@pytest.mark.parametrize("given", ["30", "0m", "soon", "-5m", "30 m"])
def test_a_time_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(InvalidField, match="--when-idle"):
        destroy._limit(given, wait=False, auto_approve=True)


def test_it_waits_where_nobody_is_to_be_asked() -> None:
    assert destroy._limit("30m", wait=True, auto_approve=True) == 1800.0
    assert destroy._limit(None, wait=False, auto_approve=False) is None
    for when_idle, auto_approve in ((None, True), ("30m", False)):
        with pytest.raises(InvalidField, match="--wait"):
            destroy._limit(when_idle, wait=True, auto_approve=auto_approve)
