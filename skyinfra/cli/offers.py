"""``skyinfra offers | capacity | mig pack``: machine types that carry an accelerator, with prices; capacity blocks; the
cheapest for a demand."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from skyinfra import offers, packing, providers
from skyinfra.cli.options import (
    OPTIONS,
    Fleet,
    InRegion,
    Json,
    OfProviders,
    Wide,
    Yes,
    errors_name_options,
    names_of,
    seconds,
    takes_records,
)
from skyinfra.errors import (
    CapacityUnavailable,
    CloudRefused,
    InvalidField,
    NotOffered,
    NotSupported,
    PoolNotFound,
    did_you_mean,
)
from skyinfra.offers import Offer, Query
from skyinfra.terminal import packings, tables
from skyinfra.terminal.offers import SELECTED, deploys, offer_document, offer_table, remarks
from skyinfra.terminal.places import show_places
from skyinfra.terminal.progress import working

if TYPE_CHECKING:
    from skyinfra.preflight.capacity import Block
    from skyinfra.preflight.live_offers import Live
    from skyinfra.preflight.pool_inputs import PoolInputs

# A plus between two profiles, as in a layout; "+me" belongs to a name.
_PLUS = re.compile(r"\s*\+(?=\s*[\d>])")
NONE = "This version of skyinfra can deploy none of them."
# Between two looks at a block that has not begun.
_LOOK_S = 60.0

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


@app.command()
def capacity(
    fleet: Fleet,
    days: Annotated[int, typer.Option(min=1, metavar="N", help="For how long.")] = 1,
    within: Annotated[str | None, typer.Option(metavar="TIME", help="Those that begin within that time.")] = None,
    buy: Annotated[str | None, typer.Option("--buy", metavar="ID", help="Buy this one, after a yes.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Buy one more, beside one that is not declared.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the declared one has begun, then end with 0.")
    ] = False,
    auto_approve: Yes = False,
    as_json: Json = False,
) -> None:
    """List the capacity blocks of AWS on sale for a pool, buy one, or wait for it. What is bought is paid at once, and
    AWS does not take it back.
    """
    from skyinfra.preflight.capacity import blocks

    if wait and (buy or again or as_json or within or days != 1):
        raise typer.BadParameter("takes no other option", param_hint="--wait")
    if buy is not None and as_json:
        raise typer.BadParameter("lists what is on sale; --buy prints how one is declared", param_hint="--json")
    inputs = _on_aws(fleet)
    name = f"{inputs.stack}/{inputs.pool}"
    if wait:
        _wait(inputs)
        return
    before = datetime.now(UTC) + timedelta(seconds=seconds("--within", within)) if within else None
    with working(f"capacity {name}: asking AWS"):
        found = blocks(inputs, days=days, before=before)
    if buy is not None:
        _buy(inputs, {each.id: each for each in found}, buy, auto_approve, again=again)
    elif as_json:
        tables.print_document({"blocks": [_document(each) for each in found]})
    elif found:
        made = tables.table("ID", "MACHINES", "ZONE", "BEGINS", "ENDS", "USD", "USD/H EACH")
        for each in found:
            when = [f"{moment:%Y-%m-%d %H:%M}" for moment in (each.begins, each.ends)]
            what = f"{each.count} x {each.machine_type}"
            made.add_row(each.id, what, each.zone, *when, f"{each.usd:,.2f}", f"{each.usd_per_hour:.2f}")
        tables.console().print(made)
        tables.say(f"Times are UTC. Buy one: skyinfra capacity {name} --days {days} --buy ID")
    else:
        tables.say(f"No block for {name} is on sale: ask for other --days, a later --within, or another region.")


def _document(block: Block) -> dict[str, object]:
    times = {name: getattr(block, name).isoformat() for name in ("begins", "ends")}
    return {**asdict(block), **times, "usd_per_hour": round(block.usd_per_hour, 6)}


def _on_aws(fleet: str) -> PoolInputs:
    """Returns the inputs of a pool on AWS. Raises `PoolNotFound`, and `NotSupported` for a pool elsewhere."""
    from skyinfra.cli.stacks import synthesize  # which takes longer to import than `offers` takes
    from skyinfra.preflight.pool_inputs import read

    stack_name, _, pool_name = fleet.partition("/")
    stack = synthesize(stack_name)
    name, pools = pool_name or stack.only_pool, {pool["name"]: pool for pool in stack.pools}
    if (pool := pools.get(name)) is None:
        hint = f"{did_you_mean(name, pools)} Its pools: {', '.join(pools)}.".strip()
        raise PoolNotFound(f"the stack {stack.name!r} has no such pool", field="pool", given=name, hint=hint)
    if pool["provider"] != "aws":
        raise NotSupported(
            "capacity is bought ahead on AWS alone",
            field=f"{stack.name}/{name}.provider",
            given=pool["provider"],
            hint="sky.GCP(flex_start_hours=...) has Google Cloud wait for capacity during a deploy.",
        )
    return read(stack, pool)


def _buy(inputs: PoolInputs, found: dict[str, Block], given: str, auto_approve: bool, *, again: bool) -> None:
    """Buys a block of *found* after a yes, and prints how it is declared."""
    from skyinfra.cli.stacks import ask_to
    from skyinfra.preflight.capacity import buy

    name = f"{inputs.stack}/{inputs.pool}"
    if (block := found.get(given)) is None:
        raise InvalidField(
            f"is no block on sale for {name} now",
            field="--buy",
            given=given,
            hint=f"List them with the same --days: skyinfra capacity {name}",
        )
    most = inputs.max_hourly_cost
    if most is not None and block.usd_per_hour > most:
        price = f"the block costs {offers.usd(block.usd_per_hour)} an hour and machine"
        hint = "Raise max_hourly_cost, or take another block."
        raise InvalidField(price, field=f"{inputs.pool}.max_hourly_cost", given=most, hint=hint)
    if not ask_to("capacity", auto_approve, f"Buy {block}, which is paid now, and which AWS does not take back?"):
        raise typer.Exit(1)
    with working(f"capacity {name}: buying {block.id}"):
        bought = buy(inputs, block, again=again)
    tables.say(f"bought: {bought}, {block}")
    tables.say(f'Declare it: sky.AWS(capacity=sky.CapacityBlock(id="{bought}"), zones=["{block.zone}"])')
    tables.say(f"Then: skyinfra capacity {name} --wait && skyinfra deploy {inputs.stack} --auto-approve")


def _wait(inputs: PoolInputs) -> None:
    """Returns when the declared block has begun; says why it has not, where that has changed.

    AWS has to answer once; from then on what it does not answer is waited for.
    """
    from skyinfra.preflight.capacity import begun

    said: str | None = None
    while True:
        try:
            why = begun(inputs)
        except CloudRefused as error:
            if said is None or isinstance(error, CapacityUnavailable):
                raise
            why = str(error)
        if why is None:
            break
        if why != said:
            tables.say(f"{inputs.stack}/{inputs.pool}: {why}", to_stderr=True)
            said = why
        time.sleep(_LOOK_S)
    tables.say(f"{inputs.reservation} has begun")


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
