"""pool → Deployment. Pure: the same declaration gives the same Deployment, without network, clock or random numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import get_args

from skyinfra import mig
from skyinfra.accelerators import Accelerator
from skyinfra.declared import NEVER, seconds_of
from skyinfra.errors import DeclarationError, DuplicatePool, InvalidField, NotSupported, at
from skyinfra.places.candidates import alternatives, called, distinct_names, later_zones, module_of, preferring
from skyinfra.places.choices import NAME, Choice
from skyinfra.places.ranges import check_form, scaled
from skyinfra.plugins import Environment
from skyinfra.pool import ComputePool, Range, check_concurrency, follow_on
from skyinfra.protocol.manifest import OUTPUT_PREFIX, ManifestSlot, slot_kind
from skyinfra.protocol.nodeconfig import (
    HEAD_PLACEHOLDER,
    NODE_PLACEHOLDER,
    PLACEHOLDERS,
    VERSION,
    NodeAccelerator,
    NodeBudget,
    NodeConfig,
    Vendor,
)
from skyinfra.protocol.packages import PackageSource
from skyinfra.providers import Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.data import Idle
from skyinfra.providers.mounts import check as check_mounts
from skyinfra.providers.volumes import beside

# A node of a pool whose size follows the work ends after so many seconds without a task, where nothing is declared.
_IDLE_S = 600.0


@dataclass(frozen=True)
class Deployment:
    """A compiled pool: the selection, the slots of each node, the node configurations with placeholders.

    place: its name where the pool has several; module: of Terraform, which is named like the pool otherwise. places:
    all of them, in order, this one too; empty where there is one. scale: the declared range of a pool whose number of
    nodes changes with an apply alone; its pool has one number of it.
    """

    stack: str
    pool: ComputePool
    selection: Selection
    slots: tuple[ManifestSlot, ...]
    head: NodeConfig
    worker: NodeConfig
    module: str = ""
    place: str = ""
    places: tuple[Deployment, ...] = ()
    scale: Range | None = None

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all nodes and a separate head; None where it is not known."""
        each, head = self.selection.hourly_cost, self.selection.head_price
        return None if each is None else self.pool.most_nodes * each + (head.usd_per_hour if head else 0.0)

    @property
    def fleet(self) -> str:
        """``STACK/POOL``."""
        return f"{self.stack}/{self.pool.name}"

    @property
    def output(self) -> str:
        """Name of the Terraform output that holds the manifest."""
        return f"{OUTPUT_PREFIX}{self.pool.name}"


def compile_pools(
    pools: Sequence[ComputePool], stack: str, choices: Mapping[str, Choice] | None = None
) -> tuple[Deployment, ...]:
    """The pools of one stack, compiled, in their order. Raises a `DeclarationError` with the path of the field.

    choices: for pools with several places, or a number of nodes that an apply changes, by ``STACK/POOL``; the first
    place and the least number count where there is none.
    """
    if not isinstance(pools, Sequence):
        raise InvalidField("expected a list of pools", field="pools", given=type(pools).__name__, hint="pools=[...]")
    seen: set[str] = set()
    deployments = []
    for index, pool in enumerate(pools):
        where = f"pools[{index}]"
        if not isinstance(pool, ComputePool):
            raise InvalidField("expected a ComputePool", field=where, given=type(pool).__name__)
        if pool.name in seen:
            raise DuplicatePool(
                f"the stack {stack!r} has another pool of that name",
                field=f"{where}.name",
                given=pool.name,
                hint="Pools of one stack have different names.",
            )
        seen.add(pool.name)
        with at(where):
            deployments.append(_placed(pool, stack, (choices or {}).get(f"{stack}/{pool.name}", Choice())))
    return tuple(deployments)


def _placed(pool: ComputePool, stack: str, choice: Choice) -> Deployment:
    """Returns *pool* at the place of the *choice*, else at the first of its places, with the others."""
    compiled = sorted(_compiled(pool, stack, choice.nodes), key=lambda found: found[0])
    found = _named(pool, choice, [each for _, each in compiled])
    if len(found) == 1 and choice.first is None:
        return replace(found[0], place="")
    names = distinct_names([(each.place, each.pool.provider) for each in found])
    found = [replace(each, place=name) for each, name in zip(found, names, strict=True)]
    if by_price := pool.places is not None and pool.places.by_price:
        found.sort(key=lambda each: (each.usd_per_hour is None, each.usd_per_hour))
    # Prices change; what is declared in order has its first place where the pool alone would be.
    first = choice.first or ("" if by_price else found[0].place)
    made = [replace(each, module="" if each.place == first else module_of(pool, each.place)) for each in found]
    selected = next((each for each in made if each.place == choice.place), None if choice.place else made[0])
    if selected is None:
        raise InvalidField(
            f"{NAME} names a place that the pool has not",
            field="provider",
            given=choice.place,
            hint=f"Its places: {', '.join(each.place for each in made)}. Name one of them there, or take the line out.",
        )
    return replace(selected, places=tuple(made))


def _named(pool: ComputePool, choice: Choice, found: Sequence[Deployment]) -> list[Deployment]:
    """Returns the places with the names that the *choice* has for them, though a list of accelerators begins or ends.

    Modules are named by them: the same place under another name would be made anew.
    """
    unknown = {choice.place, choice.first} - {each.place for each in found}
    ends = [f" {each.with_(mig=None)}" for each in pool.accelerators]
    made = []
    for each in found:
        names = {each.place.removesuffix(end) for end in ends} | {each.place + end for end in ends if len(ends) == 1}
        before = [name for name in unknown if name in names and name is not None]
        unknown -= set(before)
        made.append(replace(each, place=min(before)) if before else each)
    return made


def _compiled(pool: ComputePool, stack: str, nodes: int | None) -> Iterator[tuple[int, Deployment]]:
    """Yields the *pool* at each of its places, and which accelerator of its list has been taken there."""
    for field, each in alternatives(pool):
        with at(field) if field != "provider" else nullcontext():
            yield from _by_accelerator(each, stack, nodes)


def _by_accelerator(pool: ComputePool, stack: str, nodes: int | None) -> Iterator[tuple[int, Deployment]]:
    several, found = len(pool.accelerators) > 1, 0
    for position in range(len(pool.accelerators)) if several else ():
        try:
            every = list(_by_zone(preferring(pool, position), stack, nodes, pool.accelerators[position]))
        except DeclarationError:
            continue  # not offered there
        found += 1
        yield from ((position, replace(each, pool=_as_declared(each.pool, pool))) for each in every)
    if not found:
        yield from ((0, each) for each in _by_zone(pool, stack, nodes, None))


def _as_declared(pool: ComputePool, declared: ComputePool) -> ComputePool:
    return pool.model_copy(update={"accelerator": declared.accelerator, "accelerators": declared.accelerators})


def _by_zone(pool: ComputePool, stack: str, nodes: int | None, accelerator: Accelerator | None) -> Iterator[Deployment]:
    made = compile_pool(pool, stack, nodes)
    grouped = made.selection.grouped
    yield replace(made, place=called(pool, accelerator, grouped=grouped))
    for each in () if grouped else later_zones(pool):
        yield replace(compile_pool(each, stack, nodes), place=called(each, accelerator, grouped=False))


def compile_pool(pool: ComputePool, stack: str, nodes: int | None = None) -> Deployment:
    """*pool* as part of the stack *stack*. Raises a `DeclarationError`.

    nodes: of a range that is declared, where that number changes with an apply alone; None for the least.
    """
    if pool.stack is not None and pool.stack != stack:
        raise InvalidField(f"the pool is declared in the stack {stack!r}", field="stack", given=pool.stack)
    _check_placeholders(pool)
    if (provider := pool.provider.of(pool.accelerators)) is not pool.provider:
        pool = pool.model_copy(update={"provider": provider})
    pool, scale = scaled(pool, stack, nodes)
    if (provider := beside(pool.provider, pool.volumes, pool.most_nodes)) is not pool.provider:
        pool = pool.model_copy(update={"provider": provider})
    check_mounts(pool.provider, pool.mounts, pool.volumes)
    idle_s = _node_idle_seconds(pool)
    request = replace(_request(pool), most=scale.max if scale is not None else 0)
    selection = pool.provider.select(request)
    if scale is not None and pool.provider.data.traits.groups:
        check_form(pool, request, scale)
    budget = _budget(pool, selection)
    _check_replaced(pool, selection)
    accelerator = selection.accelerator
    if accelerator is not None:
        check_concurrency(pool, accelerator.with_(count=1) if selection.hosts > 1 else accelerator)
    stops = pool.budget is not None and pool.budget.action == "stop"
    head = _node_config(pool, stack, selection, head=True)
    head = replace(head, budget=budget) if stops else replace(head, warn_budget=budget)
    return Deployment(
        stack=stack,
        pool=pool,
        selection=selection,
        slots=tuple(_slots(head)),
        head=_without_slots(head, pool) if selection.separate_head else head,
        worker=replace(head, head=False, scheduler=HEAD_PLACEHOLDER, node_idle_seconds=idle_s, warn_budget=None),
        scale=scale,
    )


def _budget(pool: ComputePool, selection: Selection) -> NodeBudget | None:
    """Returns the budget by which the nodes end themselves, or of which the head tells; None where nobody pays.

    Raises `InvalidField` for one that is spent within the first hour, or that nobody could hold, `NotSupported` where
    nothing ends such nodes.
    """
    stops = pool.budget is not None and pool.budget.action == "stop"
    if stops:
        _check_end(pool, selection, "budget", 'action="stop"')
    if pool.budget is None or not isinstance(pool.provider, CloudProvider):
        return None
    # Of a group of several machine types, the dearest: the limit holds whichever it starts.
    prices = [selection.prices.get(each) for each in selection.machine_types[: None if stops else 1]]
    if None in prices or (selection.head_machine and selection.head_price is None):
        hint = "Leave the budget out, or name machines whose price is known: `skyinfra offers`."
        raise InvalidField("the price of its machines is not known", field="budget", hint=hint)
    node = max(price.usd_per_hour for price in prices if price is not None)
    head = selection.head_price.usd_per_hour if selection.head_price else 0.0
    hourly = pool.most_nodes * node + head
    if pool.budget.usd < hourly:
        hint = "Raise it, or declare fewer nodes."
        raise InvalidField(
            f"the pool costs ${hourly:.2f} an hour", field="budget.usd", given=pool.budget.usd, hint=hint
        )
    return NodeBudget(pool.budget.usd, head or node, node, hourly)


def _check_replaced(pool: ComputePool, selection: Selection) -> None:
    """Raises `InvalidField` where no node could be replaced as it is sick."""
    if not pool.replace_sick:
        return
    why = None
    if selection.hosts > 1:
        why = "the hosts of a slice cannot be replaced one by one"
    elif selection.grouped:
        why = "the nodes of a machine group are not known to Terraform one by one: the group would have to replace them"
    elif selection.separate_head:
        why = "nodes that follow the work come and go by themselves"
    elif pool.nodes == 1:
        why = "the only node is the head, which is not replaced by itself: a deploy ends what runs there"
    if why is not None:
        hint = "Leave it out, and replace nodes by hand: `skyinfra deploy --replace ADDRESS`."
        raise InvalidField(why, field="replace_sick", given=True, hint=hint)


def _request(pool: ComputePool) -> Request:
    return Request(
        accelerators=pool.accelerators,
        nodes=pool.most_nodes,
        elastic=pool.range is not None,
        spot=pool.spot,
        vcpus=pool.vcpus,
        memory_gb=pool.memory_gb,
        disk_gb=pool.disk_gb,
        max_hourly_cost=pool.max_hourly_cost,
        python=pool.image.python,
        runner=pool.image.runner,
        apt=tuple(pool.image.apt),
        labels=pool.labels,
        rdma=pool.rdma,
        volumes=pool.volumes,
        mounts=pool.mounts,
        replace_sick=pool.replace_sick,
    )


def _check_placeholders(pool: ComputePool) -> None:
    """Terraform replaces the placeholders wherever they stand, so a declared value must not hold one."""
    image = pool.image
    values = {f"image.env.{name}": value for name, value in image.env.items() if isinstance(value, str)}
    values.update({f"image.pip[{i}]": value for i, value in enumerate(image.pip)})
    values.update({f"image.run[{i}]": value for i, value in enumerate(image.run)})
    values.update({f"image.apt[{i}]": value for i, value in enumerate(image.apt)})
    values.update({f"image.extra_indexes[{i}]": value for i, value in enumerate(image.extra_indexes)})
    single = ("runner", "index", "wheelhouse", "proxy", "ca_certificate")
    values.update({f"image.{name}": getattr(image, name) or "" for name in single})
    for field, value in values.items():
        for placeholder in PLACEHOLDERS:
            if placeholder in value:
                raise InvalidField(
                    f"{placeholder} means something else on the node", field=field, hint="Write it another way."
                )


def _node_config(pool: ComputePool, stack: str, selection: Selection, *, head: bool) -> NodeConfig:
    accelerator = selection.accelerator
    return NodeConfig(
        version=VERSION,
        stack=stack,
        pool=pool.name,
        node=NODE_PLACEHOLDER,
        provider=pool.provider.kind,
        head=head,
        scheduler=selection.scheduler,
        accelerator=_node_accelerator(accelerator, selection) if accelerator else None,
        cpu_slots=0 if accelerator else pool.worker.concurrency or 1,
        simulate=selection.simulated,
        env=_variables(pool, selection),
        pip=tuple(pool.image.pip),
        run=tuple(pool.image.run),
        drain_seconds=pool.worker.drain_seconds,
        secret_file=selection.secret_file,
        packages=_package_source(pool),
        preload=tuple(pool.image.preload),
        slice_hosts=selection.hosts if selection.hosts > 1 else 0,
        follow=follow_on(accelerator, pool.layout) if accelerator else None,
        secrets=dict(sorted(pool.secrets.items())),
        idle_seconds=_seconds(pool, selection, "stop_after_idle"),
        lifetime_seconds=_seconds(pool, selection, "max_lifetime"),
    )


def _seconds(pool: ComputePool, selection: Selection, field: str) -> float:
    """Returns the seconds of the *field* after which a node ends itself, 0 for never.

    Raises `NotSupported` where nothing ends such nodes, `InvalidField` for a time that is shorter than a boot.
    """
    given: str | None = getattr(pool, field)
    if given is None or given == NEVER:
        return 0.0
    idle = _check_end(pool, selection, field, given)
    if seconds_of(given) < seconds_of(idle.at_least):
        raise InvalidField(
            f"is shorter than a node of {pool.provider.data.about.called} takes to boot",
            field=field,
            given=given,
            hint=f"At least {idle.at_least}.",
        )
    return seconds_of(given)


def _check_end(pool: ComputePool, selection: Selection, field: str, given: str) -> Idle:
    """Returns how nodes of the place end themselves. Raises `NotSupported` where they cannot."""
    idle, called = pool.provider.data.idle, pool.provider.data.about.called
    why = "no way is known here by which that ends what it costs" if idle is None else idle.why
    if not why and selection.grouped and idle is not None and not idle.grouped:
        why = "a machine group starts another node in place of one that ends"
    if why or idle is None:
        without = 'Declare action="warn"' if field == "budget" else f"Leave {field} out"
        raise NotSupported(
            f"a node of {called} cannot end itself: {why}",
            field=field,
            given=given,
            hint=f"{without}, and end the fleet yourself: skyinfra destroy.",
        )
    return idle


def _variables(pool: ComputePool, selection: Selection) -> dict[str, str]:
    """Returns the variables of every worker: those of the pool, and those that the network between the nodes needs."""
    needed = {name: value for name, value in selection.env.items() if name not in pool.secrets}
    return dict(sorted({**needed, **pool.variables}.items()))


def _without_slots(head: NodeConfig, pool: ComputePool) -> NodeConfig:
    """Returns the configuration of a *head* on which no task runs, so that it needs nothing of the image."""
    least, most = (pool.range.min, pool.range.max) if pool.range is not None else (0, 0)
    return replace(head, scheduler_only=True, env={}, pip=(), run=(), slice_hosts=0, min_nodes=least, max_nodes=most)


def _node_idle_seconds(pool: ComputePool) -> float:
    """Returns after how long without a task a node of *pool* ends, 0 where the number of nodes is fixed.

    Raises `InvalidField` for a time that is shorter than a boot.
    """
    if pool.range is None:
        return 0.0
    data = pool.provider.data
    assert data.elastic is not None  # noqa: S101 - elsewhere the pool has a number of nodes by now
    given = _IDLE_S if pool.idle_seconds is None else pool.idle_seconds
    whole = pool.stop_after_idle
    if pool.idle_seconds is not None and whole not in (None, NEVER) and seconds_of(whole) <= given:
        raise InvalidField(
            f'the whole fleet ends before a node of it does: stop_after_idle="{whole}"',
            field="idle_seconds",
            given=given,
            hint="Declare less than stop_after_idle, which ends the head as well.",
        )
    if given < seconds_of(data.elastic.at_least):
        raise InvalidField(
            f"is shorter than a node of {data.about.called} takes to boot",
            field="idle_seconds",
            given=given,
            hint=f"At least {seconds_of(data.elastic.at_least):g}.",
        )
    return given


def _package_source(pool: ComputePool) -> PackageSource | None:
    image = pool.image
    certificate = image.ca_certificate.strip() + "\n" if image.ca_certificate is not None else None
    source = PackageSource(image.index, pool.extra_indexes, image.wheelhouse, image.proxy, certificate)
    return source if source != PackageSource() else None


def _node_accelerator(accelerator: Accelerator, selection: Selection) -> NodeAccelerator:
    return NodeAccelerator(
        name=accelerator.name,
        vendor=_vendor(accelerator),
        count=selection.count,
        memory_gb=accelerator.memory_gb * selection.share if selection.share < 1 else accelerator.memory_gb,
        mig_model=accelerator.mig_model,
        layouts=accelerator.layouts(selection.count),
        memory_mode=accelerator.memory_mode,
    )


def _vendor(accelerator: Accelerator) -> Vendor:
    """Returns the vendor whose tools the node uses to find and confine the device; "custom" for others."""
    return next((known for known in get_args(Vendor) if known == accelerator.vendor), "custom")


def _slots(config: NodeConfig) -> Iterator[ManifestSlot]:
    accelerator = config.accelerator
    if accelerator is None:
        yield from (ManifestSlot(index=index, kind="cpu") for index in range(config.cpu_slots))
    elif config.slice_hosts:
        yield ManifestSlot(index=0, kind="host", accelerator=accelerator.name)
    elif accelerator.layouts:
        whole = slot_kind(accelerator.vendor)
        each = [(gpu, p) for gpu, layout in enumerate(accelerator.layouts) for p in mig.parts(layout) or (None,)]
        for index, (gpu, partition) in enumerate(each):
            profile = partition.name if partition else None
            yield ManifestSlot(index, "partition" if partition else whole, accelerator.name, profile, gpu)
    else:
        kind = slot_kind(accelerator.vendor)
        for index in range(accelerator.count):
            yield ManifestSlot(index, kind, accelerator.name, None, index)


def revision(deployment: Deployment) -> str:
    """Returns the hash of what is declared and reaches a node when it is made: equal where no node has to be made anew.

    Not in it: the layout, which reaches running nodes in place (layouts that follow the work, where only one layout
    does, are in it), and whatever comes from the machine that deploys or
    from this version of skyinfra, its templates and steps included. What is left at its default is left out, so that
    a later version may know more fields.
    """
    pool, selection = deployment.pool, deployment.selection
    accelerator = selection.accelerator
    declared = {
        "provider": pool.provider.kind,
        "image": pool.image.model_dump(mode="json", exclude_defaults=True),
        "worker": pool.worker.model_dump(mode="json", exclude_defaults=True, exclude={"concurrency", "executor"}),
        # With an accelerator the layout says how many.
        "cpu_slots": 0 if accelerator else deployment.worker.cpu_slots,
        "frameworks": sorted({each.framework for each in pool.plugins if isinstance(each, Environment)}),
        "accelerator": [_bare(accelerator), accelerator.memory_mode, selection.share] if accelerator else None,
    }
    if pool.layout is not None and pool.provider.data.traits.layout_channel == "metadata":
        # There a machine gets its configuration once, and no more than one layout after that.
        declared["follow"] = asdict(pool.layout)
    if pool.range is not None:
        # Such nodes have their configuration from a template. The bounds reach the head while it runs.
        declared["node_idle_seconds"] = deployment.worker.node_idle_seconds
    if pool.volumes:
        # A node mounts them at its first boot.
        declared["volumes"] = {path: volume.name for path, volume in pool.volumes.items()}
    if pool.mounts:
        declared["mounts"] = [[each.source, each.path, each.mode, each.cache] for each in pool.mounts]
    return hashlib.sha256(json.dumps(declared, sort_keys=True).encode()).hexdigest()[:16]


def _bare(accelerator: Accelerator) -> str:
    """Returns the accelerator without its layout, and without what only chooses the machine."""
    if accelerator.custom:
        return str(accelerator.with_(mig=None, form_factor=None, exact=False))
    return str(accelerator.with_(mig=None, partition=None, form_factor=None, exact=False))
