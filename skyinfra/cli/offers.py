"""``skyinfra offers | mig pack``: machine types that carry an accelerator, with prices; the cheapest for a demand."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from skyinfra import offers, packing, providers
from skyinfra.cli.options import (
    OPTIONS,
    InRegion,
    Json,
    OfProviders,
    Wide,
    errors_name_options,
    names_of,
    takes_records,
)
from skyinfra.errors import NotOffered, counted
from skyinfra.offers import Offer, Price, Query
from skyinfra.packing import Given, Machines, Packing
from skyinfra.terminal import tables
from skyinfra.terminal.places import show_places
from skyinfra.terminal.progress import working

if TYPE_CHECKING:
    from skyinfra.preflight.live_offers import Live

# A plus between two profiles, as in a layout; "+me" belongs to a name.
_PLUS = re.compile(r"\s*\+(?=\s*[\d>])")
SUPPLY = "As many machines as needed are taken to be there: the quotas of your account are not known here."
SELECTED = "->"
NONE = "This version of skyinfra can deploy none of them."


app = typer.Typer()


@dataclass(frozen=True)
class Wanted:
    """The options that say which machines; see `offers.ask`."""

    provider: OfProviders = None
    region: InRegion = None
    spot: Annotated[bool, typer.Option("--spot", help="Sort by, and limit, the spot price.")] = False
    max_price: Annotated[float | None, typer.Option(metavar="USD", help="Per hour and machine, at most.")] = None
    count: Annotated[int | None, typer.Option(help="How many accelerators, exactly.")] = None
    memory_gb: Annotated[float | None, typer.Option("--memory", metavar="GB", help="Of one accelerator, at least.")] = (
        None
    )
    fraction: Annotated[
        float | None, typer.Option(metavar="SHARE", help="The share of an accelerator that is enough, such as 0.25.")
    ] = None
    vcpus: Annotated[int | None, typer.Option(metavar="N", help="Of the machine, at least.")] = None
    ram_gib: Annotated[float | None, typer.Option("--ram", metavar="GIB", help="Of the machine, at least.")] = None
    legacy: Annotated[bool, typer.Option("--legacy", help="Also what is no longer sold to everybody.")] = False


@app.command("offers")
@takes_records
def show_offers(
    wanted: Wanted,
    accelerator: Annotated[
        str | None,
        typer.Argument(
            metavar="ACCELERATOR",
            help='Such as "H100:8", "A100-40GB" or "H100:8,A100:8", most wanted first.',
            autocompletion=names_of("accelerators"),
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Ask the providers: those that answer without a key, or to one in the environment."
        ),
    ] = False,
    rdma: Annotated[
        bool, typer.Option("--rdma", help="Those alone whose nodes InfiniBand, RoCE or EFA connects.")
    ] = False,
    refresh: Annotated[
        bool,
        typer.Option("--refresh", help="Ask for the prices, keep them in the cache folder, and say who answered."),
    ] = False,
    of_pool: Annotated[
        str | None,
        typer.Option("--for", metavar="STACK/POOL", help="The places of a pool instead, in order, and what refused."),
    ] = None,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """List the machines that carry an accelerator, cheapest first. With dated prices; --live asks for those of now."""
    if of_pool is not None:
        if refresh or live or rdma or accelerator or wanted != Wanted():
            raise typer.BadParameter("takes no other option than --json", param_hint="--for")
        show_places(of_pool, as_json=as_json)
        return
    if refresh:
        if live or rdma or accelerator or wanted != Wanted(provider=wanted.provider):
            raise typer.BadParameter("takes no other option than --provider and --json", param_hint="--refresh")
        _refresh(wanted.provider, as_json)
        return
    with errors_name_options():
        names = accelerator.split(",") if accelerator and "," in accelerator else accelerator
        query = offers.ask(names, **vars(wanted))
    asked = ask_providers(query) if live else None
    every = asked.offers if asked else _newest()
    found = query.run([offer for offer in every if providers.network(offer)] if rdma else every)
    if not found and rdma and query.run(every):
        hint = "Leave it out to see them."
        raise NotOffered("no network for RDMA connects any of these machines", field="--rdma", hint=hint)
    if not found:
        raise offers.not_offered(query, called=OPTIONS)
    notes = [*(asked.remarks(found) if asked else ()), *remarks(query, found)]
    # The first one that this version deploys without an image of one's own.
    selected = next((offer for offer in found if _deploys(offer) == "yes"), None)
    if as_json:
        listed = [offer_document(offer) | dict.fromkeys(("selected", "chosen"), offer is selected) for offer in found]
        tables.print_document({"offers": listed, "notes": notes})
        return
    out = tables.console()
    out.print(offer_table(query, found, selected))
    last = f"{SELECTED} is what would be selected. The quotas of your account are not known here."
    for line in (*notes, last if selected else NONE):
        tables.say(line)


def _newest() -> tuple[Offer, ...]:
    """Returns the shipped offers, with the prices that a refresh has got since."""
    from skyinfra.preflight.refreshed import with_cached

    return with_cached(offers.load())


def _refresh(given: list[str] | None, as_json: bool) -> None:
    """Renews the cached prices. Ends with 1 where a provider failed, or none could be asked."""
    from skyinfra.preflight.refreshed import cache_file, refresh

    with errors_name_options():
        query = offers.ask(None, provider=given)
    with working("offers: asking the providers"):
        answers = refresh(query.providers)
    asked = {answer.provider for answer in answers if answer.result == "asked"}
    lines = [*map(str, answers), f"The prices are in {cache_file()}." if asked else "No price was renewed."]
    if as_json:
        renewed = [offer for offer in _newest() if offer.provider in asked]
        listed = [offer_document(offer) | dict.fromkeys(("selected", "chosen"), False) for offer in renewed]
        tables.print_document({"offers": listed, "notes": lines})
    else:
        for line in lines:
            tables.say(line)
    if not asked or any(answer.result == "failed" for answer in answers):
        raise typer.Exit(1)


def _deploys(offer: Offer) -> str:
    """Returns whether this version deploys the machine: yes, no, or only with an image that the declaration names, or
    as a spot machine, by a flex start or a reservation."""
    if providers.undeployable(offer.provider):
        return "no"
    sold = "yes" if providers.on_demand(offer) else "not on demand"
    return "own image" if providers.refuses(offer) else sold


def ask_providers(query: Query) -> Live:
    """Asks the providers what they have now; prints that it does where a person is watching."""
    from skyinfra.preflight.live_offers import look_up

    with working("offers: asking the providers"):
        return look_up(query)


def offer_table(query: Query, found: Iterable[Offer], selected: Offer | None) -> Table:
    """Returns the offers as a table, with a mark at the *selected* one."""
    first, second = ("SPOT PER HOUR", "ON DEMAND PER HOUR") if query.spot else ("ON DEMAND PER HOUR", "SPOT PER HOUR")
    made = tables.table(
        *("", "PROVIDER", "MACHINE", "ACCELERATOR", "MEMORY", "PARTITIONED BY", "VCPUS", "RAM"),
        *(first, second, "DEPLOYABLE"),
        leave_out=("PARTITIONED BY", "RAM", "VCPUS", "DEPLOYABLE", second, "MEMORY"),
        sentences=("ACCELERATOR",),
    )
    for offer in found:
        prices = (offer.spot, offer.on_demand) if query.spot else (offer.on_demand, offer.spot)
        made.add_row(
            SELECTED if offer is selected else "",
            offer.provider,
            escape(offer.machine_type),
            offer.carries,
            f"{offer.share_gb:g} GB",
            providers.who_partitions(offer) or "",
            tables.known(offer.vcpus),
            "unknown" if offer.ram_gib is None else f"{offer.ram_gib:g} GiB",
            *map(cell, prices),
            _deploys(offer),
        )
    return made


def remarks(query: Query, found: tuple[Offer, ...]) -> list[str]:
    """Returns notes on the prices, on the providers that cannot be deployed to, and on the offers that are left out."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for offer in sorted(found, key=lambda each: (each.provider, each.machine_type)):
        if (why := providers.undeployable(offer.provider)) and offer.provider not in reasons.setdefault(why, []):
            reasons[why].append(offer.provider)
    lines += [f"Not deployable: {', '.join(names)}: {why}." for why, names in reasons.items()]
    purchase = "spot" if query.spot else "on-demand"
    priced = [(offer, price) for offer in found if (price := offer.price(spot=query.spot)) is not None]
    elsewhere = sorted({price.region for _, price in priced if price.region not in (query.region, offers.EVERYWHERE)})
    if query.region and elsewhere:
        lines.append(f"The {purchase} prices are of {'; '.join(elsewhere)}: none of {query.region} are known.")
    if query.region and (unknown := [offer for offer in found if offer.offered_in(query.region) is None]):
        lines.append(
            f"No source here says whether {query.region} has {', '.join(offer.machine_type for offer in unknown)}; "
            "a declaration is allowed, and the deploy may be refused."
        )
    if any(price.basis == "estimated" for _, price in priced):
        lines.append("~ is an estimate, not a quote.")
    if any(price and price.basis == "suspect" for offer in found for price in (offer.on_demand, offer.spot)):
        lines.append(
            "? is a price that cannot be right and is not counted; --json says why, in the notes of the offer."
        )
    if any(price and price.is_old() for offer in found for price in (offer.on_demand, offer.spot)):
        lines.append("(old) is a price of more than 12 months ago; skyinfra offers --refresh asks for those of now.")
    if len(priced) < len(found):
        lines.append(
            f"The {purchase} price of {len(found) - len(priced)} of them is not known or doubtful; they come last."
        )
    if query.fraction is None and query.accelerators:
        shares = _shares(query)
        if shares:
            least = min(offer.fraction for offer in shares)
            lines.append(f"Left out: {len(shares)} with a share of one; --fraction {least:.3g} shows them.")
    return lines


def _shares(query: Query) -> list[Offer]:
    """Returns the offers of a share of the accelerator, by the same providers in the same region."""
    found = offers.ask(
        query.accelerators,
        provider=query.providers,
        region=query.region,
        spot=query.spot,
        fraction=0.001,
        max_price=query.max_price,
    ).run(offers.load())
    return [offer for offer in found if offer.fraction < 1]


def offer_document(offer: Offer) -> dict[str, Any]:
    """Returns an offer as JSON: the fields of Offer, and derived values."""
    return {
        **asdict(offer),
        "carries": offer.carries,
        "share_gb": offer.share_gb,
        "vendor": offer.vendor,
        "mig_model": offer.mig_model,
        "partitioned_by": providers.who_partitions(offer),
        "deployable": providers.undeployable(offer.provider) is None,
        "not_deployable_because": providers.undeployable(offer.provider),
        "refused_because": providers.refuses(offer),
        "sold_on_demand": providers.on_demand(offer),
        "rdma": providers.network(offer),
    }


def cell(price: Price | None) -> str:
    """Returns a price in a table: "$55.04 us-east-1 2026-07-20"."""
    if price is None:
        return "unknown"
    before = "before " if price.basis == "undated" else ""
    return escape(f"{price.marked()} {price.region} {before}{price.date}{' (old)' if price.is_old() else ''}")


# Packing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Supply:
    """The options that say which machines there are; see `packing.pack`."""

    provider: OfProviders = None
    region: InRegion = None
    spot: Annotated[bool, typer.Option("--spot", help="At spot prices.")] = False
    max_nodes: Annotated[int | None, typer.Option(metavar="N", help="Machines, at most.")] = None
    exact: Annotated[bool, typer.Option("--exact", help="No larger profile may serve for a named one.")] = False


@app.command()
@takes_records
def pack(
    demand: Annotated[str, typer.Argument(metavar="DEMAND", help='Such as "1g.10gb*20, 3g.40gb*4, >=18GB*6".')],
    supply: Supply,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Find the cheapest machines that hold so many partitions. With their layouts, and the pools that declare them."""
    with errors_name_options():
        made = packing.pack(_PLUS.sub(", ", demand), **vars(supply))
    if as_json:
        tables.print_document(_packing_document(made))
        return
    out = tables.console()
    out.print(escape(_headline(made)))
    out.print(_machine_table(made))
    for line in _packing_remarks(made):
        tables.say(line)
    sys.stdout.write(f"\n{made.source()}")


def _headline(made: Packing) -> str:
    """Cost and proof in a sentence."""
    proof = "optimal: no cheaper set of machines holds it"
    if made.status != "optimal":
        proof = f"at most {made.gap:.2%} above the cheapest: the proof took too long"
    machines = counted(made.nodes, "machine")
    return f"{packing.text(made.demand)} on {machines} for {offers.usd(made.cost_per_hour)}/h, {proof}"


def _packing_remarks(made: Packing) -> list[str]:
    """Returns notes on the partitions for each demand, the spare ones, and the prices."""
    lines = []
    for demand in made.demand:
        given = [f"{each.count} x {said(each)}" for each in made.given if each.wanted == demand.wanted]
        lines.append(f"{demand}: {', '.join(given)}")
    if made.spare:
        lines.append(f"spare: {', '.join(f'{each.count} x {said(each)}' for each in made.spare)}")
    waste = made.waste
    lines.append(
        f"waste: {waste.share:.0%} of {waste.bought} GB bought; {waste.oversize} GB handed out beyond what was asked "
        f"for, {waste.spare} GB spare, {waste.lost} GB that the layouts leave over"
    )
    lines += _price_remarks(made)
    if made.left_out:
        why = ", ".join(f"{count} ({reason})" for reason, count in made.left_out.items())
        lines.append(f"{made.considered} offers were looked at; left out: {why}.")
    lines.append(SUPPLY)
    return lines


def _price_remarks(made: Packing) -> list[str]:
    moved = [(each.price.region, each.region) for each in made.machines if each.price.region != offers.EVERYWHERE]
    lines = [
        f"Prices are of {priced}: none of {declared} are known."
        for priced, declared in sorted({(priced, declared) for priced, declared in moved if declared})
        if priced != declared
    ]
    if any(each.price.basis == "estimated" for each in made.machines):
        lines.append("~ is an estimate, not a quote.")
    return lines


def said(given: Given) -> str:
    """Returns a partition or GPU in words: "2g.48gb of RTX PRO 6000"."""
    return f"{given.profile} of {given.gpu}" if given.profile else f"whole {given.gpu}"


def _machine_table(made: Packing) -> Table:
    table = tables.table(
        *("NODES", "PROVIDER", "MACHINE", "REGION", "GPUS", "LAYOUTS", "EACH PER HOUR", "PER HOUR"),
        leave_out=("REGION", "EACH PER HOUR", "PROVIDER"),
        sentences=("LAYOUTS",),
    )
    for each in made.machines:
        table.add_row(
            str(each.nodes),
            each.offer.provider,
            escape(each.offer.machine_type),
            escape(each.region or "any"),
            each.offer.carries,
            _layouts(each),
            cell(each.price),
            offers.usd(each.nodes * each.price.usd_per_hour),
        )
    return table


def _layouts(machines: Machines) -> str:
    """Returns the layouts of one machine, equal ones counted: "4 x 3g.40gb+1g.10gb*4, 4 x 7g.80gb*1"."""
    counts = Counter(each or "whole" for each in machines.layouts)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} x {layout}" for layout, count in counts.items())


def _packing_document(made: Packing) -> dict[str, Any]:
    """Returns the packing as JSON."""
    return {
        "demand": [{"wanted": each.wanted, "count": each.count, "memory_gb": each.memory_gb} for each in made.demand],
        "status": made.status,
        "cost_per_hour": made.cost_per_hour,
        "bound": made.bound,
        "gap": made.gap,
        "spot": made.spot,
        "nodes": made.nodes,
        "machines": [_machines_document(each) for each in made.machines],
        "given": [asdict(each) for each in made.given],
        "spare": [{key: value for key, value in asdict(each).items() if key != "wanted"} for each in made.spare],
        "waste": {**asdict(made.waste), "share": round(made.waste.share, 6)},
        "considered": made.considered,
        "left_out": dict(made.left_out),
        "notes": [*_price_remarks(made), SUPPLY],
        "source": made.source(),
    }


def bought(machines: Machines) -> dict[str, Any]:
    """Returns the fields of a JSON document that say which machines are bought, where and for how much."""
    return {
        "nodes": machines.nodes,
        "provider": machines.offer.provider,
        "machine_type": machines.offer.machine_type,
        "region": machines.region,
        "accelerator": machines.accelerator,
        "price": asdict(machines.price),
    }


def _machines_document(machines: Machines) -> dict[str, Any]:
    return {
        **bought(machines),
        "gpus": [
            {"layout": layout, "partitions": [tables.place(each) for each in placements]}
            for layout, placements in zip(machines.layouts, machines.placements, strict=True)
        ],
    }
