"""Prices that were asked of the providers, kept in the user's cache folder: ``skyinfra offers --refresh``.

They count in ``skyinfra offers`` alone: what a declaration selects comes of the shipped offers, the same for everybody.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from skyinfra.errors import counted
from skyinfra.offers import EVERYWHERE, Offer, Price, load
from skyinfra.preflight.listing import Listed, listed
from skyinfra.preflight.live_offers import SECONDS, made
from skyinfra.preflight.rest import Api, Unanswered, at_once
from skyinfra.providers import kinds, read
from skyinfra.providers.preflight_requests import Asked

# A price so many times that of before, or less, is a change of units or of what is sold, and is refused.
_TIMES = 10.0
_FIELDS = ("on_demand", "spot")
_UNASKED = "its prices are not asked: its API takes signed questions, or tells none"

Prices = dict[tuple[str, str], dict[str, Price]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one provider. result: asked; credentials are missing; nothing can be asked; or it failed.

    prices, changed, refused: how many were read, differ from those of before, and were not believed. says: a sentence.
    """

    provider: str
    result: Literal["asked", "credentials", "nothing", "failed"]
    says: str
    prices: int = 0
    changed: int = 0
    refused: int = 0

    def __str__(self) -> str:
        return f"{self.provider}: {self.says}."


def cache_file(environment: Mapping[str, str] | None = None) -> Path:
    """Returns the path of the cached prices, in the folder that XDG_CACHE_HOME names, else ``~/.cache``."""
    given = (os.environ if environment is None else environment).get("XDG_CACHE_HOME", "")
    folder = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return folder / "skyinfra" / "prices.json"


def refresh(
    providers: Sequence[str] = (),
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    today: str | None = None,
) -> list[Answer]:
    """Asks *providers*, or all, at a time and no longer than *seconds* in all; writes what they answer into *file*.

    A provider that fails keeps its prices of before, and stops no other. Raises OSError where *file* cannot be written.
    """
    file, today = file or cache_file(environment), today or datetime.now(UTC).strftime("%Y-%m-%d")
    tables = {kind: read(kind).preflight for kind in kinds() if not providers or kind in providers}
    asked = {kind: table for kind, table in tables.items() if table is not None and table.machines}
    deadline = time.monotonic() + seconds

    def ask(kind: str) -> list[Listed]:
        names = [offer.machine_type for offer in load() if offer.provider == kind]
        return listed(
            Api(read(kind).about.called, asked[kind], deadline=deadline, environment=environment), names=names
        )

    found = at_once(ask, asked, deadline)
    known, renewed, answers = _known(_read(file)), _read(file), []
    for kind, table in tables.items():
        answer = found.get(kind)
        if table is None or answer is None:
            answers.append(Answer(kind, "nothing", (table and (table.nothing or table.unasked)) or _UNASKED))
        elif isinstance(answer, Unanswered):
            missing = answer.kind == "credentials"
            answers.append(Answer(kind, "credentials" if missing else "failed", answer.reason))
        else:
            new = _prices(kind, table, answer, today)
            kept = {key: price for key, price in new.items() if _believed(price, known.get((kind, *key)))}
            for (name, field), price in kept.items():
                renewed.setdefault((kind, name), {})[field] = price
            answers.append(_answer(kind, table, kept, known, len(new) - len(kept)))
    if any(answer.result == "asked" for answer in answers):
        _write(file, renewed)
    return answers


def with_cached(offers: Iterable[Offer], file: Path | None = None) -> tuple[Offer, ...]:
    """Returns the *offers* with the prices of the cache that are newer than theirs."""
    cached = _read(file or cache_file())

    def newest(offer: Offer) -> Offer:
        newer = {
            field: price
            for field, price in cached.get((offer.provider, offer.machine_type), {}).items()
            if (before := getattr(offer, field)) is None or before.date < price.date
        }
        if not newer:
            return offer
        day = max(price.date for price in newer.values())
        changes: dict[str, Any] = {**newer, "source": f"{offer.source}; asked on {day}"}
        return replace(offer, **changes)

    return tuple(map(newest, offers))


def _answer(
    kind: str,
    table: Asked,
    kept: Mapping[tuple[str, str], Price],
    known: Mapping[tuple[str, str, str], Price],
    refused: int,
) -> Answer:
    if not kept and not refused:
        why = "its answer has no price in USD of a machine type that the offers have: the prices of before stay"
        priced = any(each.price or each.spot for each in table.machines)
        return Answer(kind, "failed", why) if priced else Answer(kind, "nothing", table.unasked or _UNASKED)
    changed = sum((before := known.get((kind, *key))) is None or _differs(before, new) for key, new in kept.items())
    says = f"asked, {counted(len(kept), 'price')}, {changed} changed"
    if refused:
        says += f"; {refused} not taken, {_TIMES:g} times or a tenth of the price of before"
    return Answer(kind, "asked", says, len(kept), changed, refused)


def _differs(before: Price, new: Price) -> bool:
    return abs(before.usd_per_hour - new.usd_per_hour) > 0.00005


def _believed(price: Price, before: Price | None) -> bool:
    return before is None or before.usd_per_hour / _TIMES < price.usd_per_hour < before.usd_per_hour * _TIMES


def _prices(kind: str, table: Asked, machines: Iterable[Listed], today: str) -> dict[tuple[str, str], Price]:
    """Returns the prices of shipped machine types, by name and field.

    The machines of a marketplace have names that perish: the cheapest of the same accelerator, count and size counts.
    """
    perish = any(each.cheapest is not None for each in table.machines)
    shipped = [offer for offer in load() if offer.provider == kind]
    found: dict[tuple[str, str], Price] = {}
    for machine in machines:
        offer = made(kind, machine, today)
        alike = [each for each in shipped if offer and same(each, offer, perish=perish)]
        for each in alike:
            for field, usd in zip(_FIELDS, (machine.on_demand, machine.spot), strict=True):
                before = found.get((each.machine_type, field))
                if usd is not None and (before is None or usd < before.usd_per_hour):
                    price = Price(round(usd, 6), machine.priced_in or EVERYWHERE, today)
                    found[each.machine_type, field] = price
    return found


def same(shipped: Offer, offer: Offer, *, perish: bool) -> bool:
    """Returns whether an *offer* is the *shipped* one, or where names *perish* one like it."""
    if not perish:
        return shipped.machine_type == offer.machine_type
    sizes = (shipped.accelerator, shipped.count, shipped.memory_gb, shipped.form_factor)
    return sizes == (offer.accelerator, offer.count, offer.memory_gb, offer.form_factor)


def _known(cached: Prices) -> dict[tuple[str, str, str], Price]:
    """Returns every price that can be believed, of the offers and above them of the cache."""
    known: dict[tuple[str, str, str], Price] = {}
    for offer in load():
        for field in _FIELDS:
            price = offer.price(spot=field == "spot")
            if price is not None:
                known[offer.provider, offer.machine_type, field] = price
    for (kind, name), prices in cached.items():
        known |= {(kind, name, field): price for field, price in prices.items()}
    return known


def _read(file: Path) -> Prices:
    """Returns the cached prices; what cannot be read counts as none."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["prices"]
        found: Prices = {}
        for kind, name, field, given in rows:
            price = Price(float(given["usd_per_hour"]), str(given["region"]), str(given["date"]))
            if field in _FIELDS and 0 < price.usd_per_hour < float("inf"):
                found.setdefault((str(kind), str(name)), {})[field] = price
        return found
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _write(file: Path, prices: Prices) -> None:
    """Writes all at once: another program that reads has the old ones or the new ones."""
    rows = [[*key, field, asdict(price)] for key, each in sorted(prices.items()) for field, price in each.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps({"prices": rows}, indent=1) + "\n", encoding="utf-8")
    new.replace(file)
