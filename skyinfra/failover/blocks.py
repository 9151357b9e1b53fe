"""The places that a refusal blocks, and for how long: by the zone, region or cloud that the answer names."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from skyinfra.declared import seconds_of
from skyinfra.errors import counted
from skyinfra.failover.live_places import Known
from skyinfra.places.choices import Choice, Refused
from skyinfra.providers import read, sold_by
from skyinfra.terraform.cloud_errors import Refusal
from skyinfra.terraform.synthesized import SynthesizedStack

# A place as the synthesized stack describes it; see `skyinfra.stack.describe`.
Place = Mapping[str, Any]
_WORDS = 300
_UNITS = ((1440, "day"), (60, "hour"))


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("answers.toml").read_text(encoding="utf-8"))


def moves(cause: str) -> bool:
    """Returns whether a refusal for that cause is a reason to try another place. Credentials, say, are none."""
    return cause in _table()["keeps"]


def refused(refusal: Refusal, place: Place, text: str, now: datetime) -> Refused:
    """Returns the record of a *refusal* by a *place*. text: all that the cloud said."""
    words = refusal.words[:_WORDS] or refusal.says
    where = _where(refusal.cause, place, text)
    return Refused(place["place"], now.isoformat(timespec="seconds"), refusal.cause, where, refusal.code, words)


def _where(cause: str, place: Place, text: str) -> dict[str, str]:
    """Returns the finest part of the cloud that the answer names; empty where it names none."""
    for row in _table()["answers"]:
        match = re.search(row["pattern"], text) if row["provider"] == sold_by(place["provider"]) else None
        if match is None:
            continue
        named = next(((name, value) for name, value in match.groupdict().items() if value), None)
        found = {"provider": str(place["provider"])}
        if named is not None:
            found["region" if named[0] == "region" else "zone"] = named[1]
        elif row["level"] == "region" and place.get("region"):
            found["region"] = place["region"]
        if row.get("level") != "cloud":
            found["machine"] = place["machine_types"][0]
        # What one account may not have, another may; what a cloud has not, none gets.
        if cause == "QuotaExceeded" and place.get("account"):
            found["account"] = place["account"]
        return found
    return {}


@dataclass(frozen=True)
class PlaceState:
    """How a place of a pool stands. until: to when it is blocked, by *why*; None where it is not blocked.

    last: its last refusal, which may block nothing any more. known: what its cloud has said now.
    """

    place: Place
    selected: bool
    until: datetime | None = None
    why: Refused | None = None
    missing: str = ""
    last: Refused | None = None
    known: Known = field(default_factory=Known)

    @property
    def free(self) -> bool:
        """Whether it may be tried."""
        return self.until is None and not self.missing and not self.known.too_dear

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all nodes: now, else as it is shipped."""
        shipped: float | None = self.place.get("usd_per_hour")
        return shipped if self.known.usd_per_hour is None else self.known.usd_per_hour


def cheapest_first(states: Sequence[PlaceState]) -> list[PlaceState]:
    """Returns the places in the order of their prices; those behind all others where a deploy would fail."""
    return sorted(states, key=lambda each: (bool(each.known.problem), each.usd_per_hour is None, each.usd_per_hour))


def place_states(
    pool: Mapping[str, Any], choice: Choice, now: datetime, *, environment: Mapping[str, str] | None = None
) -> list[PlaceState]:
    """Returns how the places of *pool* stand, in the order in which they are tried.

    environment: in which credentials are looked for; None where they are elsewhere, as in HCP Terraform.
    """
    return [_state(place, pool["place"], choice, now, environment) for place in pool["places"]]


def _state(
    place: Place, selected: str, choice: Choice, now: datetime, environment: Mapping[str, str] | None
) -> PlaceState:
    ends = [(_until(each), each) for each in choice.refused if _is_about(each, place)]
    until, why = max(
        ((end, each) for end, each in ends if end > now),
        # What a place said itself is said before what another said of it.
        key=lambda row: (row[1].place == place["place"], row[0]),
        default=(None, None),
    )
    missing = "" if environment is None else missing_credentials(place, environment)
    last = max(aged([each for _, each in ends], now), key=lambda each: each.at, default=None)
    return PlaceState(place, place["place"] == selected, until, why, missing, last)


def _until(given: Refused) -> datetime:
    keeps = timedelta(seconds=seconds_of(_table()["keeps"].get(given.cause, "1h")))
    return moment(given) + keeps


def moment(given: Refused) -> datetime:
    """Returns when a place refused."""
    try:
        at = datetime.fromisoformat(given.at)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _is_about(given: Refused, place: Place) -> bool:
    if given.place == place["place"]:
        return True
    zones, machines = place.get("zones") or (), place["machine_types"]
    values = {**place, "zone": zones[0] if zones else None, "machine": machines[0]}
    return bool(given.where) and all(values.get(name) == value for name, value in given.where.items())


def aged(choice: Sequence[Refused], now: datetime) -> tuple[Refused, ...]:
    """Returns the refusals that still block something, or are no older than a week, as a hint for a person."""
    remembered = timedelta(seconds=seconds_of(_table()["remembered"]))
    return tuple(each for each in choice if _until(each) > now or now - moment(each) < remembered)


def ago(given: Refused, now: datetime) -> str:
    """Returns how old a refusal is, in words."""
    minutes = int((now - moment(given)).total_seconds() // 60)
    count, unit = next(
        ((minutes // size, name) for size, name in _UNITS if minutes >= 2 * size), (max(minutes, 0), "minute")
    )
    return f"{counted(count, unit)} ago"


def missing_credentials(place: Place, environment: Mapping[str, str]) -> str:
    """Says which variables with credentials are not set, where Terraform finds them nowhere else; else empty."""
    asked = read(place["provider"]).preflight
    if asked is None or asked.elsewhere or not asked.credentials or place.get("own"):
        return ""
    if any(all(environment.get(name) for name in names) for names in asked.credentials):
        return ""
    needed = " or ".join(" and ".join(names) for names in asked.credentials)
    return f"no credentials: {needed} not set. {asked.login}".strip()


def environment_of(stack: SynthesizedStack) -> Mapping[str, str] | None:
    """Returns the environment in which Terraform looks for credentials; None where it may run elsewhere."""
    return None if stack.runs_elsewhere else os.environ
