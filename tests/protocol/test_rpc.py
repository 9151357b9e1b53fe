"""The one envelope of remote calls: what is declared, asked, answered and refused."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_fleets.local_peer import LocalPeer

import skyinfra as sky
from skyinfra import errors
from skyinfra.head.scheduler import FleetScheduler
from skyinfra.mig import Placement
from skyinfra.protocol import rpc, services
from skyinfra.protocol.fleet import FleetLayout
from skyinfra.protocol.jobs import JobInfo, Submission, Written, WrittenFile
from skyinfra.protocol.rpc import Call

PACKAGE = Path(rpc.__file__).parents[1]
CALLS = {name: value for name, value in vars(services).items() if isinstance(value, Call)}

LAYOUT = FleetLayout(1, "h100_80gb", ((Placement("3g.40gb", 0, 4),), ()))
JOB = JobInfo("train", "0" * 32, "train", "function", "me@host", 1, "queued", 1.5)
HEADER = '{"key": "k", "name": "n", "topic": ""}'
SUBMISSION = Submission(1, "0" * 32, "train", "train", "function", "me@host", 1, HEADER, 3, {"slot": 1})


def ask(call: Call[..., Any], handler: Callable[..., Any], **request: Any) -> Any:
    """The answer of *handler*, as it comes through the wire."""
    return asyncio.run(call(LocalPeer(dict([call.by(handler)])), **request))


def test_documents_and_bytes_arrive_as_they_were() -> None:
    seen: list[Any] = []

    async def layout(seen: str | None = None, wait_s: float = 0.0) -> FleetLayout:
        assert (seen, wait_s) == ("digest", 2.0)
        return LAYOUT

    def submit(submission: Submission) -> JobInfo:
        seen.append(submission)
        return JOB

    assert ask(services.layout, layout, seen="digest", wait_s=2.0) == LAYOUT
    assert ask(services.job_submit, submit, submission=SUBMISSION) == JOB
    assert seen == [SUBMISSION]
    assert ask(services.job_list, lambda: [JOB, JOB]) == [JOB, JOB]
    assert ask(services.job_list, list) == []
    assert ask(services.blobs_read, lambda parts: [b"a", None], parts=[("d", 0, 1)]) == (b"a", None)
    assert ask(services.blobs_drop, lambda upload: None, upload="u") is None
    assert ask(services.dashboard_receive, lambda number, wait_s: None, number=1, wait_s=0) is None


def test_text_that_no_utf_8_can_have_arrives_with_its_name() -> None:
    name = os.fsdecode(b"caf\xe9.csv")
    written = Written(left=(WrittenFile(name, 3),), left_count=1, left_bytes=3)
    seen: list[Written] = []

    def take(key: str, written: Written) -> bool:
        seen.append(written)
        raise sky.InvalidField("a problem", given=name)

    with pytest.raises(sky.InvalidField) as caught:
        ask(services.job_written, take, key="k", written=written)
    assert (seen[0].left[0].path, caught.value.given) == (r"caf\udce9.csv",) * 2
    jobs = [replace(JOB, problem=f"ValueError: {name} é"), JOB]
    assert ask(services.job_list, lambda: jobs) == [replace(JOB, problem=r"ValueError: caf\udce9.csv é"), JOB]


def test_a_document_that_makes_no_sense_is_refused_on_either_side() -> None:
    with pytest.raises(sky.InvalidField, match=r"job\.version"):
        ask(services.job_submit, lambda submission: JOB, submission={**SUBMISSION.to_json(), "version": 9})
    peer = LocalPeer({services.layout.name: lambda: rpc.answered(_value({"version": 9}))})
    with pytest.raises(sky.InvalidNodeConfig, match=r"layout\.version"):
        asyncio.run(services.layout(peer))


async def _value(value: object) -> object:
    return value


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_arrives_as_it_was_raised(name: str) -> None:
    def refuse(gang: str) -> None:
        raise getattr(errors, name)("it is wrong", field="gang", given=gang, hint="Take another one.")

    with pytest.raises(sky.SkyinfraError) as caught:
        ask(services.gang_release, refuse, gang="g")
    error = caught.value
    assert type(error) is getattr(errors, name)
    assert (error.message, error.field, error.given, error.hint) == ("it is wrong", "gang", "g", "Take another one.")


def test_what_was_given_travels_where_it_is_a_plain_value() -> None:
    def refuse(gang: str) -> None:
        raise sky.InvalidField("it is wrong", given=object())

    with pytest.raises(sky.InvalidField) as caught:
        ask(services.gang_release, refuse, gang="g")
    assert caught.value.given is None


def test_an_error_of_an_unknown_class_keeps_its_name() -> None:
    class OtherError(sky.NodeError):
        pass

    def refuse(gang: str) -> None:
        raise OtherError("it is wrong", field="f", hint="h")

    with pytest.raises(sky.NodeError, match=r"^f: OtherError: it is wrong\nh$") as caught:
        ask(services.gang_release, refuse, gang="g")
    assert type(caught.value) is sky.NodeError


def test_an_error_of_a_program_is_an_answer_where_that_is_wanted() -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(rpc.answered(fail()))
    with pytest.raises(sky.NodeError, match=r"^ValueError: a bug$"):
        rpc.opened(asyncio.run(rpc.answered(fail(), Exception)), "log")


def test_a_peer_that_does_not_know_a_call_is_named() -> None:
    with pytest.raises(sky.NotSupported, match=r"know this call \(given: 'skyinfra_running'\)\n.*another version"):
        asyncio.run(services.running(LocalPeer({})))


def test_calls_that_change_nothing() -> None:
    assert sorted(name for name, call in CALLS.items() if call.read_only) == [
        "blobs_read",
        "clock",
        "gang_state",
        "hours",
        "job_call",
        "job_list",
        "job_outcome",
        "job_wait",
        "layout",
        "records",
        "running",
        "work",
    ]


def test_every_call_of_the_head_has_a_name_of_its_own_and_keywords() -> None:
    assert len({call.name for call in CALLS.values()}) == len(CALLS)
    for name, call in CALLS.items():
        assert isinstance(call._readers, dict), name  # its types are known
        parameters = inspect.signature(call._signature).parameters.values()
        assert call.name == f"skyinfra_{name}"
        assert all(each.kind is each.KEYWORD_ONLY for each in parameters), name


def test_a_scheduler_answers_its_own_calls_and_those_that_it_is_given() -> None:
    async def run() -> set[str]:
        extra = dict([services.job_cancel.by(lambda job: True)])
        layout = {"layout": FleetLayout(1), "handlers": extra}
        scheduler = await FleetScheduler(**layout, host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0")
        try:
            return {name for name in scheduler.handlers if name.startswith("skyinfra_")}
        finally:
            await scheduler.close()

    own = (
        "layout",
        "reach",
        "promise",
        "clock",
        "report",
        "died",
        "leave",
        "running",
        "forget_topic",
        "secrets_",
        "gang_",
        "dashboard_",
        "job_cancel",
        "records",
        "work",
        "wait_inside",
        "use",
        "keep",
    )
    # Those two take over the connection that they come on.
    taking = {"skyinfra_park", "skyinfra_forward"}
    assert asyncio.run(run()) == {*taking, *(call.name for name, call in CALLS.items() if name.startswith(own))}


def test_nobody_else_registers_handlers_or_builds_envelopes() -> None:
    """Handlers are registered by the scheduler and the worker; `rpc` alone builds and opens envelopes."""
    registering: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if "_bundled" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(node) if isinstance(node, ast.Assign | ast.Call | ast.Dict | ast.Attribute) else ""
            if isinstance(node, ast.Assign) and any(".handlers[" in ast.unparse(each) for each in node.targets):
                registering.add(name)
            if isinstance(node, ast.Call) and text.startswith("self.handlers.update("):
                registering.add(name)
            if name != "protocol/rpc.py":
                assert not (isinstance(node, ast.Attribute) and node.attr.startswith("skyinfra_")), f"{name}: {text}"
                envelope = isinstance(node, ast.Dict) and text.startswith(("{'error': {", "{'error': [", "{'answer':"))
                assert not envelope, f"{name}: {text}"
    assert registering == {"head/scheduler.py", "worker/process.py"}
