"""Notifications of jobs: the words of one, and its way to a webhook.

The address of a webhook is a credential: who has it may write there. No message, repr or log has it; they have its
host. A webhook takes what one of Slack takes: https://api.slack.com/messaging/webhooks, looked up in 2026-11.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from http import HTTPStatus
from urllib.parse import urlsplit

from skyinfra.engine import outgoing
from skyinfra.errors import InvalidField
from skyinfra.errors.printable import printable
from skyinfra.protocol.jobs import JobInfo

# Webhooks of one job.
_MOST = 10
_LONGEST = 4096
# One request may take so long; before the second and the third one is waited.
_ANSWER_S = 10.0
_PAUSES_S = (1.0, 3.0)
# With it begins what the head of an elastic fleet says that has given up to start nodes.
STARTS_NONE = "starts no more nodes"
# The end of `ScriptFailed`.
_CODE = re.compile(r"ended (with exit code|by signal) (\d+)$")


@dataclass(frozen=True)
class Webhook:
    """A checked address; see `webhooks`."""

    url: str = field(repr=False)
    host: str


@dataclass(frozen=True)
class Notice:
    """The end of a job, or of a script that a client waited for; or that a node is sick while a job has not ended.

    state: ``done``, ``failed`` or ``cancelled``; of a node, whose name is ``node NAME`` then, ``sick``, ``stops``: it
    ends itself soon, ``size``: it starts no more nodes, or ``budget``: so much of it is spent. seconds: those of its
    last attempt. slot: where that ran. exit_code: of a script, as a shell gives it. id: of a job. None: not known.
    """

    pool: str
    name: str
    state: str
    seconds: float | None = None
    exit_code: int | None = None
    slot: str | None = None
    problem: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        # What nodes and tasks say: in the mail that a command sends, a new line would be another header.
        for name, value in vars(self).items():
            if isinstance(value, str):
                object.__setattr__(self, name, printable(value, None).replace("\n", "\\n"))

    @classmethod
    def of(cls, info: JobInfo, pool: str) -> Notice:
        """Returns the notice of a job that has ended."""
        seconds = None if info.started is None or info.ended is None else round(info.ended - info.started, 3)
        code = 0 if info.kind == "script" and info.state == "done" else None
        if info.kind == "script" and (found := _CODE.search(info.problem or "")):
            code = int(found[2]) + (0 if found[1].startswith("with") else 128)
        return cls(pool, info.name, info.state, seconds, code, info.slot, info.problem, info.id)

    @property
    def subject(self) -> str:
        """A few words, for the subject of a mail."""
        return f"{self.name} on {self.pool}: {self.state}"

    @property
    def text(self) -> str:
        """One line."""
        after = "" if self.seconds is None else f" after {timedelta(seconds=round(self.seconds))}"
        where = "" if self.slot is None else f" on slot {self.slot}"
        code = f"exit code {self.exit_code}" if self.exit_code else None
        why = self.problem or code
        return f"{self.name} on {self.pool}: {self.state}{after}{where}" + (f": {why}" if why else "")

    def body(self) -> bytes:
        """Returns the JSON for a webhook. What Slack reads as markup is escaped in ``text``.

        It ignores ``job``, as all fields that it does not know: https://github.com/hastic-zzz/hastic-server/issues/708.
        """
        text = self.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return json.dumps({"text": text, "job": asdict(self)}).encode()


def node_notice(pool: str, node: str, text: str) -> Notice:
    """Returns the notice of what *node* says: that it ends itself soon, that no more nodes are started, or how much of
    a budget is spent."""
    state = "stops" if text.startswith(("stops", "ends")) else "size" if text.startswith(STARTS_NONE) else "budget"
    return Notice(pool, f"node {node}", state, problem=text)


def webhooks(urls: Iterable[str]) -> tuple[Webhook, ...]:
    """*urls*, each once. Raises `InvalidField`, whose message shows none of them."""
    found = tuple(_webhook(url) for url in dict.fromkeys(urls))
    if len(found) > _MOST:
        raise InvalidField(f"at most {_MOST} webhooks", field="notify", given=len(found))
    return found


def _webhook(url: str) -> Webhook:
    hint = "https://hooks.slack.com/services/...; http:// only to localhost and addresses of a private network."
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or len(url) > _LONGEST or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidField("is not the address of a webhook", field="notify", hint=hint)
    if parts.username is not None or parts.scheme not in ("https", "http"):
        raise InvalidField("expected https://HOST/PATH, without a user", field="notify", given=host, hint=hint)
    if outgoing.forbidden(host):
        raise InvalidField("leads to where machines have their credentials", field="notify", given=host, hint=hint)
    if parts.scheme == "http" and not _near(host):
        raise InvalidField("the way to it is not encrypted", field="notify", given=host, hint=hint)
    return Webhook(url, host)


def _near(host: str) -> bool:
    """Returns whether *host* is this machine, or an address of a private network."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_private


def post(webhook: Webhook, notice: Notice) -> str | None:
    """Sends *notice*, up to three times; returns why it did not arrive, without the address, or None.

    Blocks for some 35 seconds at most. Certificates are checked; no redirect is followed; see `outgoing`.
    """
    problem, again = _post_once(webhook, notice)
    for pause in _PAUSES_S:
        if not again:
            break
        time.sleep(pause)
        problem, again = _post_once(webhook, notice)
    return problem


def _post_once(webhook: Webhook, notice: Notice) -> tuple[str | None, bool]:
    """Returns why it failed, and whether it may pass. Messages of errors may hold the address, and are not shown."""
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "skyinfra"}
    request = urllib.request.Request(webhook.url, notice.body(), headers, method="POST")  # noqa: S310
    try:
        with outgoing.open_request(request, _ANSWER_S):
            return None, False
    except urllib.error.HTTPError as answer:
        answer.close()
        redirect = ", a redirect, which is refused" if 300 <= answer.code < 400 else ""
        return f"answered {answer.code}{redirect}", answer.code >= 500 or answer.code == HTTPStatus.TOO_MANY_REQUESTS
    except Exception as error:  # noqa: BLE001 - a notification that fails fails nothing else
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, outgoing.AddressRefused):
            return f"its address {reason}", False
        if isinstance(reason, ssl.SSLCertVerificationError):
            return f"its certificate is not valid: {reason.verify_message}", False
        if isinstance(reason, TimeoutError):
            return f"no answer within {_ANSWER_S:g} s", True
        if isinstance(reason, socket.gaierror):
            return "its name is not known", True
        said = reason.strerror if isinstance(reason, OSError) else None
        return said or type(reason).__name__, True
