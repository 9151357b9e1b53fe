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
from skyinfra.engine.notifications import Notice, Webhook, post, webhooks
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


def test_what_nodes_and_tasks_say_is_one_line_without_controls() -> None:
    """A command of --notify may hand them to a mail program, for which a new line is another header."""
    notice = Notice(
        "demo/mig", "node n\r\nBcc: a@b\x1b[31m", "sick", slot="n\n1/0", problem="no\nspace\x1b]0;t\x07\u202e\0"
    )
    assert notice.subject == r"node n\nBcc: a@b\x1b[31m on demo/mig: sick"
    assert notice.text == rf"{notice.subject} on slot n\n1/0: no\nspace\x1b]0;t\x07\u202e\x00"
    with webhook_server() as server:
        assert post(*webhooks([server.url("a")]), notice) is None
        ((_, body),) = server.received
    assert body["text"] == notice.text.replace("&", "&amp;")
    assert set(body["job"].values()) >= {r"node n\nBcc: a@b\x1b[31m", r"no\nspace\x1b]0;t\x07\u202e\x00"}


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


# Public reports of the kind: documenso#2901, OneUptime#2578, freellmapi#450, JSONbored/metagraphed#1533.
METADATA = [
    "169.254.169.254",
    "169.254.170.2",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "169.254.43518",
    "0xa9.0xfe.0xa9.0xfe",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[0:0:0:0:0:ffff:169.254.169.254]",
    "[::ffff:0:a9fe:a9fe]",
    "[::169.254.169.254]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b:1::a9fe:a9fe]",
    "[2002:a9fe:a9fe::1]",
    "[fe80::a9fe:a9fe]",
    "[fd00:ec2::254]",
    "[fd00:0ec2:0:0:0:0:0:0254]",
    "[fd00:ec2::23]",
    "[fd20:ce::254]",
    "[fd00:42::42]",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",
    "0.0.0.0",
    "[::]",
    "[::ffff:0.0.0.0]",
    "224.0.0.1",
]


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", METADATA)
def test_the_metadata_service_is_refused_however_it_is_written(host: str, scheme: str) -> None:
    with pytest.raises(InvalidField, match=r"credentials|not encrypted"):
        webhooks([f"{scheme}://{host}/latest/meta-data/"])
    # Nor is it connected to, where nobody has looked at the text.
    assert "credentials" in (post(Webhook(f"{scheme}://{host}/", host), NOTICE) or "")


@pytest.mark.parametrize(
    "answers",
    [
        ["169.254.169.254"],
        ["::ffff:169.254.169.254"],
        ["127.0.0.1", "169.254.169.254"],
        ["fe80::1%1"],
        ["fd00:ec2::254"],
    ],
    ids=str,
)
def test_a_name_that_leads_there_is_not_connected_to(monkeypatch: pytest.MonkeyPatch, answers: list[str]) -> None:
    """One that leads to several is refused as a whole; what was looked at is what is connected to."""
    connected: list[object] = []
    monkeypatch.setattr(socket, "create_connection", lambda address, *_: connected.append(address))
    asked: list[str] = []

    def resolved(host: str, port: int | None, *_: object, flags: int = 0, **__: object) -> list[object]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "a name")
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answers]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    (webhook,) = webhooks(["https://hooks.example.com/secret-path"])
    said = post(webhook, NOTICE)
    assert said is not None and "credentials" in said and "secret-path" not in said
    assert asked == ["hooks.example.com"] and connected == []  # nor is it tried again


def test_a_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that leads elsewhere the second time, DNS rebinding, is connected to where it led at first."""
    real, asked = socket.getaddrinfo, []

    def resolved(host: str, *given: object, **options: object) -> object:
        if host == "hooks.example.com":
            asked.append(host)
            host = "127.0.0.1" if len(asked) == 1 else "169.254.169.254"
        return real(host, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(notifications, "_near", lambda host: True)
    monkeypatch.setattr(notifications.outgoing, "forbidden", lambda host: False)
    with webhook_server() as server:
        (webhook,) = webhooks([server.url("a").replace("127.0.0.1", "hooks.example.com")])
        assert post(webhook, NOTICE) is None
        assert len(server.received) == 1 and len(asked) == 1


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_leads_there(code: int) -> None:
    with webhook_server(code) as server:
        server.location = "http://169.254.169.254/latest/meta-data/"
        assert "which is refused" in (post(*webhooks([server.url("a")]), NOTICE) or "")
        assert len(server.received) == 1


def test_a_proxy_is_not_asked_to_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.2)
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        assert "credentials" in (post(Webhook("https://2852039166/", "2852039166"), NOTICE) or "")
        with pytest.raises(TimeoutError):
            proxy.accept()


def test_addresses() -> None:
    near = ["http://localhost:1/a", "http://10.1.2.3/a", "http://[::1]/a", "http://192.168.1.1/a"]
    found = webhooks([*near, near[0], "https://hooks.slack.com/services/T0/B0/secret"])
    assert [each.host for each in found] == ["localhost", "10.1.2.3", "::1", "192.168.1.1", "hooks.slack.com"]
    assert "secret" not in repr(found)
    with pytest.raises(InvalidField, match="at most 10"):
        webhooks(f"https://h/{number}" for number in range(11))
