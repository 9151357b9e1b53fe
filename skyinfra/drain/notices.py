"""Preemption notices: one class for each provider, which reads them from its metadata service.

- AWS, spot: ``spot/instance-action`` two minutes ahead, and ``events/recommendations/rebalance`` perhaps sooner, which
  may come to nothing
- Google Cloud: ``instance/preempted`` 30 seconds ahead, which a request waits for; ``instance/maintenance-event`` an
  hour ahead for machines with GPUs, 60 seconds for others
- Azure: scheduled events, 30 seconds ahead for a spot machine; what is acknowledged may happen at once
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from skyinfra.drain.request import this_boot
from skyinfra.errors import NodeFailed, NotSupported
from skyinfra.first_boot import fetch, gce
from skyinfra.protocol.nodeconfig import NodeConfig

# Overrides the address of the metadata service of every provider.
ENDPOINT = "SKYINFRA_METADATA_ENDPOINT"
_TIMEOUT_S = 5.0
_QUESTION = "whether the machine is taken back"
# Tasks are ended at most that long before the machine, so that this node still tells the scheduler.
_MARGIN_S = 10.0


@dataclass(frozen=True)
class Notice:
    """The provider takes the machine back, or suspends it.

    key: equal for the same notice. why: for people. until: Unix time at which running tasks are ended; None where the
    provider gives no time. certain: whether it will happen. acknowledge: tells the provider that the node is idle.
    """

    key: str
    why: str
    until: float | None = None
    certain: bool = True
    acknowledge: Callable[[], object] | None = field(default=None, compare=False)


class _Aws:
    pause_s = 2.0

    def poll(self) -> Notice | None:
        action = self._document("spot/instance-action")
        if action is not None:
            what, when = action.get("action", "terminate"), action.get("time")
            why = f"AWS takes the spot instance back ({what} at {when})"
            return Notice(f"spot {what} {when}", why, _before(_time(when)))
        advice = self._document("events/recommendations/rebalance")
        if advice is None:
            return None
        key = f"rebalance {advice.get('noticeTime')}"
        return Notice(key, "AWS recommends to leave the spot instance", certain=False)

    def _document(self, path: str) -> dict[str, Any] | None:
        text = ec2_metadata(path, _QUESTION, base=os.environ.get(ENDPOINT))
        return None if text is None else _object(text, path)


class _Gcp:
    # The request itself waits.
    pause_s = 0.0
    _WAIT_S = 10
    _PREEMPTED_S = 30.0

    def __init__(self, config: NodeConfig) -> None:
        has_gpus = config.accelerator is not None and config.accelerator.vendor in ("nvidia", "amd")
        self._ahead_s = 3600.0 if has_gpus else 60.0
        self._base = f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}"
        self._since: dict[str, float] = {}
        # Names the value that was seen last: a change between two requests is answered at once.
        self._seen: str | None = None

    def poll(self) -> Notice | None:
        wait = f"?wait_for_change=true&timeout_sec={self._WAIT_S}&last_etag={self._seen}" if self._seen else ""
        if self._value(f"preempted{wait}", waits=True) == "TRUE":
            return self._notice("preempted", "Google Cloud takes the spot machine back", self._PREEMPTED_S)
        event = self._value("maintenance-event")
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            return self._notice(event, "Google Cloud stops the machine for maintenance of its host", self._ahead_s)
        self._since = {}
        return None

    def _notice(self, key: str, why: str, ahead_s: float) -> Notice:
        # It does not say when; it is as far ahead as documented when it is first seen. It is the same notice where this
        # service has started again: the machine ends with it.
        since = self._since.setdefault(key, time.time())
        return Notice(f"{key} {this_boot()}", why, _before(since + ahead_s, now=since))

    def _value(self, path: str, *, waits: bool = False) -> str:
        path, timeout_s = f"/computeMetadata/v1/instance/{path}", self._WAIT_S + _TIMEOUT_S
        text, etag = _ask(self._base, path, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if waits:
            self._seen = etag
        return text.strip()


class _Azure:
    """Not for freezes, which last some seconds."""

    pause_s = 1.0
    _BASE = "http://169.254.169.254"
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _HEADERS = {"Metadata": "true"}  # noqa: RUF012 - never changed
    _KINDS = {  # noqa: RUF012 - never changed
        "Preempt": "takes the spot machine back",
        "Terminate": "removes the machine",
        "Redeploy": "moves the machine to another host",
        "Reboot": "reboots the machine",
    }

    @cached_property
    def _name(self) -> str:
        return _ask(self._BASE, self._NAME, self._HEADERS)[0].strip()

    def poll(self) -> Notice | None:
        name = self._name
        # The first request of a machine switches the service on, which takes up to two minutes.
        text, _ = _ask(self._BASE, self._EVENTS, self._HEADERS, timeout_s=130)
        events = _object(text, self._EVENTS).get("Events")
        for event in events if isinstance(events, list) else []:
            kind = event.get("EventType")
            if kind in self._KINDS and name in event.get("Resources", ()):
                # The time is empty once the event has begun.
                until = _before(_time(event.get("NotBefore"))) or time.time()
                headers = {**self._HEADERS, "Content-Type": "application/json"}
                body = {"StartRequests": [{"EventId": event["EventId"]}]}
                acknowledge = partial(_ask, self._BASE, self._EVENTS, headers, body=body)
                return Notice(event["EventId"], f"Azure {self._KINDS[kind]}", until, acknowledge=acknowledge)
        return None


def notices(config: NodeConfig) -> _Aws | _Gcp | _Azure:
    """Returns the notices for the node *config*. Raises `NotSupported` for a provider that gives none.

    ``poll`` returns the current one, or None, and raises `NodeFailed` where the metadata service does not answer;
    ``pause_s`` is the time between two looks.
    """
    known: dict[str, Callable[[], _Aws | _Gcp | _Azure]] = {"aws": _Aws, "gcp": lambda: _Gcp(config), "azure": _Azure}
    if config.provider in known:
        return known[config.provider]()
    raise NotSupported(
        "this provider gives no notice to machines that it takes back",
        field="provider",
        given=config.provider,
        hint="`skyinfra-runner interrupt` knows aws, gcp and azure; `skyinfra-runner drain` does the same by hand.",
    )


@contextlib.contextmanager
def _answers(question: str, where: str, hint: str | None = None) -> Iterator[None]:
    """Raises `NodeFailed` where the metadata service does not answer *question*."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = f"it answers {error.code}" if isinstance(error, urllib.error.HTTPError) else str(error)
        raise NodeFailed(f"the metadata service does not say {question}: {why}", field=where, hint=hint) from None


def ec2_metadata(path: str, question: str, *, base: str | None = None, hint: str | None = None) -> str | None:
    """Returns the text at *path* of EC2's metadata service, or None where there is none. Raises `NodeFailed`."""
    return _text(fetch.metadata, path, question, base, hint)


def gce_metadata(path: str, question: str, *, base: str | None = None, hint: str | None = None) -> str | None:
    """Returns the text at *path* of this machine on Google Cloud, or None where there is none. Raises `NodeFailed`."""
    return _text(gce.metadata, path, question, base, hint)


def _text(
    read: Callable[[str, str | None], str], path: str, question: str, base: str | None, hint: str | None
) -> str | None:
    with _answers(question, base or path, hint):
        try:
            return read(path, base)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None


def _ask(
    base: str, path: str, headers: dict[str, str], *, timeout_s: float = _TIMEOUT_S, body: object = None
) -> tuple[str, str | None]:
    """Returns the text of the answer and its ETag; *body* is sent as JSON. Raises `NodeFailed`."""
    url = os.environ.get(ENDPOINT, base).rstrip("/") + path
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, headers=headers, data=data)  # noqa: S310 - http
    # The machine's own address is not behind a proxy.
    with _answers(_QUESTION, url), fetch.direct().open(request, timeout=timeout_s) as answer:
        return str(answer.read().decode()), answer.headers["ETag"]


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise NodeFailed("the metadata service does not answer with a JSON object", field=where, given=text[:200])
    return found


def _time(text: str | None) -> float | None:
    """Unix time of a date as AWS (ISO 8601) and Azure (RFC 1123) write it; None where there is none."""
    if not text:
        return None
    for parse in (datetime.datetime.fromisoformat, email.utils.parsedate_to_datetime):
        with contextlib.suppress(ValueError):
            return parse(text).timestamp()
    return None


def _before(end: float | None, *, now: float | None = None) -> float | None:
    """When tasks are ended for a machine that ends at *end*: 10 s before, and after three quarters of the time."""
    if end is None:
        return None
    left = max(0.0, end - (time.time() if now is None else now))
    return end - min(_MARGIN_S, left / 4)
