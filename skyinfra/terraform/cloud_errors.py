"""Known error codes of clouds in Terraform's diagnostics, from the data of the providers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from skyinfra import errors
from skyinfra.errors import CloudRefused

# (address of the resource or provider, Terraform's summary and detail)
Diagnostic = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A known refusal by a cloud.

    cause: name of the exception class. code: the cloud's own; empty where it gave none. address: of the resource or of
    the Terraform provider. says: what it means. words: the cloud's own sentence. hint: what would work.
    action: the permission that is missing, such as ``ec2:RunInstances``.
    """

    cause: str
    code: str
    address: str
    says: str
    words: str
    hint: str
    action: str = ""

    @property
    def pool(self) -> str | None:
        """The pool that the resource belongs to."""
        found = re.match(r"module\.([a-z][a-z0-9-]*)(?:__[a-z0-9-]+)?[.\[]", self.address)
        return found[1] if found else None

    @property
    def where(self) -> str:
        """The pool and the resource, as a person names them."""
        if self.pool is None:
            return self.address
        return f"pool {self.pool} ({self.address.partition('.')[2].partition('.')[2]})"


@dataclass(frozen=True, slots=True)
class _Known:
    prefix: str
    cause: str
    code: re.Pattern[str] | None
    text: re.Pattern[str] | None
    says: str
    hint: str


@cache
def _known() -> tuple[_Known, ...]:
    from skyinfra.providers import kinds, read  # only where something has failed

    return tuple(
        _Known(
            data.terraform["name"],
            row["cause"],
            _pattern(row["codes"]),
            re.compile("|".join(row["texts"])) if row["texts"] else None,
            row["says"],
            row["hint"],
        )
        for data in map(read, kinds())
        for row in data.errors
    )


def _of(address: str) -> tuple[_Known, ...]:
    """The rows of the cloud that the resource, or provider, at *address* belongs to; all where that is not known.

    Those of AWS where there is none: so speaks a backend, and registries and HCP Terraform, whose words are not a
    cloud's.
    """
    if not address:
        return tuple(known for known in _known() if known.prefix == "aws")
    # Of a beta provider, such as google-beta, the cloud is the same.
    named = {part.partition("_")[0].removesuffix("-beta") for part in re.split(r"[./\[\]\"]", address)}
    found = tuple(known for known in _known() if known.prefix in named)
    of_another = re.match(r"(module\.[^.]+\.)*(data\.)?(?!terraform_data)[a-z0-9]+_\w+\.|provider\[", address)
    return found or (() if of_another else _known())


def _pattern(codes: Sequence[str]) -> re.Pattern[str] | None:
    """Returns a pattern for *codes* as cloud SDKs print them: ``api error CODE: ..``, ``CODE: ..``, ``CODE - ..``.

    ``AuthFailure.ServiceLinkedRoleCreationNotPermitted`` is another code than ``AuthFailure``.
    """
    names = "|".join(map(re.escape, codes))
    return re.compile(rf"(?<![\w.-])({names})(?=: | - )|(?<=api error )({names})(?!\.?\w)") if codes else None


def refusals(diagnostics: Sequence[Diagnostic]) -> tuple[Refusal, ...]:
    """Returns the known refusals among *diagnostics*, in their order."""
    return tuple(found for address, text in diagnostics if (found := _read(address, text)) is not None)


def _read(address: str, text: str) -> Refusal | None:
    if "provisioner error" in text:  # what a program printed, not what a cloud said
        return None
    for known in _of(address):
        code = known.code.search(text) if known.code else None
        other = known.text.search(text) if known.text and not code else None
        if code is None and other is None:
            continue
        words = _words(text[code.end() :]) if code else _words(_sentences(text, other))
        name = (code[1] or code[2]) if code else ""
        return Refusal(known.cause, name, address, known.says, words, known.hint, action=_action(text))
    return None


def _sentences(text: str, found: re.Match[str] | None) -> str:
    """Returns the line that *found* is in, from the beginning of its sentence."""
    if found is None:
        return ""
    ends = (
        text.rfind(mark, 0, found.start()) + len(mark)
        for mark in (": ", ". ", "\n", "- ")
        if mark in text[: found.start()]
    )
    return text[max(ends, default=0) :]


def _words(text: str) -> str:
    """Returns the cloud's own sentence, without encoded parts."""
    line = text.lstrip(" :-\n").partition("\n")[0]
    line = re.sub(r"\s*Encoded authorization failure message: \S+", "", line)
    return re.sub(r"\s*(Launching EC2 instance failed\.|\(?[Rr]equest ?ID: [\w-]+\)?,?)", "", line).strip()


def _action(text: str) -> str:
    named = re.search(r"not authorized to perform: ([\w-]+:\w+)", text)
    if named:
        return named[1]
    called = re.search(r"operation error ([\w ]+): (\w+)", text)
    return f"{called[1].lower().replace(' ', '')}:{called[2]}" if called else ""


def explain(command: str, diagnostics: Sequence[Diagnostic]) -> CloudRefused | None:
    """Returns the error for a terraform *command* that ended with *diagnostics*; None where nothing in them is known.

    Its class is that of the first cause. The message names every refusal once for each pool; what is not known is said
    in Terraform's own words.
    """
    found = refusals(diagnostics)
    if not found:
        return None
    groups: dict[tuple[str, str | None, str], list[Refusal]] = {}
    for refusal in found:
        groups.setdefault((refusal.says, refusal.pool, refusal.words), []).append(refusal)
    known = {(refusal.address, refusal.words) for refusal in found}
    lines = [_line(group) for group in groups.values()]
    lines += [
        f"{address}: {text}" if address else text
        for address, text in diagnostics
        if not _is_known(address, text, known)
    ]
    kind: type[CloudRefused] = getattr(errors, found[0].cause)
    hints = dict.fromkeys(refusal.hint for refusal in found)
    error = kind(f"terraform {command} failed\n" + "\n".join(lines), hint="\n".join(hints))
    error.diagnostics = tuple(diagnostics)
    return error


def _is_known(address: str, text: str, known: set[tuple[str, str]]) -> bool:
    refusal = _read(address, text)
    return refusal is not None and (address, refusal.words) in known


def _line(group: Sequence[Refusal]) -> str:
    first = min(group, key=lambda refusal: refusal.address)
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    code = f" ({first.code})" if first.code else ""
    action = f": {first.action}" if first.action and first.cause == "CloudPermissionDenied" else ""
    said = f". It says: {first.words}" if first.words else "."
    where = f"{first.where}{more}: " if first.where else ""
    return f"{where}{first.says}{action}{code}{said}"
