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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyinfra.errors import NodeFailed, NotSupported
from skyinfra.first_boot import fetch
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
    acknowledge: Callable[[], None] | None = field(default=None, compare=False)


def notices(config: NodeConfig) -> AwsNotices | GcpNotices | AzureNotices:
    """Returns the notices for the node *config*. Raises `NotSupported` for a provider that gives none.

    ``look`` returns the current one, or None, and raises `NodeFailed` where the metadata service does not answer;
    ``pause_s`` is the time between two looks.
    """
    if config.provider == "aws":
        return AwsNotices()
    if config.provider == "gcp":
        has_gpus = config.accelerator is not None and config.accelerator.vendor in ("nvidia", "amd")
        return GcpNotices(hour=has_gpus)
    if config.provider == "azure":
        return AzureNotices()
    raise NotSupported(
        "this provider gives no notice to machines that it takes back",
        field="provider",
        given=config.provider,
        hint="`skyinfra-runner interrupt` knows aws, gcp and azure; `skyinfra-runner drain` does the same by hand.",
    )


class AwsNotices:
    """EC2's notices for spot instances."""

    pause_s = 2.0

    def look(self) -> Notice | None:
        action = self._document("spot/instance-action")
        if action is not None:
            what, when = action.get("action", "terminate"), action.get("time")
            until = _time(when)
            ends = None if until is None else _before(until)
            return Notice(f"spot {what} {when}", f"AWS takes the spot instance back ({what} at {when})", ends)
        advice = self._document("events/recommendations/rebalance")
        if advice is not None:
            when = advice.get("noticeTime")
            return Notice(f"rebalance {when}", "AWS recommends to leave the spot instance", certain=False)
        return None

    def _document(self, path: str) -> dict[str, Any] | None:
        text = ec2_metadata(path, _QUESTION, base=os.environ.get(ENDPOINT))
        return None if text is None else _object(text, path)


class GcpNotices:
    """Compute Engine's notices. *hour*: whether they come an hour before host maintenance, as for GPU machines."""

    # The request itself waits.
    pause_s = 0.0
    _WAIT_S = 10
    _PREEMPTED_S = 30.0

    def __init__(self, *, hour: bool) -> None:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        self._base = f"http://{host}"
        self._ahead_s = 3600.0 if hour else 60.0
        self._since: dict[str, float] = {}
        # Names the value that was seen last: a change between two requests is answered at once.
        self._seen: str | None = None

    def look(self) -> Notice | None:
        wait = f"?wait_for_change=true&timeout_sec={self._WAIT_S}&last_etag={self._seen}" if self._seen else ""
        if self._value(f"preempted{wait}", waits=True) == "TRUE":
            return self._notice("preempted", "Google Cloud takes the spot machine back", self._PREEMPTED_S)
        event = self._value("maintenance-event")
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            return self._notice(event, "Google Cloud stops the machine for maintenance of its host", self._ahead_s)
        self._since = {}
        return None

    def _notice(self, key: str, why: str, ahead_s: float) -> Notice:
        # It does not say when; it is as far ahead as documented when it is first seen.
        since = self._since.setdefault(key, time.time())
        return Notice(f"{key} {since}", why, _before(since + ahead_s, now=since))

    def _value(self, path: str, *, waits: bool = False) -> str:
        path, timeout_s = f"/computeMetadata/v1/instance/{path}", self._WAIT_S + _TIMEOUT_S
        text, etag = _ask(self._base, path, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if waits:
            self._seen = etag
        return text.strip()


class AzureNotices:
    """Azure's scheduled events for this machine, except freezes, which last some seconds."""

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

    def __init__(self) -> None:
        self._name: str | None = None

    def look(self) -> Notice | None:
        if self._name is None:
            self._name = _ask(self._BASE, self._NAME, self._HEADERS)[0].strip()
        # The first request of a machine switches the service on, which takes up to two minutes.
        text, _ = _ask(self._BASE, self._EVENTS, self._HEADERS, timeout_s=130)
        events = _object(text, self._EVENTS).get("Events")
        for event in events if isinstance(events, list) else []:
            kind = event.get("EventType")
            if kind in self._KINDS and self._name in event.get("Resources", ()):
                return self._notice(event, kind)
        return None

    def _acknowledge(self, event: str) -> None:
        headers = {**self._HEADERS, "Content-Type": "application/json"}
        _ask(self._BASE, self._EVENTS, headers, body={"StartRequests": [{"EventId": event}]})

    def _notice(self, event: Mapping[str, Any], kind: str) -> Notice:
        # Empty once the event has begun.
        when = _time(event.get("NotBefore"))
        until = time.time() if when is None else _before(when)
        identity = event["EventId"]
        return Notice(identity, f"Azure {self._KINDS[kind]}", until, acknowledge=lambda: self._acknowledge(identity))


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
    with _answers(question, base or path, hint):
        try:
            return fetch.metadata(path, base)
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
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None


def _before(end: float, *, now: float | None = None) -> float:
    """When tasks are ended for a machine that ends at *end*: 10 s before, and after three quarters of the time."""
    left = max(0.0, end - (time.time() if now is None else now))
    return end - min(_MARGIN_S, left / 4)
