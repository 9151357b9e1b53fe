"""What providers tell a machine that they will take back: one class for each provider, all of them by its metadata
service.

- AWS, spot: ``spot/instance-action`` two minutes ahead, and ``events/recommendations/rebalance`` perhaps sooner, which
  may come to nothing
- Google Cloud: ``instance/preempted`` 30 seconds ahead, which a request waits for; ``instance/maintenance-event`` an
  hour ahead for machines with GPUs, 60 seconds for others
- Azure: scheduled events, 30 seconds ahead for a spot machine; what is acknowledged may happen at once
"""

from __future__ import annotations

import datetime
import email.utils
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from skyinfra.errors import NodeFailed, NotSupported
from skyinfra.protocol.nodeconfig import NodeConfig

# Stands above every other address, for tests and for machines behind something.
ENDPOINT = "SKYINFRA_METADATA_ENDPOINT"
_TIMEOUT_S = 5.0
# Tasks are ended that long before the machine is, at most: the scheduler is to hear of it from this node.
_MARGIN_S = 10.0


@dataclass(frozen=True)
class Notice:
    """The provider takes the machine back, or suspends it.

    key: equal for the same notice. why: in words. until: Unix time at which tasks that still run are to be ended; None
    where nothing is said of that. certain: whether it will happen. acknowledge: what `Notices.acknowledge` takes.
    """

    key: str
    why: str
    until: float | None = None
    certain: bool = True
    acknowledge: str | None = None


class Notices(Protocol):
    """The notices of one provider."""

    pause_s: float

    def look(self) -> Notice | None:
        """The notice that stands now, or None. Raises `NodeFailed` where the metadata service does not say."""

    def acknowledge(self, what: str) -> None:
        """Lets the provider know that nothing runs here any more. Raises `NodeFailed`."""


def notices(config: NodeConfig) -> Notices:
    """Those of the provider of the node *config*. Raises `NotSupported` for a provider that gives none."""
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
    """EC2's, through version 2 of its metadata service, with a session token that is taken anew when it is refused."""

    pause_s = 2.0
    _TOKEN_S = 21_600

    def __init__(self) -> None:
        # The variable that AWS's own tools have for another address.
        default = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
        self._service = _Service(default)
        self._token: str | None = None

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

    def acknowledge(self, what: str) -> None:
        """Nothing is acknowledged there."""

    def _document(self, path: str) -> dict[str, Any] | None:
        """What is said there; None where nothing is."""
        text = self._read(path)
        return None if text is None else _object(text, self._service.base)

    def _read(self, path: str) -> str | None:
        for _ in range(2):
            if self._token is None:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_S)}
                self._token = self._service.ask("PUT", "/latest/api/token", ttl)
            try:
                return self._service.ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})
            except _Refused as refused:
                if refused.status == 404:
                    return None
                if refused.status != 401:
                    raise
                # It ran out, or the instance was moved.
                self._token = None
        raise self._service.silent("it refuses the tokens that it gives (401)")


class GcpNotices:
    """Compute Engine's. *hour*: whether host maintenance is told an hour ahead, as machines with GPUs hear of it."""

    # The request itself waits.
    pause_s = 0.0
    _WAIT_S = 10
    _PREEMPTED_S = 30.0

    def __init__(self, *, hour: bool) -> None:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        self._service = _Service(f"http://{host}")
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

    def acknowledge(self, what: str) -> None:
        """Nothing is acknowledged there."""

    def _notice(self, key: str, why: str, ahead_s: float) -> Notice:
        # It does not say when; it is as far ahead as documented when it is first seen.
        since = self._since.setdefault(key, time.time())
        return Notice(f"{key} {since}", why, _before(since + ahead_s, now=since))

    def _value(self, path: str, *, waits: bool = False) -> str:
        headers = {"Metadata-Flavor": "Google"}
        path = f"/computeMetadata/v1/instance/{path}"
        text = self._service.ask("GET", path, headers, timeout_s=self._WAIT_S + _TIMEOUT_S)
        if waits:
            self._seen = self._service.etag
        return text.strip()


class AzureNotices:
    """Azure's scheduled events that are about this machine. A freeze of some seconds is none."""

    pause_s = 1.0
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
        self._service = _Service("http://169.254.169.254")
        self._name: str | None = None

    def look(self) -> Notice | None:
        if self._name is None:
            self._name = self._service.ask("GET", self._NAME, self._HEADERS).strip()
        # The first request of a machine switches the service on, which takes up to two minutes.
        document = _object(self._service.ask("GET", self._EVENTS, self._HEADERS, timeout_s=130), self._service.base)
        events = document.get("Events")
        for event in events if isinstance(events, list) else []:
            kind = event.get("EventType")
            if kind in self._KINDS and self._name in event.get("Resources", ()):
                return self._notice(event, kind)
        return None

    def acknowledge(self, what: str) -> None:
        body = json.dumps({"StartRequests": [{"EventId": what}]})
        self._service.ask("POST", self._EVENTS, {**self._HEADERS, "Content-Type": "application/json"}, body=body)

    def _notice(self, event: Mapping[str, Any], kind: str) -> Notice:
        # Empty once the event has begun.
        when = _time(event.get("NotBefore"))
        until = time.time() if when is None else _before(when)
        identity = event["EventId"]
        return Notice(identity, f"Azure {self._KINDS[kind]}", until, acknowledge=identity)


class _Refused(NodeFailed):
    """The metadata service answers, but not with 200; ``status`` says with what."""

    status = 0


class _Service:
    """The metadata service at *default*, unless the environment names another one."""

    def __init__(self, default: str) -> None:
        self.base = os.environ.get(ENDPOINT, default).rstrip("/")
        # Of the last answer.
        self.etag: str | None = None
        # The machine's own address is not behind a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S, body: str = ""
    ) -> str:
        """The text that it answers with. Raises `_Refused`, or `NodeFailed` where it does not answer."""
        data = body.encode() if body else None
        request = urllib.request.Request(f"{self.base}{path}", headers=dict(headers), method=method, data=data)  # noqa: S310 - http
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                self.etag = answer.headers["ETag"]
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            refused = _Refused(*self._words(f"it answers {error.code}"), field=self.base)
            refused.status = error.code
            raise refused from None
        except (OSError, UnicodeDecodeError) as error:
            raise self.silent(str(error)) from None

    def silent(self, why: str) -> NodeFailed:
        """The error for a service that does not say what was asked."""
        return NodeFailed(*self._words(why), field=self.base)

    @staticmethod
    def _words(why: str) -> tuple[str]:
        return (f"the metadata service does not say whether the machine is taken back: {why}",)


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
