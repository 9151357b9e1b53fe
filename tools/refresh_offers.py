"""Renew the prices of the table that build_offers.py reads, from lists that are published.

    python tools/refresh_offers.py [--table INSTANCES.csv] [--write] [--drop] PROVIDER=FILE[@YYYY-MM-DD] ...

It prints what changes: prices and by how much, machine types that are new, and those that a list has no longer. With
--write the table, tools/instances.csv unless another is given, is written; build_offers.py makes the offers of it. A
file is read as what it is:

- a catalog in the form of SkyPilot's (vms.csv): prices by region, and machine types that the table has not;
- the price lists of Karpenter's providers for AWS and Azure (zz_generated.pricing*.go), which say their own dates;
- that of its provider for Google Cloud (initial-prices.json), whose date is that of the commit;
- AWS's spot advisor (spot-advisor-data.json): a spot price is the on-demand price less the advisor's saving, so it
  comes after the price list;
- a list of offerings as those of tardellirs/gpu-pricing (offerings.json), whose entries say their own dates.

A row keeps the region of its price where the list has that region, and takes the cheapest elsewhere. What a list has no
price for stays as it is. A machine type that a catalog has no longer stays too, unless --drop is given: those lists
leave out what is sold out.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from skyinfra.errors import SkyinfraError  # noqa: E402 - the script runs from a checkout
from tools import build_offers  # noqa: E402 - the script runs from a checkout

Row = dict[str, str]
LABELS = {"on_demand": "on demand", "spot": "spot"}

_ARGUMENT = re.compile(r"(?P<provider>[a-z0-9-]+)=(?P<file>.+?)(?:@(?P<day>\d{4}-\d\d-\d\d))?")
_GENERATED = re.compile(r"// generated at (\d{4}-\d\d-\d\d)")
_REGION = re.compile(r'\s*(?:initialOnDemandPrices\[)?"([a-z0-9-]+)"(?:: |\] = map.*)\{')
_PRICE = re.compile(r'"([\w.-]+)": +([0-9.]+)')
_TIER = re.compile(r" \((community|secure|spot)\)$")
_RENEWED = re.compile(r"; prices \S+ of \d{4}-\d\d-\d\d$")
# Notes on the price that a row had, which say nothing about another one.
_OF_OLD_PRICE = re.compile(
    r"SUSPECT: .*|a3-highgpu-1g on-demand list was .*|spot derived: .*|list price EUR .*|converted .*"
)
_AS_HIGH = (
    "SUSPECT: spot >= 80% of on-demand in the source (SKU mismatch, probably the DWS/flex price taken as on-demand"
)
_TIMES = "price and size are"
_RUNPOD_GIB = 1024
"""Below this many, what a catalog calls MiB of device memory are GiB: RunPod's does so."""


@dataclass(frozen=True)
class Seen:
    """One machine type in one place, as a list has it. *sizes* are the other columns, where a list has them.

    *memory* tells apart what has one name in the table, with devices of several sizes.
    """

    machine_type: str
    region: str
    on_demand: float | None
    spot: float | None
    sizes: Row = field(default_factory=dict)
    note: str = ""
    memory: str = ""


@dataclass(frozen=True)
class Listing:
    """The rows of one file for one provider. *whole* says that it has every machine type that is sold."""

    provider: str
    name: str
    day: str
    seen: list[Seen]
    whole: bool = False


@dataclass
class Changes:
    """The changes that one file made."""

    listing: Listing
    renewed: int = 0
    prices: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def told(self, dropped: bool) -> list[str]:
        """The lines of the report."""
        listing = self.listing
        head = f"{listing.provider}, {listing.name} of {listing.day}: "
        head += f"{self.renewed} prices renewed, {len(self.prices)} moved"
        removed = "removed" if dropped else "no longer listed, kept"
        named = [*((" added", each) for each in self.added), *((f" {removed}", each) for each in self.gone)]
        named += [(" left out", each) for each in self.left_out]
        return [head, *(f"  {each}" for each in self.prices), *(f" {label}: {each}" for label, each in named)]


# Reading


def catalog(provider: str, name: str, text: str, day: str, rows: list[Row]) -> Listing:
    """A catalog in the form of SkyPilot's: one line for each machine type and region or zone.

    Google's has the devices in lines of their own, without a machine type: a price is that of both lines.
    """
    lines = list(csv.DictReader(text.splitlines()))
    devices = {_device(line["AcceleratorName"], line): line for line in lines if not line["InstanceType"]}
    ours = {row["instance_type"]: row for row in rows}
    seen = []
    for line in lines:
        machine_type, accelerator, parts = line["InstanceType"], line["AcceleratorName"], [line]
        if provider == "gcp-tpu":
            machine_type = accelerator.removeprefix("tpu-") if accelerator.startswith("tpu-") else ""
        elif accelerator.startswith("tpu-"):
            continue
        elif machine_type and not accelerator and (row := ours.get(machine_type)):
            device = devices.get(_device(row["accelerator"], line, row["accel_count"]))
            accelerator, parts = row["accelerator"] if device else "", [line, *filter(None, [device])]
        if machine_type and accelerator:
            on_demand, spot = (_sum(parts, column) for column in ("Price", "SpotPrice"))
            seen.append(Seen(machine_type, line["Region"], on_demand, spot, _sizes(line)))
    return Listing(provider, name, day, seen, whole=True)


def _device(accelerator: str, line: Row, count: str = "") -> tuple[str, float, str]:
    return accelerator, float(count or line["AcceleratorCount"] or 0), line.get("AvailabilityZone") or line["Region"]


def _sum(lines: list[Row], column: str) -> float | None:
    """The price of several lines together; none where one of them has none."""
    prices = [float(line[column] or 0) for line in lines]
    return round(sum(prices), 4) if all(prices) else None


def _sizes(line: Row) -> Row:
    return {
        "accelerator": line["AcceleratorName"],
        "accel_count": line["AcceleratorCount"],
        "accel_mem_gib_each": _memory(line.get("GpuInfo") or ""),
        "vcpu": line["vCPUs"],
        "ram_gib": line["MemoryGiB"],
    }


def _memory(text: str) -> str:
    """The GiB of one device in a catalog's GpuInfo, which is JSON or a dictionary as Python writes it."""
    try:
        told = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        try:
            told = json.loads(text)
        except ValueError:
            return ""
    try:
        size = float(told["Gpus"][0]["MemoryInfo"]["SizeInMiB"])
    except (TypeError, KeyError, IndexError):
        return ""
    return f"{size if size < _RUNPOD_GIB else size / 1024:g}"


def price_list(provider: str, name: str, text: str, day: str, rows: list[Row]) -> Listing:
    """Karpenter's list of on-demand prices of AWS or Azure, of the machine types that the table has."""
    known, region, seen = {row["instance_type"] for row in rows}, "", []
    for line in text.splitlines():
        if start := _REGION.match(line):
            region = start[1]
        for machine_type, price in _PRICE.findall(line):
            if machine_type in known:
                seen.append(Seen(machine_type, region, float(price), None))
    return Listing(provider, name, day, seen)


def regional(provider: str, name: str, text: str, day: str, rows: list[Row]) -> Listing:
    """Karpenter's prices of Google Cloud by region and purchase, of the machine types that the table has."""
    known, seen = {row["instance_type"] for row in rows}, []
    for region, prices in json.loads(text)["prices"].items():
        on_demand, spot = prices.get("on_demand", {}), prices.get("spot", {})
        for machine_type in sorted(known & {*on_demand, *spot}):
            both = (round(each[machine_type], 4) if machine_type in each else None for each in (on_demand, spot))
            seen.append(Seen(machine_type, region, *both))
    return Listing(provider, name, day, seen)


def advisor(provider: str, name: str, text: str, day: str, rows: list[Row]) -> Listing:
    """AWS's spot advisor: a saving on the on-demand price, so only of the region whose price a row has."""
    advice, seen = json.loads(text)["spot_advisor"], []
    for row in rows:
        region, price = row["on_demand_region"], row["on_demand_usd_h"]
        told = advice.get(region, {}).get("Linux", {}).get(row["instance_type"])
        if told and price:
            spot = round(float(price) * (1 - told["s"] / 100), 4)
            note = f"spot derived: on-demand x (1-{told['s']}% advisor saving), interruption band r={told['r']}"
            seen.append(Seen(row["instance_type"], region, None, spot, note=note))
    return Listing(provider, name, day, seen)


def offerings(provider: str, name: str, text: str, day: str, rows: list[Row]) -> Listing:
    """A list that names the device and not the machine type: the prices of the rows that one entry fits."""
    entries = [each for each in json.loads(text) if each["provider_id"] == provider]
    seen = []
    for row in rows:
        prices = {each["price_usd_hour"] for each in entries if _fits(row, each)}
        twins = [each for each in rows if all(each[key] == row[key] for key in ("instance_type", "accel_mem_gib_each"))]
        if len(prices) == 1 and len(twins) == 1:
            price = round(float(prices.pop()) * float(row["accel_count"]), 4)
            is_spot = bool(row["spot_usd_h"] and not row["on_demand_usd_h"])
            on_demand, spot = (None, price) if is_spot else (price, None)
            seen.append(Seen(row["instance_type"], "", on_demand, spot, memory=row["accel_mem_gib_each"]))
    return Listing(provider, name, max((each["collected_at"] for each in entries), default=day), seen)


def _fits(row: Row, entry: dict[str, Any]) -> bool:
    tier = _TIER.search(row["instance_type"])
    same = entry["gpu_model"] == row["accelerator"] and float(entry["vram_gb"]) == float(row["accel_mem_gib_each"])
    return same and (tier is None or tier[1] == entry["tier"]) and (row["accel_count"] == "1" or _TIMES in row["notes"])


Reader = Callable[[str, str, str, str, list[Row]], Listing]


def read(argument: str, rows: list[Row]) -> Listing:
    """Reads the argument PROVIDER=FILE[@DATE]."""
    if not (parts := _ARGUMENT.fullmatch(argument)):
        raise SystemExit(f"{argument!r} is no PROVIDER=FILE[@YYYY-MM-DD]")
    path, day = Path(parts["file"]), parts["day"] or ""
    text = path.read_text(encoding="utf-8")
    reader: Reader
    if path.suffix == ".csv":
        reader = catalog
    elif generated := _GENERATED.search(text[:5000]):
        reader, day = price_list, day or generated[1]
    elif text.startswith('{"prices":'):
        reader = regional
    elif '"spot_advisor"' in text:
        reader = advisor
    else:
        reader = offerings
    listing = reader(
        parts["provider"], path.name, text, day, [row for row in rows if row["provider"] == parts["provider"]]
    )
    if not listing.day:
        raise SystemExit(f"{path} does not say of which day it is: write {argument}@YYYY-MM-DD")
    return listing


# Renewing


def renew(rows: list[Row], listing: Listing, drop: bool) -> tuple[list[Row], Changes]:
    """The rows with what *listing* says, and what that changed."""
    if not any(row["provider"] == listing.provider for row in rows):
        raise SystemExit(f"the table has no rows of {listing.provider!r}")
    changes = Changes(listing)
    listed: dict[str, list[Seen]] = {}
    for each in listing.seen:
        listed.setdefault(each.machine_type, []).append(each)
    kept: list[Row] = []
    end = 0
    for row in rows:
        ours = row["provider"] == listing.provider
        places = listed.get(row["instance_type"], []) if ours else []
        places = [each for each in places if each.memory in ("", row["accel_mem_gib_each"])]
        if ours and listing.whole and not places and _was_listed(row):
            changes.gone.append(row["instance_type"])
        if not (drop and row["instance_type"] in changes.gone and ours):
            kept.append(_renewed(row, places, changes) if places else row)
        end = len(kept) if ours else end
    if listing.whole:
        known = {row["instance_type"] for row in rows if row["provider"] == listing.provider}
        new = [places for name, places in listed.items() if name not in known]
        kept[end:end] = [row for places in new for row in _new(places, list(rows[0]), changes)]
    return kept, changes


def _was_listed(row: Row) -> bool:
    """Whether a catalog had the row: none has parts of devices, or accelerators without a machine."""
    priced = row["on_demand_usd_h"] or row["spot_usd_h"]
    return bool(priced) and not row["accel_fraction"] and "accelerator price only" not in row["notes"]


def _renewed(row: Row, places: list[Seen], changes: Changes) -> Row:
    row = dict(row)
    listing, found = changes.listing, False
    for kind, label in LABELS.items():
        best = _place(row, places, kind)
        if best is None:
            continue
        before, price = row[f"{kind}_usd_h"], getattr(best, kind)
        region = best.region or row[f"{kind}_region"]
        if moved := _moved(before, price):
            changes.prices.append(f"{row['instance_type']}: {label} {moved}{f' in {region}' if region else ''}")
        row |= {f"{kind}_usd_h": f"{price:g}" if price < 1e5 else str(price)}
        row |= {f"{kind}_region": region, f"{kind}_date": listing.day}
        row["notes"] = _noted(row, kind, best.note)
        changes.renewed += 1
        found = True
    if found and listing.name not in row["source"]:
        row["source"] = f"{_RENEWED.sub('', row['source'])}; prices {listing.name} of {listing.day}"
    if listing.whole:
        row["regions"] = _regions(places)
    return row


def _place(row: Row, places: list[Seen], kind: str) -> Seen | None:
    """Returns the region whose price the row takes: its own, else the cheapest."""
    priced = [each for each in places if getattr(each, kind) is not None]
    here = [each for each in priced if each.region == row[f"{kind}_region"] and "lowest offer" not in row["notes"]]
    return min(here or priced, key=lambda each: (getattr(each, kind), each.region), default=None)


def _moved(before: str, price: float) -> str:
    if not before:
        return f"none -> ${price:g}"
    was = float(before)
    if abs(price - was) < 0.00005:
        return ""
    share = f" ({(price / was - 1) * 100:+.0f} %)" if was else ""
    return f"${was:g} -> ${price:g}{share}"


def _noted(row: Row, kind: str, more: str) -> str:
    """The notes without those on the price that went, and with what is to be said about the new one."""
    kept = []
    for part in filter(None, row["notes"].split("; ")):
        derived = part.startswith("spot derived")
        if derived is (kind == "spot") and _OF_OLD_PRICE.fullmatch(part):
            continue
        kept.append(part)
    on_demand, spot = (float(row[f"{each}_usd_h"] or 0) for each in LABELS)
    if row["provider"] == "gcp" and 0.8 * on_demand <= spot < on_demand and _AS_HIGH not in kept:
        kept.append(_AS_HIGH)
    return "; ".join([*filter(None, [more]), *kept])


def _regions(places: Iterable[Seen]) -> str:
    regions = sorted({each.region for each in places if each.region})
    return " | ".join(regions) if any(" " in each or "," in each for each in regions) else " ".join(regions)


def _new(places: list[Seen], columns: list[str], changes: Changes) -> Iterator[Row]:
    """The row of a machine type that the table has not, unless it cannot become an offer."""
    listing, first = changes.listing, places[0]
    if float(first.sizes["accel_count"] or 0) < 1:
        changes.left_out.append(f"{first.machine_type} (a part of a device: to be written by hand)")
        return
    row = dict.fromkeys(columns, "") | first.sizes
    row |= {"provider": listing.provider, "instance_type": first.machine_type, "regions": _regions(places)}
    row["source"] = f"{listing.name} of {listing.day}"
    quiet = Changes(listing)
    row = _renewed(row, places, quiet)
    try:
        build_offers.offer(row, set())
    except (SystemExit, ValueError, SkyinfraError) as error:
        why = str(error).splitlines()[0]
        changes.left_out.append(f"{first.machine_type} ({why})")
        return
    changes.added.append(
        f"{first.machine_type}: {row['accel_count']} x {row['accelerator']}, ${row['on_demand_usd_h'] or '?'}"
    )
    yield row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=build_offers.TABLE)
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--drop", action="store_true", help="remove what a catalog has no longer")
    parser.add_argument("lists", nargs="+", metavar="PROVIDER=FILE[@DATE]")
    given = parser.parse_args(arguments)
    rows = build_offers.read(given.table)
    columns = list(rows[0])
    for argument in given.lists:
        rows, changes = renew(rows, read(argument, rows), given.drop)
        print("\n".join(changes.told(given.drop)))
    build_offers.build(rows)
    if given.write:
        with given.table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
