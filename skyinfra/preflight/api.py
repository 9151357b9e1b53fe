"""Asking AWS: clients of one region and profile, every question once, and refusals in few kinds."""

from __future__ import annotations

import importlib
import json
import threading
from concurrent.futures import Future
from typing import Any, Literal

from skyinfra.buckets import load_boto3
from skyinfra.terraform.cloud_errors import refusals

# botocore waits and tries again, with a growing pause, where AWS throttles or fails. An answer that does not come in
# time is not asked for again, and nothing else of that service is.
ATTEMPTS = 5
CONNECT_SECONDS = 5
READ_SECONDS = 20

# Making clients is not safe in several threads, using them is.
_MAKING = threading.Lock()

ErrorKind = Literal["credentials", "denied", "throttled", "unreachable", "refused"]

_KINDS: dict[str, ErrorKind] = {
    "CloudCredentialsRefused": "credentials",
    "CloudPermissionDenied": "denied",
    "CloudThrottled": "throttled",
}
# A page of HTML is of something on the way. It is not shown: it may say anything.
_FOREIGN = "the answer is not one of AWS's: a proxy, or another service, answers at its address"
# Services whose prefix of IAM actions differs from their name.
_PREFIXES = {"service-quotas": "servicequotas"}
# What IAM calls an operation, where that is something else.
_ACTIONS = {"s3:HeadBucket": "s3:ListBucket", "s3:ListObjectsV2": "s3:ListBucket"}


class CallFailed(Exception):
    """AWS did not answer a question.

    kind: why. code: AWS's own, or the exception's name. action: the IAM action of the question. words: AWS's sentence.
    says, hint: what it means and what would work, where that is known.
    """

    def __init__(self, kind: ErrorKind, code: str, action: str, words: str, *, says: str = "", hint: str = "") -> None:
        super().__init__(f"{action}: {code}: {words}")
        self.kind, self.code, self.action, self.words, self.says, self.hint = kind, code, action, words, says, hint


class Api:
    """The questions of one region and profile; may be used by several threads.

    session: a boto3 session, None for one of the profile. Raises `MissingDependency`, or `CallFailed` for a profile
    that is not there.
    """

    def __init__(self, region: str, profile: str | None, session: Any = None) -> None:
        self.region, self.profile = region, profile
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, int], Any] = {}
        self._answers: dict[str, Future[dict[str, Any]]] = {}
        self._silent: set[str] = set()
        self._session = session or _session(region, profile)

    def ask(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one operation, all pages of it; the same question is asked once. Raises `CallFailed`."""
        key = json.dumps([service, operation, parameters], sort_keys=True, default=str)
        with self._lock:
            future = self._answers.get(key)
            first = future is None
            if future is None:
                future = self._answers[key] = Future()
        if first:
            try:
                future.set_result(self._call(service, operation, parameters))
            except CallFailed as error:
                future.set_exception(error)
            finally:
                future.cancel()  # whoever else waits must not wait for ever; nothing where there is an answer
        return future.result()

    def once(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """The answer to what changes something: whatever becomes of it, it is not sent again. Raises `CallFailed`."""
        return self._call(service, operation, parameters, attempts=1)

    def _call(
        self, service: str, operation: str, parameters: dict[str, Any], *, attempts: int = ATTEMPTS
    ) -> dict[str, Any]:
        exceptions = importlib.import_module("botocore.exceptions")
        client = self._client(service, attempts)
        action = f"{_PREFIXES.get(service, service)}:{client.meta.method_to_api_mapping[operation]}"
        action = _ACTIONS.get(action, action)
        if service in self._silent:
            raise CallFailed("unreachable", "ReadTimeoutError", action, f"{service} has not answered before")
        try:
            if client.can_paginate(operation):
                pages: dict[str, Any] = client.get_paginator(operation).paginate(**parameters).build_full_result()
                return pages
            answer: dict[str, Any] = getattr(client, operation)(**parameters)
            return answer
        except exceptions.ClientError as error:
            code, words = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
            raise _failure(code, action, words) from None
        except importlib.import_module("botocore.parsers").ResponseParserError:
            raise CallFailed("unreachable", "ResponseParserError", action, _FOREIGN) from None
        except exceptions.ReadTimeoutError:
            self._silent.add(service)
            words = f"nothing came within {READ_SECONDS} s"
            raise CallFailed("unreachable", "ReadTimeoutError", action, words) from None
        except exceptions.BotoCoreError as error:
            raise CallFailed(_kind_of(error, exceptions), type(error).__name__, action, str(error)) from None

    def _client(self, service: str, attempts: int) -> Any:
        config = importlib.import_module("botocore.config")
        with _MAKING:
            if (service, attempts) not in self._clients:
                settings = config.Config(
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                )
                client = self._session.client(service, region_name=self.region, config=settings)
                client.meta.events.register_first("needs-retry", _give_up)
                self._clients[service, attempts] = client
            return self._clients[service, attempts]


def _give_up(caught_exception: Exception | None, **_: Any) -> None:
    """Raises a timeout before botocore tries again: five of them would take two minutes."""
    if caught_exception is not None and type(caught_exception).__name__ == "ReadTimeoutError":
        raise caught_exception


def _session(region: str, profile: str | None) -> Any:
    boto3 = load_boto3("preflight asks AWS")
    exceptions = importlib.import_module("botocore.exceptions")
    try:
        return boto3.Session(region_name=region, profile_name=profile)
    except exceptions.ProfileNotFound as error:
        raise CallFailed("credentials", "ProfileNotFound", "", str(error)) from None


def _failure(code: str, action: str, words: str) -> CallFailed:
    """Returns the failure for a refusal by AWS, with the causes that Terraform's errors have too."""
    if words.lstrip().lower().startswith(("<!doctype", "<html")):
        return CallFailed("unreachable", code, action, _FOREIGN)
    known = next(iter(refusals([("", f"api error {code}: {words}")])), None)
    if known is None:
        return CallFailed("refused", code, action, words)
    return CallFailed(_KINDS.get(known.cause, "refused"), code, action, known.words, says=known.says, hint=known.hint)


def _kind_of(error: Exception, exceptions: Any) -> ErrorKind:
    """Returns the kind of an error of botocore itself."""
    credentials = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
        exceptions.SSOError,
        exceptions.TokenRetrievalError,
        exceptions.InvalidConfigError,
    )
    if isinstance(error, credentials):
        return "credentials"
    lost = (exceptions.HTTPClientError, exceptions.ConnectionError)
    return "unreachable" if isinstance(error, lost) else "refused"
