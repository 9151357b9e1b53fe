"""The accelerators that exist: catalog.json, one row for each name, memory and form factor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from skyinfra.errors import InvalidAccelerator, UnknownAccelerator, did_you_mean

_DATA = Path(__file__).with_name("catalog.json")

_WORD = re.compile(r"[A-Za-z0-9]+", re.A)
_MEMORY = re.compile(r"(\d{1,5})\s*(?:GB?)?", re.I | re.A)


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the catalog: an accelerator in one memory size and form factor.

    vendor: "nvidia", "amd", "aws", "google", "intel" or "qualcomm".
    memory_gb: nominal, in decimal GB, of one device (one GPU, one chip).
    mig_model: the key of its MIG geometry; None without MIG.
    cuda_min: the first CUDA toolkit for it, such as "11.8".
    counts: how many of them machines on offer carry; advice, not a limit. Empty where unknown.
    chips: how many chips one of it has; more than 1 for TPU slices.
    default: the row that the bare name means.
    source: the key of where the row comes from, see sources().
    """

    name: str
    vendor: str
    memory_gb: int
    source: str
    memory_type: str | None = None
    form_factor: str | None = None
    architecture: str | None = None
    mig_model: str | None = None
    cuda_min: str | None = None
    counts: tuple[int, ...] = ()
    chips: int = 1
    aliases: tuple[str, ...] = ()
    default: bool = False


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name as read: the name of the catalog, and the memory and form factor where the text has them."""

    name: str
    memory_gb: int | None = None
    form_factor: str | None = None


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data


@cache
def _by_name() -> dict[str, tuple[Variant, ...]]:
    found: dict[str, list[Variant]] = {}
    for row in _data()["accelerators"]:
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        found.setdefault(row["name"], []).append(Variant(**fields))
    return {name: tuple(rows) for name, rows in found.items()}


@cache
def _spellings() -> dict[str, Spelling]:
    """Returns every name and alias without case and separators."""
    found = {}
    for name, rows in _by_name().items():
        found[_key(name)] = Spelling(name)
        usual = next(row for row in rows if row.default)
        for row in rows:
            form = row.form_factor if row.form_factor != usual.form_factor else None
            memory = row.memory_gb if row.memory_gb != choose(name, form_factor=form).memory_gb else None
            found.update({_key(alias): Spelling(name, memory, form) for alias in row.aliases})
    return found


def names() -> tuple[str, ...]:
    """Returns the names of all accelerators, such as "H100" or "RTX 4090"."""
    return tuple(_by_name())


def aliases() -> tuple[str, ...]:
    """Other names under which accelerators are known, such as "TPUv6" or "H100-NVL"."""
    return tuple(alias for rows in _by_name().values() for row in rows for alias in row.aliases)


def sources() -> dict[str, str]:
    """Returns the texts of the keys in Variant.source."""
    return dict(_data()["sources"])


def variants(name: str) -> tuple[Variant, ...]:
    """Returns the rows of one accelerator, by its name in the catalog. Raises UnknownAccelerator."""
    rows = _by_name().get(name)
    if rows is None:
        raise unknown(name)
    return rows


def choose(name: str, memory_gb: int | None = None, form_factor: str | None = None) -> Variant:
    """Returns the row that a declaration means: the default where it matches, else the first that does.

    Raises UnknownAccelerator, and InvalidAccelerator with the memories or form factors that exist.
    """
    rows = variants(name)
    formed = [row for row in rows if form_factor in (None, row.form_factor)]
    if not formed:
        raise _no_such(name, "form_factor", form_factor, (row.form_factor for row in rows))
    sized = [row for row in formed if memory_gb in (None, row.memory_gb)]
    if not sized:
        exist = sorted({row.memory_gb for row in formed})
        place = f"{name} {form_factor}" if form_factor else name
        raise _no_such(place, "memory", f"{memory_gb}GB", (f"{each}GB" for each in exist))
    return next((row for row in sized if row.default), sized[0])


def read_name(text: str) -> Spelling:
    """Returns a name as people write it: any case; spaces, dashes or underscores; memory and form factor at its end.

    Raises UnknownAccelerator with the nearest names, and InvalidAccelerator for an end that means nothing.
    """
    words = [word for word in re.split(r"[\s_-]+", text.strip()) if word]
    if not words or not all(_WORD.fullmatch(word) for word in words):
        raise unknown(text)
    first = 0
    while first < len(words) - 1 and words[first].lower() in _data()["prefixes"]:
        first += 1
    for end in range(len(words), first, -1):
        found = _spellings().get(_key("".join(words[first:end])))
        if found:
            return _with_ending(found, words[end:], text)
    raise unknown(text)


def _with_ending(found: Spelling, words: list[str], text: str) -> Spelling:
    """Adds the words after the name to the spelling."""
    sizes = {found.memory_gb} if found.memory_gb else set()
    rest = ""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if re.fullmatch(r"\d{1,5}GB?", word, re.I | re.A) or (word.isdigit() and following.lower() == "gb"):
            sizes.add(read_memory(word))
        elif word.lower() != "gb":
            rest += word
    if len(sizes) > 1:
        given = " and ".join(f"{size}GB" for size in sorted(sizes))
        raise InvalidAccelerator(f"{text!r} names two memories", field="memory", given=given)
    form = _form_at_the_end(found, rest, text) if rest else found.form_factor
    return Spelling(found.name, next(iter(sizes), None), form)


def _form_at_the_end(found: Spelling, rest: str, text: str) -> str:
    try:
        form = read_form_factor(found.name, rest)
    except InvalidAccelerator as error:
        near = did_you_mean(text, (name for name in names() if name.startswith(f"{found.name}-")))
        raise InvalidAccelerator(
            f"{found.name} exists, but the end of {text!r} is neither a memory nor a form factor of it",
            given=rest,
            hint=near or error.hint,
        ) from None
    if found.form_factor not in (None, form):
        given = f"{found.form_factor} and {form}"
        raise InvalidAccelerator(f"{text!r} names two form factors", field="form_factor", given=given)
    return form


def read_memory(value: str | int) -> int:
    """GB from 80, "80GB" or "80 GB". Raises InvalidAccelerator."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = _MEMORY.fullmatch(value.strip()) if isinstance(value, str) else None
    if not found or not int(found[1]):
        raise InvalidAccelerator("not a memory size", field="memory", given=value, hint='Write it like "80GB" or 80.')
    return int(found[1])


def read_form_factor(name: str, text: str) -> str:
    """Returns the form factor of an accelerator, by any spelling ("sxm5", "MaxQ"). Raises InvalidAccelerator."""
    rows = variants(name)
    if isinstance(text, str):
        wanted = _key(_data()["form_factors"].get(_key(text), text))
        for row in rows:
            if row.form_factor and _key(row.form_factor) == wanted:
                return row.form_factor
    raise _no_such(name, "form_factor", text, (row.form_factor for row in rows))


# As others write a number of accelerators: ``8xH100``, ``H100x8``.
_COUNTED = re.compile(r"(?:(\d+)\s*[x*]\s*([A-Za-z].*)|([A-Za-z].*?)\s*[x*]\s*(\d+))")


def unknown(text: str) -> UnknownAccelerator:
    """Returns the error for a name that is not in the catalog, with the nearest ones."""
    hint = did_you_mean(text, (*names(), *aliases())) or "skyinfra.accelerators.names() lists all of them."
    if counted := _COUNTED.fullmatch(text.strip()):
        before, first, second, behind = counted.groups()
        hint = f'The number comes after a colon: "{first or second}:{before or behind}".'
    return UnknownAccelerator("no accelerator of that name", given=text, hint=hint)


def _no_such(name: str, field: str, given: object, exist: Iterable[str | None]) -> InvalidAccelerator:
    known = [each for each in dict.fromkeys(exist) if each]
    hint = f"It exists with {', '.join(known)}." if known else f"The catalog has no {field} for it."
    return InvalidAccelerator(f"{name} does not exist with that {field}", field=field, given=given, hint=hint)


def _key(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).lower()
