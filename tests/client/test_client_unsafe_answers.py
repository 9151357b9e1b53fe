"""A question never runs code at the client, whatever the head answers: one that somebody has taken over, for instance.

The head here has the credentials of the fleet, and answers with what runs code where Dask reads it.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed
import msgpack
import pytest
from distributed.comm.tcp import TLS
from distributed.protocol import to_serialize
from distributed.protocol.serialize import ToPickle
from distributed.protocol.utils import pack_frames
from local_fleets.client_fixtures import SECRET
from local_fleets.forged_head import THREAD, Head, manifest_at, starting
from typer.testing import CliRunner

import skyinfra as sky
from skyinfra.cli.app import app
from skyinfra.client import connect, open_pool, open_questions
from skyinfra.client.lookup import wait_until_ready
from skyinfra.deploy.fleet_status import fleet_status
from skyinfra.engine.credentials import Credentials
from skyinfra.protocol import services
from skyinfra.protocol.calls import Outcome
from skyinfra.protocol.failures import Failure
from skyinfra.protocol.jobs import JobInfo
from skyinfra.protocol.manifest import Manifest


@dataclass(frozen=True)
class Touches:
    """Makes the folder *path* where it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def error(path: str) -> dict[str, Any]:
    """What Dask's servers answer where a handler raised an exception, which is pickled."""
    data = pickle.dumps(Touches(path))
    texts = {"exception_text": "ValueError('ours')", "traceback_text": ""}
    return {"status": "uncaught-error", "exception": data, "traceback": data, **texts}


WAYS: dict[str, Callable[[str], Any]] = {
    "pickled": lambda path: ToPickle(Touches(path)),
    "pickled inside": lambda path: {"answer": [{"text": ToPickle(Touches(path))}]},
    "serialized": lambda path: to_serialize(Touches(path)),
    "serialized inside": lambda path: {"error": {"class": "NodeError", "message": to_serialize(Touches(path))}},
    "error": error,
    "error serialized": lambda path: {
        key: to_serialize(value) if isinstance(value, bytes) else value for key, value in error(path).items()
    },
    "name": lambda path: {"__Enum__": True, "__module__": "distributed", "__name__": "Client", "name": "run"},
}


@pytest.fixture
def heads() -> Iterator[Callable[[Head], Manifest]]:
    """Starts heads; gives their manifests."""
    with starting() as start:
        yield start


def shown(*arguments: str) -> Callable[[Manifest, Path], str]:
    """What a command prints; FLEET stands for the manifest's file."""

    def run(manifest: Manifest, folder: Path) -> str:
        path = folder / "fleet.json"
        path.write_text(json.dumps(manifest.to_json()))
        result = CliRunner().invoke(app, [str(path) if each == "FLEET" else each for each in arguments])
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit | sky.SkyinfraError), result.exception
        return f"{result.output}{result.exception}"

    return run


def raised(ask: Callable[[Manifest], object]) -> Callable[[Manifest, Path], str]:
    def run(manifest: Manifest, folder: Path) -> str:
        with pytest.raises(sky.SkyinfraError) as caught:
            ask(manifest)
        return str(caught.value)

    return run


ASKING: dict[str, Callable[[Manifest, Path], str]] = {
    "status": lambda manifest, folder: str(fleet_status(manifest, None)["problem"]),
    "top": shown("top", "FLEET"),
    "doctor": shown("doctor", "FLEET"),
    "logs": shown("logs", "FLEET"),
    "logs of a task": shown("logs", "FLEET", "--task", "f-1"),
    "dashboard": shown("dashboard", "FLEET"),
    "exec": shown("exec", "FLEET", "--", "true"),
    "jobs": shown("jobs", "FLEET"),
    "jobs logs": shown("jobs", "logs", "FLEET", "train"),
    "jobs cancel": shown("jobs", "cancel", "FLEET", "train"),
    "jobs result": shown("jobs", "result", "FLEET", "train"),
    "deploy": raised(lambda manifest: wait_until_ready(manifest, patience=5, on_change=lambda text: None)),
}


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ASKING)
def test_asking_runs_nothing(
    heads: Callable[[Head], Manifest], tmp_path: Path, name: str, way: str, later: bool
) -> None:
    head = Head(WAYS[way], tmp_path / "ran", later)
    text = ASKING[name](heads(head), tmp_path)
    assert not head.marker.exists()
    if way.startswith("error"):
        assert "it failed: ValueError('ours')" in text
    else:
        assert "not plain data" in text
        assert "could run code on this machine" in text
    assert len(head.asked) > (1 if later else 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_client_checks_the_head_before_it_reads_what_runs_code(
    heads: Callable[[Head], Manifest], tmp_path: Path, way: str
) -> None:
    head = Head(WAYS[way], tmp_path / "ran")
    kind = sky.FleetError if way.startswith("error") else sky.UnsafeAnswer
    manifest = heads(head)
    for opened in (connect, open_pool):
        with pytest.raises(kind):
            opened(manifest)
    assert not head.marker.exists()


def test_the_first_words_of_a_head_run_nothing(
    heads: Callable[[Head], Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Dask's handshake, before any question."""
    real = TLS.handshake_info
    marker = tmp_path / "ran"

    def handshake_info(comm: TLS) -> dict[str, Any]:
        mine = {"greeting": ToPickle(Touches(str(marker)))} if threading.current_thread().name == THREAD else {}
        return {**real(comm), **mine}

    monkeypatch.setattr(TLS, "handshake_info", handshake_info)
    manifest = heads(Head(WAYS["pickled"], marker))
    with pytest.raises(sky.UnsafeAnswer, match="tls://127"):
        open_questions(manifest)
    assert not marker.exists()


def test_dask_itself_runs_what_the_head_answers(heads: Callable[[Head], Manifest], tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""

    async def ask(manifest: Manifest) -> None:
        security = Credentials.derive(SECRET, role="client", name="test").security()
        arguments = security.get_connection_args("client")
        # The deserializers that a caller names are asked about some ways only.
        peer = distributed.rpc(
            str(manifest.head), connection_args=arguments, deserializers=("msgpack",), deserialize=False
        )
        async with peer:
            await peer.versions()

    head = Head(WAYS["pickled"], tmp_path / "ran")
    asyncio.run(ask(heads(head)))
    assert head.marker.exists()


def job_that_ended(marker: Path, outcome: bytes) -> Head:
    """A head with a job that has ended so."""
    info = JobInfo("train", "0" * 32, "train", "function", "me@host", 0, "done", 1.0)
    calls = {services.job_wait.name: info.to_json(), services.job_outcome.name: (outcome, len(outcome))}
    return Head(WAYS["pickled"], marker, later=True, answers=calls)


def test_the_result_of_a_job_is_written_and_not_read(heads: Callable[[Head], Manifest], tmp_path: Path) -> None:
    """What reads it runs what the task gave: that is what a result is."""
    marker, written = tmp_path / "ran", tmp_path / "result"
    result = pickle.dumps(Touches(str(marker)))
    manifest = tmp_path / "fleet.json"
    manifest.write_text(json.dumps(heads(job_that_ended(marker, pickle.dumps(Outcome(result)))).to_json()))
    shown = CliRunner().invoke(app, ["jobs", "result", str(manifest), "train", "--output", str(written)])
    assert (shown.exit_code, written.read_bytes()) == (0, result)
    failure = Failure(error=result, traceback=result, text="ValueError: no")
    manifest.write_text(json.dumps(heads(job_that_ended(marker, pickle.dumps(Outcome(failure=failure)))).to_json()))
    shown = CliRunner().invoke(app, ["jobs", "result", str(manifest), "train", "--output", str(written)])
    assert isinstance(shown.exception, sky.TaskFailed)
    assert "ValueError: no" in str(shown.exception)
    assert not marker.exists()


@pytest.mark.parametrize("way", ["it is another object", "a part of it is one", "it is none"])
def test_the_outcome_of_a_job_is_nothing_else(heads: Callable[[Head], Manifest], tmp_path: Path, way: str) -> None:
    marker = tmp_path / "ran"
    outcome = {
        "it is another object": pickle.dumps(Touches(str(marker))),
        "a part of it is one": pickle.dumps(Outcome(seconds=Touches(str(marker)))),  # type: ignore[arg-type]
        "it is none": b"outcome",
    }[way]
    with open_questions(heads(job_that_ended(marker, outcome))) as questions, pytest.raises(sky.UnsafeAnswer):
        questions.job("train").result()
    assert not marker.exists()


def message(frame: bytes) -> bytes:
    """A message of one frame, as it travels."""
    packed = pack_frames([frame])
    return struct.pack("Q", len(packed)) + packed


@pytest.mark.parametrize(
    "sent",
    [
        message(b""),
        message(b"\xc1"),
        message(b"\x81\x90\x90"),
        message(b"\x91" * 2000 + b"\x90"),
        message(msgpack.dumps({"__Pickled__": 7})),
        message(msgpack.dumps({"__Set__": True, "as-list": [{}]})),
        message(msgpack.dumps([1, 2])),
        message(msgpack.dumps({"compression": None})),
        struct.pack("QQQ", 16, 2**40, 2**60),
        struct.pack("Q", 2**62),
    ],
    ids=[
        "empty",
        "no msgpack",
        "no key",
        "deep",
        "no frame",
        "no set",
        "no greeting",
        "half a greeting",
        "no lengths",
        "too long",
    ],
)
def test_what_is_no_message_is_refused(tmp_path: Path, sent: bytes) -> None:
    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(sent)
            await reader.read()
            writer.close()

        security = Credentials.derive(SECRET, role="scheduler", name="n0").security()
        context = security.get_listen_args("scheduler")["ssl_context"]
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(sky.UnsafeAnswer, match="not plain data"):
                await asyncio.to_thread(open_questions, manifest_at(port))

    asyncio.run(run())
