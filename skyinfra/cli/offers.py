"""``skyinfra offers | mig pack``: machine types that carry an accelerator, with prices; the cheapest for a demand."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

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
from skyinfra.errors import NotOffered
from skyinfra.offers import Offer, Query
from skyinfra.terminal import packings, tables
from skyinfra.terminal.offers import SELECTED, deploys, offer_document, offer_table, remarks
from skyinfra.terminal.places import show_places
from skyinfra.terminal.progress import working

if TYPE_CHECKING:
    from skyinfra.preflight.live_offers import Live

# A plus between two profiles, as in a layout; "+me" belongs to a name.
_PLUS = re.compile(r"\s*\+(?=\s*[\d>])")
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
        if refresh or rdma or accelerator or wanted != Wanted():
            raise typer.BadParameter("takes no other option than --live and --json", param_hint="--for")
        show_places(of_pool, as_json=as_json, live=live)
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
    selected = next((offer for offer in found if deploys(offer) == "yes"), None)
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


def ask_providers(query: Query) -> Live:
    """Asks the providers what they have now; prints that it does where a person is watching."""
    from skyinfra.preflight.live_offers import look_up

    with working("offers: asking the providers"):
        return look_up(query)


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
        tables.print_document(packings.packing_document(made))
        return
    out = tables.console()
    out.print(escape(packings.headline(made)))
    out.print(packings.machine_table(made))
    for line in packings.remarks(made):
        tables.say(line)
    sys.stdout.write(f"\n{made.source()}")
