"""Remote calls: declaring, making and answering one, and the envelope in which an answer or an error travels.

`skyinfra.protocol.services` declares the calls. An envelope is ``{"answer": VALUE}``, or ``{"error": {"class": ...,
"message": ..., "field": ..., "given": ..., "hint": ...}}``. Bytes may stand in requests and answers: Dask's comms carry
them as they are. A `_schema.Document` travels as JSON.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from skyinfra import errors
from skyinfra.errors import NodeError, NotSupported, SkyinfraError
from skyinfra.protocol._schema import Document

P = ParamSpec("P")
T = TypeVar("T")

Envelope = dict[str, Any]
# By the name of the call, as a server of Dask has them.
Handlers = dict[str, Callable[..., Awaitable[Envelope]]]


class Peer(Protocol):
    """The other side of a connection, as `distributed.rpc` offers it."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]: ...


class Call(Generic[P, T]):
    """A remote call with the parameters and the result of *signature*. read_only: it changes nothing at the peer."""

    def __init__(self, signature: Callable[P, T], *, read_only: bool) -> None:
        self.name = f"skyinfra_{signature.__name__}"
        self.read_only = read_only
        self._signature = signature

    async def __call__(self, peer: Peer, *_: P.args, **request: P.kwargs) -> T:
        """Makes the call. Raises the error of the answer, `NotSupported` where *peer* does not know the call, and
        OSError where it does not answer."""
        sent = {name: _plain(value) for name, value in request.items()} if self._readers else request
        answer = opened(await getattr(peer, self.name)(**sent), self.name)
        read = self._readers.get("return")
        return cast(T, answer if read is None else read(lists(answer)))

    def by(self, handler: Callable[P, T | Awaitable[T]]) -> tuple[str, Callable[..., Awaitable[Envelope]]]:
        """Returns an entry for `handlers`, which answers this call by *handler*."""
        work = cast(Callable[..., Any], handler)

        async def result(request: dict[str, Any]) -> object:
            for name in self._readers.keys() & request.keys():
                request[name] = self._readers[name](lists(request[name]))
            found = work(**request)
            found = await found if inspect.isawaitable(found) else found
            return _plain(found) if "return" in self._readers else found

        async def answer(**request: Any) -> Envelope:
            return await answered(result(request))

        return self.name, answer

    @cached_property
    def _readers(self) -> dict[str, Callable[[Any], object]]:
        """Read documents from JSON: by the name of the parameter, or ``return``."""
        hints = typing.get_type_hints(self._signature)
        return {name: read for name, kind in hints.items() if (read := _reader(kind)) is not None}


def call(*, read_only: bool = False) -> Callable[[Callable[P, T]], Call[P, T]]:
    """Declares the decorated function, which has no body, as a remote call; its parameters are keywords."""
    return lambda signature: Call(signature, read_only=read_only)


def handlers(*entries: tuple[str, Callable[..., Awaitable[Envelope]]]) -> Handlers:
    """Returns the handlers for a server of Dask; see `Call.by`."""
    return dict(entries)


async def answered(work: Awaitable[object], catch: type[Exception] = SkyinfraError) -> Envelope:
    """Returns the envelope with the result of *work*, or with the error of the class *catch* that it raises."""
    try:
        return {"answer": await work}
    except catch as error:
        document: dict[str, object] = {"class": type(error).__name__, "message": str(error)}
        if isinstance(error, SkyinfraError):
            given = error.given if isinstance(error.given, str | int | float) else None
            document |= {"message": error.message, "field": error.field, "given": given, "hint": error.hint}
        return {"error": _utf8(document)}


def opened(envelope: Envelope | None, name: str) -> Any:
    """The answer in the *envelope* of the call *name*. Raises its error, `NodeError` for one of an unknown class.

    Dask answers None to a call that it does not know: raises `NotSupported`.
    """
    if envelope is None:
        hint = "The fleet runs another version of skyinfra than this client or node: deploy it again."
        raise NotSupported("the head of the fleet does not know this call", given=name, hint=hint)
    if not isinstance(envelope, dict) or not envelope.keys() & {"answer", "error"}:
        raise NotSupported("the answer to this call is no envelope", given=name)
    if "error" not in envelope:
        return envelope["answer"]
    document = envelope["error"] if isinstance(envelope["error"], dict) else {}
    kind, message = str(document.get("class")), str(document.get("message"))
    details = {part: document.get(part) for part in ("field", "given", "hint")}
    if kind in errors.__all__:
        raise cast(type[SkyinfraError], getattr(errors, kind))(message, **details)
    raise NodeError(f"{kind}: {message}", **details)


def lists(value: Any) -> Any:
    """*value* with lists in place of the tuples that Dask's wire format makes of them."""
    if isinstance(value, tuple | list):
        return [lists(item) for item in value]
    if isinstance(value, dict):
        return {key: lists(item) for key, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _utf8(value.to_json()) if isinstance(value, Document) else value


def _utf8(value: Any) -> Any:
    """Returns a tree of JSON values with the names of lone surrogates, as in names of files that are not UTF-8, in
    place of them: Dask closes a connection whose message has one."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _utf8(item) for key, item in value.items()}
    return [_utf8(item) for item in value] if isinstance(value, list) else value


def _reader(kind: Any) -> Callable[[Any], object] | None:
    """Reads a document, or a list of documents; None for a *kind* that is none."""
    if typing.get_origin(kind) is list:
        read = _reader(typing.get_args(kind)[0])
        return None if read is None else lambda values: [read(value) for value in values]
    return kind.read if isinstance(kind, type) and issubclass(kind, Document) else None
