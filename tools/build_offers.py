"""Write skyinfra/offers/offers.json from a table of machine types.

    python tools/build_offers.py [INSTANCES.csv [OUT.json]]

The table, tools/instances.csv unless another is given, has one row for each machine type, collected from several lists
that write names, sizes and prices each in its own way. Here they become one: accelerators by the catalog's names and
nominal sizes, prices with region and date, and what is known to be wrong in a list is corrected or left out, with the
reason among the notes of the row. Every row of the table becomes one offer, unless nobody can buy it any more. The same
table gives the same bytes.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from skyinfra.accelerators import catalog  # noqa: E402 - the script runs from a checkout
from skyinfra.offers.offer import COLUMNS, EVERYWHERE  # noqa: E402

TABLE = Path(__file__).with_name("instances.csv")
OUT = ROOT / "skyinfra" / "offers" / "offers.json"
CORRECTIONS = Path(__file__).with_name("offers_corrections.json")

Row = dict[str, str]

# Lists give device memory in GiB, in decimal GB written as GiB, or as the driver reports it: up to this much less than
# the nominal size (B300: 262 of 288).
_LESS = 0.10
_MORE = 0.01

_VAST = re.compile(r"(?P<count>\d+)x-(?P<name>.+)-\d+-\d+")
_N1 = re.compile(r"n1-\* \+ guest_accelerator (?P<gpu>[a-z0-9-]+) x(?P<count>\d)")
_CARDS = re.compile(r"(?:^|; )efa=(?P<efa>\d+) network_cards=(?P<cards>\d+)")
_UNDATED = re.compile(r"undated snapshot \((?P<then>.+) on (?P<day>\d{4}-\d\d-\d\d)\)")
_SAME_AS = re.compile(r"undated snapshot \(same prices as (?P<day>\d{4}-\d\d-\d\d)\)")
_FIXTURE = re.compile(r"(?P<month>\d{4}-\d\d) \((?P<why>.+)\)")


@dataclass
class Facts:
    """Returns the corrections of the table: offers_corrections.json."""

    data: dict[str, Any] = field(default_factory=lambda: json.loads(CORRECTIONS.read_text(encoding="utf-8")))

    def matching(self, section: str, provider: str, machine_type: str) -> Any:
        """The first entry of *section* whose pattern matches "provider machine type", or None."""
        subject = f"{provider} {machine_type}"
        return next((value for pattern, value in self.data[section] if re.fullmatch(pattern, subject)), None)


FACTS = Facts()


def provider(row: Row) -> str:
    """The provider by the name that its declaration has."""
    return str(FACTS.data["providers"].get(row["provider"], row["provider"]))


def spelled(row: Row) -> tuple[str, str | None]:
    """How the row names its accelerator, ready for the catalog, and a note where the name says more."""
    text, machine = row["accelerator"], row["instance_type"]
    if row["provider"] == "gcp-tpu":
        return machine, None
    if form := _VAST.fullmatch(machine) if row["provider"] == "vast" else None:
        text = form["name"].replace("_", " ")
    note = None
    for pattern, replacement, why in FACTS.data["spellings"]:
        text, changed = re.subn(pattern, replacement, text)
        note = why if changed and why else note
    return text, note


def device(row: Row) -> tuple[catalog.Variant, str | None, str | None]:
    """The row of the catalog that the accelerator is; its form factor where that is known; and a note."""
    text, note = spelled(row)
    found = catalog.read_name(text)
    form = found.form_factor or FACTS.matching("form_factors", provider(row), row["instance_type"])
    rows = [each for each in catalog.variants(found.name) if form in (None, each.form_factor)]
    size = found.memory_gb or nominal(memory(row), sorted({each.memory_gb for each in rows}), row)
    selected = catalog.choose(found.name, size, form)
    same_size = {each.form_factor for each in rows if each.memory_gb == size}
    if form is None and len(same_size) == 1:
        form = selected.form_factor
    return selected, form, note


def memory(row: Row) -> float:
    """The device memory that the row states: of a whole device, where it gives what a part has or all have."""
    stated = float(row["accel_mem_gib_each"])
    if row["provider"] == "vast":
        return stated / float(row["accel_count"])
    if row["instance_type"].startswith(("g6f.", "gr6f.")):
        return stated / float(row["accel_fraction"])
    return stated


def nominal(stated: float, known: list[int], row: Row) -> int:
    """The nominal size that the stated one means. Ends the script where none or several are near."""
    near = [size for size in known if size * (1 - _LESS) <= stated <= size * (1 + _MORE)]
    if len(near) != 1:
        near = [size for size in near if abs(size - stated) < 1]
    if len(near) != 1:
        raise SystemExit(f"{row['provider']} {row['instance_type']}: {stated} GB is none of {known}")
    return near[0]


def fraction(row: Row) -> float | None:
    """The share of one device, None for whole ones. Lists write a third as 0.333."""
    written = float(row["accel_fraction"] or 1)
    denominator = round(1 / written)
    return None if denominator == 1 else 1 / denominator


def region(text: str) -> str:
    """A region without the empty city of marketplace rows."""
    return text.strip().removeprefix(", ")


def regions(row: Row) -> list[str]:
    text = row["regions"]
    parts = text.split(" | ") if "|" in text or "," in text else text.split()
    return sorted({region(part) for part in parts if part.strip()})


def dated(row: Row, kind: str) -> tuple[str, bool]:
    """The day of a price, and whether the source says no more than that it was read before that day."""
    text = row[f"{kind}_date"]
    if kind == "spot" and not re.match(r"\d", text):
        text = row["on_demand_date"]
    if same := _SAME_AS.fullmatch(text):
        return same["day"], False
    if undated := _UNDATED.fullmatch(text):
        return undated["day"], True
    if fixture := _FIXTURE.fullmatch(text):
        return fixture["month"], False
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        raise SystemExit(f"{row['provider']} {row['instance_type']}: no date in {text!r}")
    return text, False


def price(row: Row, kind: str) -> list[Any] | None:
    """[USD per hour, region, date, basis] of the whole machine, or None where the row has no price."""
    if not row[f"{kind}_usd_h"]:
        return None
    day, undated = dated(row, kind)
    basis = "undated" if undated else "listed"
    if (kind == "spot" and "spot derived" in row["notes"]) or re.search(
        "approximate price|converted from", row["notes"]
    ):
        basis = "estimated"
    usd = float(row[f"{kind}_usd_h"]) * machine_factor(row)
    return [round(usd, 6), region(row[f"{kind}_region"]) or EVERYWHERE, day, basis]


def machine_factor(row: Row) -> int:
    """How many of the row's accelerators the machine has, where the row gives the price of one."""
    form = re.search(r"per-GPU price \((\d+)x node\)", row["notes"])
    return int(form[1]) if form else 1


@dataclass
class Prices:
    """Both prices of a row, with what must be said about those that were left out."""

    on_demand: list[Any] | None
    spot: list[Any] | None
    notes: list[str] = field(default_factory=list)

    def drop(self, kind: str, why: str) -> None:
        found = getattr(self, kind)
        if found:
            label = kind.replace("_", "-")
            self.notes.append(f"no {label} price: the source's ${found[0]:g}/h ({found[1]}, {found[2]}) {why}")
            setattr(self, kind, None)

    def doubt(self, kind: str, why: str) -> None:
        found = getattr(self, kind)
        if found:
            self.notes.append(f"the {kind.replace('_', '-')} price is doubtful: it {why}")
            setattr(self, kind, [*found[:3], "suspect"])


def prices(row: Row) -> Prices:
    """The prices, without those that are none of the machine; those that cannot be right are marked."""
    found = Prices(price(row, "on_demand"), price(row, "spot"))
    if why := FACTS.matching("not_on_demand", provider(row), row["instance_type"]):
        found.drop("on_demand", why)
    if found.on_demand and "accelerator price only" in row["notes"]:
        for kind in ("on_demand", "spot"):
            found.drop(kind, "is that of the accelerators alone; the N1 host is added to it")
    elif row["instance_type"].startswith("v6e-") and found.on_demand and found.on_demand[0] == 700:
        for kind in ("on_demand", "spot"):
            found.drop(kind, "is the same for every slice and cannot be right")
    elif "spot >= 80% of on-demand" in row["notes"]:
        list_price = "on 2026-09-26 the list price of a3-highgpu-1g was $10.98/h, twice the source's"
        found.doubt(
            "on_demand", f"is no more than 1.25 times the spot price, probably that of flex start; {list_price}"
        )
    elif "labelled spot but above on-demand" in row["notes"]:
        found.doubt("spot", "is above the on-demand price")
    elif found.on_demand and found.spot and found.on_demand[0] == found.spot[0]:
        found.doubt("spot", "is the on-demand price")
    return found


def notes(row: Row, *more: str | None) -> list[str]:
    """Returns notes for readers, without what the other columns hold."""
    text = _CARDS.sub("", row["notes"])
    kept = []
    for part in filter(None, text.split("; ")):
        for pattern, replacement in FACTS.data["notes"]:
            part = re.sub(pattern, replacement, part)
        if part:
            kept.append(part)
    if undated := _UNDATED.fullmatch(row["on_demand_date"]):
        kept.append(f"the source has no date; {undated['then']} on {undated['day']}")
    if fixture := _FIXTURE.fullmatch(row["on_demand_date"]):
        kept.append(f"price from a {fixture['why']}")
    return [*kept, *filter(None, more)]


def machine_type(row: Row, doubles: set[tuple[str, str]]) -> str:
    """The machine type, told apart where a list has several of one name."""
    name = row["instance_type"]
    if added := _N1.fullmatch(name):
        # As modules/gcp takes it: eight vCPUs for each GPU, which all of them allow.
        return f"n1-standard-{8 * int(added['count'])}+{added['gpu']}:{added['count']}"
    if (row["provider"], name) not in doubles:
        return name
    if row["provider"] == "coreweave":
        return f"{name} {row['accel_mem_gib_each']}GB"
    return f"{name} (bare metal)" if "Bare Metal" in row["notes"] else name


def offer(row: Row, doubles: set[tuple[str, str]]) -> dict[str, Any]:
    """One row by the names of COLUMNS."""
    selected, form, note = device(row)
    cards = _CARDS.search(row["notes"])
    bought = prices(row)
    name = machine_type(row, doubles)
    reason = FACTS.matching("no_mig", provider(row), name) if selected.mig_model else None
    remark = FACTS.matching("mig_notes", provider(row), name) if selected.mig_model else None
    count = max(1, round(float(row["accel_count"]))) * machine_factor(row)
    return {
        "provider": provider(row),
        "machine_type": name,
        "accelerator": selected.name,
        "form_factor": form,
        "count": 1 if row["provider"] == "gcp-tpu" else count,
        "memory_gb": selected.memory_gb,
        "fraction": fraction(row),
        "vcpus": int(float(row["vcpu"])) if row["vcpu"] else 8 * count if "+nvidia" in name else None,
        "ram_gib": float(row["ram_gib"]) if row["ram_gib"] else 30.0 * count if "+nvidia" in name else None,
        "on_demand": bought.on_demand,
        "spot": bought.spot,
        "regions": regions(row),
        "network_cards": int(cards["cards"]) if cards else None,
        "efa_interfaces": int(cards["efa"]) if cards else 0,
        "divisible": reason is None,
        "legacy": "legacy" in row["notes"],
        "notes": notes(row, note, *bought.notes, reason, remark),
        "source": row["source"],
    }


def build(rows: list[Row]) -> str:
    """The text of offers.json: one line per offer; what many offers share stands in tables of its own."""
    rows = [row for row in rows if not FACTS.matching("left_out", provider(row), row["instance_type"])]
    names = [(row["provider"], row["instance_type"]) for row in rows]
    doubles = {name for name in names if names.count(name) > 1}
    offers = [offer(row, doubles) for row in rows]
    keys = [(each["provider"], each["machine_type"]) for each in offers]
    if len(set(keys)) < len(keys):
        raise SystemExit(f"machine types that stand twice: {sorted({key for key in keys if keys.count(key) > 1})}")
    tables: dict[str, list[Any]] = {"sources": [], "regions": [], "notes": []}
    for each in offers:
        each["source"] = _index(tables["sources"], each["source"])
        each["regions"] = _index(tables["regions"], each["regions"])
        each["notes"] = [_index(tables["notes"], note) for note in each["notes"]]
    lines = ["{", f'"columns": {json.dumps(COLUMNS)},']
    for name, table in tables.items():
        lines += [f'"{name}": [', ",\n".join(f"  {json.dumps(entry)}" for entry in table), "],"]
    rendered = (f"  {json.dumps([each[column] for column in COLUMNS])}" for each in offers)
    return "\n".join([*lines, '"offers": [', ",\n".join(rendered), "]", "}"]) + "\n"


def _index(table: list[Any], value: Any) -> int:
    if value not in table:
        table.append(value)
    return table.index(value)


def main(arguments: list[str]) -> None:
    if len(arguments) > 2:
        raise SystemExit(__doc__)
    table, out = [*map(Path, arguments), *(TABLE, OUT)[len(arguments) :]]
    out.write_text(build(read(table)), encoding="utf-8")


def read(table: Path) -> list[Row]:
    """The rows of the file *table*."""
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main(sys.argv[1:])
