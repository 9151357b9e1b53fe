"""Requests to a provider's REST API, with the standard library, as `skyinfra.providers.preflight_requests` has them.

No key leaves the process but in a header, or a posted field, to the provider's own address: redirections are not
followed, and what is raised holds neither keys nor answers.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any, Literal, TypeVar

from skyinfra.providers.preflight_requests import Asked

REQUEST_SECONDS = 10.0
_PIECE = 1 << 16
_MOST_BYTES = 64 << 20
_MOST_PAGES = 100
_HERE = ("localhost", "127.0.0.1", "::1")

Answer = TypeVar("Answer")


class Unanswered(Exception):
    """No answer. kind: there are no credentials, or they are refused, or anything else. reason: in a sentence."""

    def __init__(self, kind: Literal["credentials", "refused", "silent"], reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows nothing: the headers would go along."""


class Api:
    """The API of one provider. called: its name in sentences. deadline: by `time.monotonic`, for all questions.

    environment: where keys and addresses come from. Every address is asked once.
    """

    def __init__(
        self, called: str, asked: Asked, *, deadline: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self.called, self.asked, self._deadline = called, asked, deadline
        self._environment = os.environ if environment is None else environment
        self._opener = urllib.request.build_opener(_NoRedirection())
        self._answers: dict[str, Any] = {}
        self._token: str | None = None

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables with the credentials: the first alternative that is set; empty where none is."""
        for names in self.asked.credentials:
            if all(self._environment.get(name) for name in names):
                return tuple(names)
        return ()

    @property
    def needed(self) -> str:
        """The alternatives in words: ``VERDA_CLIENT_ID and VERDA_CLIENT_SECRET``."""
        return ", or ".join(" and ".join(names) for names in self.asked.credentials)

    def pages(self, path: str, query: Mapping[str, str], following: str, **given: str) -> list[Any]:
        """Returns the answers of all pages; *following* is the path of the next one's address. Raises `Unanswered`."""
        answers = [self.get(path, query, **given)]
        while following and len(answers) < _MOST_PAGES and (more := first(answers[-1], following)):
            # On the same server, whatever the answer says.
            parts = urllib.parse.urlsplit(str(more))
            answers.append(self._ask(urllib.parse.urlunsplit(("", "", parts.path, parts.query, ""))))
        return answers

    def get(self, path: str, query: Mapping[str, str] | None = None, **given: str) -> Any:
        """Returns the answer to a question, read from JSON. Raises `Unanswered`."""
        quoted = {name: urllib.parse.quote(value, safe="") for name, value in given.items()}
        address = self._filled(path, quoted)
        if query:
            filled = {name: self._filled(text, given) for name, text in query.items()}
            address += f"{'&' if '?' in address else '?'}{urllib.parse.urlencode(filled)}"
        return self._ask(address)

    def _ask(self, path: str) -> Any:
        if path not in self._answers:
            self._answers[path] = self._open(path, None, self._headers())
        return self._answers[path]

    def _headers(self) -> dict[str, str]:
        if not self.variables:
            if self.asked.open:
                return {}
            raise Unanswered("credentials", f"it answers with a key only: set {self.needed}")
        token = self.asked.token
        if token is not None and self._token is None:
            body = {name: self._filled(text, {}) for name, text in token.fields.items()}
            answer = self._open(token.path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            self._token = str(first(answer, token.read) or "")
        return {name: self._filled(text, {"token": self._token or ""}) for name, text in self.asked.headers.items()}

    def _filled(self, text: str, given: Mapping[str, str]) -> str:
        keys = {str(index): self._environment.get(name, "") for index, name in enumerate(self.variables)}

        def value(found: re.Match[str]) -> str:
            name = found[1]
            known = {**keys, **given}.get(name)
            return known if known is not None else self._environment.get(name, found[0]) if name.isupper() else found[0]

        return re.sub(r"\{(\w+)\}", value, text)

    def _open(self, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        address = self._address() + path
        request = urllib.request.Request(address, body, {"Accept": "application/json", **headers})  # noqa: S310 - checked
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Unanswered("silent", "the time was over before it answered")
        try:
            with self._opener.open(request, timeout=min(left, REQUEST_SECONDS)) as response:
                return json.loads(self._read(response))
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code) from None
        except TimeoutError:
            raise Unanswered("silent", "it did not answer in time") from None
        except RecursionError:
            raise Unanswered("silent", "what it answered is not JSON") from None
        except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise Unanswered("silent", "it did not answer in time") from None
            if isinstance(error, ValueError):
                raise Unanswered("silent", "what it answered is not JSON") from None
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or str(reason) or "no reason is given"
            raise Unanswered("silent", f"it cannot be reached from here: {why}") from None

    def _address(self) -> str:
        name = self.asked.address_variable
        address = (name and self._environment.get(name)) or self.asked.address
        parts = urllib.parse.urlsplit(address)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _HERE):
            raise Unanswered("silent", f"{name} is no https address")
        return address.rstrip("/")

    def _refused(self, code: int) -> Unanswered:
        if code in (401, 403):
            if not self.variables:
                return Unanswered("credentials", f"it answers with a key only: set {self.needed}")
            return Unanswered("refused", f"it does not accept what {' and '.join(self.variables)} holds ({code})")
        if code == 429:
            return Unanswered("silent", "it takes no more questions now (429): ask again in a minute")
        return Unanswered("silent", f"it answered with the status {code}")

    def _read(self, response: HTTPResponse) -> bytes:
        """Returns the body. A server that sends it drop by drop is left at the deadline."""
        read = b""
        while piece := response.read1(_PIECE):
            read += piece
            if len(read) > _MOST_BYTES:
                raise Unanswered("silent", "its answer is too long")
            if time.monotonic() > self._deadline:
                raise Unanswered("silent", "it did not answer in time")
        return read


def at_once(ask: Callable[[str], Answer], names: Iterable[str], deadline: float) -> dict[str, Answer | Unanswered]:
    """Calls *ask* for each of *names*, all at a time; what is not there at the *deadline* is unanswered.

    The threads are left behind then, and do not keep the process.
    """
    names = list(names)
    done: queue.Queue[tuple[str, Answer | Unanswered]] = queue.Queue()

    def run(name: str) -> None:
        try:
            done.put((name, ask(name)))
        except Unanswered as error:
            done.put((name, error))

    for name in names:
        threading.Thread(target=run, args=(name,), daemon=True).start()
    found: dict[str, Answer | Unanswered] = {}
    while len(found) < len(names):
        try:
            name, answer = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[name] = answer
    late = Unanswered("silent", "it did not answer in time")
    return {name: found.get(name, late) for name in names}


def picked(value: Any, path: str) -> list[Any]:
    """Returns the values at *path*: none, one, or with ``*`` several. Null counts as nothing."""
    found = [value]
    for part in path.split(".") if path else ():
        if part == "*":
            found = [inner for each in found for inner in _entries(each)]
        else:
            found = [each[part] for each in found if isinstance(each, dict) and part in each]
    return [each for each in found if each is not None]


def _entries(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def first(value: Any, path: str) -> Any:
    """Returns the value at *path*, the first where there are several; None for nothing, or for no path."""
    found = picked(value, path) if path else []
    return found[0] if found else None


def rows(answer: Any, path: str) -> list[dict[str, Any]]:
    """Returns the objects at *path*: the entries of lists, and those of objects with their name as ``_key``."""
    found: list[dict[str, Any]] = []
    for each in picked(answer, path):
        if isinstance(each, list):
            found += [row for row in each if isinstance(row, dict)]
        elif isinstance(each, dict):
            found += [{**row, "_key": key} for key, row in each.items() if isinstance(row, dict)]
    return found


def text(row: Mapping[str, Any], spec: str) -> str:
    """Returns a path, or a text with paths in braces, as a text; "" for nothing."""
    if "{" in spec:
        return re.sub(r"\{([\w.*]+)\}", lambda found: str(first(row, found[1]) or ""), spec)
    found = first(row, spec)
    return "" if found is None else str(found)


def number(row: Mapping[str, Any], path: str, scale: float = 1.0) -> float | None:
    """Returns a number at *path*, also one that is written as a text; None for anything else, and for 0."""
    try:
        value = float(text(row, path)) * scale
    except ValueError:
        return None
    return value if value > 0 and value != float("inf") else None


def kept(row: Mapping[str, Any], where: Mapping[str, str], skip: Mapping[str, str]) -> bool:
    """Returns whether all patterns of *where* are found in the row, and none of *skip*."""
    return all(re.search(pattern, text(row, path)) for path, pattern in where.items()) and not any(
        re.search(pattern, text(row, path)) for path, pattern in skip.items()
    )
