"""Notifications: their words, which addresses are taken, and what a webhook that fails is said to have done."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
from hcp.server import certificate
from servers.webhooks import webhook_server

from skyinfra import InvalidField
from skyinfra.engine import notifications
from skyinfra.engine.notifications import Notice, post, webhooks
from skyinfra.protocol.jobs import JobInfo

NOTICE = Notice("demo/mig", "nightly", "done", 200.4, 0, "n1/0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_PAUSES_S", (0.0, 0.0))


def test_the_words() -> None:
    assert NOTICE.text == "nightly on demo/mig: done after 0:03:20 on slot n1/0"
    info = JobInfo("nightly", "0" * 32, "train.py", "script", "me@here", 0, "failed", 1.0, 2.0, 5.0, 1, "n1/0")
    for problem, code in (("train.py ended with exit code 3", 3), ("train.py ended by signal 9", 137), ("other", None)):
        noted = Notice.of(info.__class__(**{**vars(info), "problem": f"ScriptFailed: {problem}"}), "demo/mig")
        assert (noted.exit_code, noted.seconds, noted.id) == (code, 3.0, "0" * 32)
        assert noted.text == f"nightly on demo/mig: failed after 0:00:03 on slot n1/0: ScriptFailed: {problem}"
    assert Notice("demo/mig", "n", "failed", exit_code=3).text == "n on demo/mig: failed: exit code 3"
    assert Notice("demo/mig", "n", "cancelled").text == "n on demo/mig: cancelled"


def test_slack_reads_no_markup_and_programs_read_fields() -> None:
    with webhook_server() as server:
        problem = "ValueError: <!channel> & more"
        assert post(*webhooks([server.url("a")]), Notice("demo/mig", "n", "failed", problem=problem)) is None
        ((path, body),) = server.received
    assert path == "/a" and body["text"].endswith("ValueError: &lt;!channel&gt; &amp; more")
    assert body["job"]["problem"] == problem and body["job"]["state"] == "failed"


@pytest.mark.parametrize(
    ("answers", "said", "requests"),
    [
        ([503, 429, 200], None, 3),
        ([500], "answered 500", 3),
        ([404], "answered 404", 1),
        ([302], "answered 302, a redirect, which is refused", 1),
        ([307], "answered 307, a redirect, which is refused", 1),
    ],
)
def test_what_may_pass_is_tried_thrice_and_no_redirect_is_followed(
    answers: list[int], said: str | None, requests: int
) -> None:
    with webhook_server(*answers) as server:
        assert post(*webhooks([server.url("secret-path")]), NOTICE) == said
        assert [path for path, _ in server.received] == ["/secret-path"] * requests


def test_what_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_ANSWER_S", 0.2)
    with webhook_server() as server:
        assert post(*webhooks([server.url("hang")]), NOTICE) == "no answer within 0.2 s"
        assert server.hanging == 3
        # It speaks no TLS.
        secure = server.url("secret-path").replace("http:", "https:")
        assert "secret-path" not in (post(*webhooks([secure]), NOTICE) or "")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert post(*webhooks([f"http://127.0.0.1:{unused.getsockname()[1]}/"]), NOTICE) == "Connection refused"


def test_a_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    with webhook_server() as server:
        server.server.socket = context.wrap_socket(server.server.socket, server_side=True)
        (webhook,) = webhooks([f"https://localhost:{server.server.server_port}/secret-path"])
        assert post(webhook, NOTICE) == "its certificate is not valid: self-signed certificate"
        assert server.received == []
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        assert post(webhook, NOTICE) is None
        assert server.received[0][0] == "/secret-path"


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/secret-path",
        "http://169.254.169.254/secret-path",
        "http://0.0.0.0/secret-path",
        "http://8.8.8.8/secret-path",
        "https://me:word@hooks.example.com/secret-path",
        "ftp://hooks.example.com/secret-path",
        "file:///secret-path",
        "https:///secret-path",
        "https://hooks.example.com:x/secret-path",
        "https://hooks.example.com/secret-path\n",
        "https://hooks.example.com/secret path",
        "https://[::1/secret-path",
    ],
)
def test_addresses_that_are_none_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidField, match="notify") as error:
        webhooks([url])
    assert "secret" not in str(error.value) and "word" not in str(error.value)


def test_addresses() -> None:
    near = ["http://localhost:1/a", "http://10.1.2.3/a", "http://[::1]/a", "http://192.168.1.1/a"]
    found = webhooks([*near, near[0], "https://hooks.slack.com/services/T0/B0/secret"])
    assert [each.host for each in found] == ["localhost", "10.1.2.3", "::1", "192.168.1.1", "hooks.slack.com"]
    assert "secret" not in repr(found)
    with pytest.raises(InvalidField, match="at most 10"):
        webhooks(f"https://h/{number}" for number in range(11))
