"""The declaration: N nodes of one accelerator at one provider, with image and workers."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, PlainValidator, model_validator

import skyinfra
from skyinfra import accelerators as catalog
from skyinfra.accelerators import Accelerator
from skyinfra.declared import Declaration, DurationOrNever, check_package, check_requirement
from skyinfra.errors import ConcurrencyMismatch, InvalidField, SkyinfraError, at, check_mapping
from skyinfra.mig import Follow, parts
from skyinfra.plugins import Environment, Mig
from skyinfra.protocol.secrets import Secret
from skyinfra.providers import Places, Provider, kinds, strings
from skyinfra.providers.mounts import Mounts
from skyinfra.providers.volumes import Volumes

if TYPE_CHECKING:
    from types import TracebackType

_NAME = r"^[a-z][a-z0-9-]{0,39}$"
STACK_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
_MODULE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
# A user, or a token, in front of the host of an http or https address, as it may stand in a requirement.
_CREDENTIALS = re.compile(r"https?://[^/\s?#]*@")
_ADDRESS = re.compile(r"https?://[^\s/@?#,]+(/[^\s@,]*)?", re.ASCII)
_PROXY = re.compile(r"https?://[^\s/@?#,]+/?", re.ASCII)


Strings = Annotated[tuple[str, ...] | list[str], BeforeValidator(strings)]
_Module = Annotated[str, Field(pattern=_MODULE)]
Modules = Annotated[tuple[_Module, ...] | list[_Module], BeforeValidator(strings)]


def _variable(value: object) -> object:
    if not isinstance(value, str | Secret):
        raise ValueError("expected text, or sky.Secret(NAME)")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("no variable of a process can hold a NUL")
    return value


def _written(value: str | Secret) -> str | dict[str, str]:
    return value if isinstance(value, str) else {"secret": value.name}


_Value = Annotated[str | Secret, PlainValidator(_variable), PlainSerializer(_written)]
Variables = dict[Annotated[str, Field(pattern=_VARIABLE)], _Value]


class Image(Declaration):
    """The software of a node besides the runner.

    python: version such as ``"3.12"``; None is that of the machine that deploys the fleet first. pip: requirements.
    apt: Debian packages. env: variables of every worker, which stand in clear in the plan, in the state and on the
    nodes; a secret is named, ``env={"HF_TOKEN": sky.Secret("HF_TOKEN")}``, and each task has it from the client that
    submits it: neither run nor pip has it. preload: modules, such as ``torch``, that are imported once on each node,
    before the processes of its slots are forked, which then start in a moment; one that opens a device while it is
    imported is not kept. run: shell commands, once, before the first slot starts. runner: where a cloud node gets
    skyinfra itself, as pip takes it (a URL of a wheel, ``skyinfra==0.1.0``); a wheel is held to the hash that its URL
    may end with (``#sha256=...``). None is a wheel of the code that deploys the fleet first, which travels with it and
    is kept for nodes that come later; pods and instances of marketplaces, to which nothing travels, need one with its
    hash.

    index: URL of the package index, in place of PyPI. extra_indexes: asked besides. wheelhouse: URL of a page, or path
    of a folder on the image, with links to wheels; where no index is declared with it, nothing else is asked. proxy:
    for HTTP and HTTPS, for everything that is installed. ca_certificate: in PEM, of whoever signs for them; nodes trust
    it. Addresses hold no credentials: they would stand in the plan and in the user data.
    """

    python: str | None = Field(default=None, pattern=r"^3\.\d+(\.\d+)?$", examples=["3.12"])
    pip: Strings = ()
    apt: Strings = ()
    env: Variables = Field(default_factory=dict)
    run: Strings = ()
    preload: Modules = ()
    runner: str | None = None
    index: str | None = None
    extra_indexes: Strings = ()
    wheelhouse: str | None = None
    proxy: str | None = None
    ca_certificate: str | None = None

    @model_validator(mode="after")
    def _check_sources(self) -> Image:
        for field, value in self._addresses():
            _check_no_credentials(field, value)
            form = _PROXY if field == "Image.proxy" else _ADDRESS
            if not form.fullmatch(value) and not (field == "Image.wheelhouse" and value.startswith("/")):
                raise InvalidField("expected an address such as https://host/path", field=field, given=value)
        for field, values in (("pip", self.pip), ("runner", [self.runner] if self.runner else [])):
            for value in values:
                _check_no_credentials(f"Image.{field}", value)
        if self.runner is not None and (self.runner.startswith("-") or not self.runner.isprintable()):
            raise InvalidField("is no requirement that pip takes", field="Image.runner", given=self.runner)
        if self.ca_certificate is not None:
            _check_certificate(self.ca_certificate)
        for field, values, check in (("pip", self.pip, check_requirement), ("apt", self.apt, check_package)):
            for position, value in enumerate(values):
                check(f"Image.{field}[{position}]", value)
        check_mapping("Image.env", dict.fromkeys(self.env, ""))
        for variable, secret in self.env.items():
            if isinstance(secret, Secret) and not secret.environment:
                raise InvalidField(
                    "is a variable of every task, and this secret is to be none",
                    field=f"Image.env.{variable}",
                    hint="Name it where a task is made: @sky.compute(secrets=[sky.Secret(NAME, environment=False)]).",
                )
            if isinstance(secret, Secret) and secret.file is not None:
                raise InvalidField(
                    "an image names a secret, and each client finds it where it has it",
                    field=f"Image.env.{variable}",
                    hint=f"Leave the file out here: sky.connect(..., secrets=[sky.{secret!r}]) says where it is.",
                )
        return self

    def _addresses(self) -> Iterator[tuple[str, str]]:
        for name in ("index", "wheelhouse", "proxy"):
            if (value := getattr(self, name)) is not None:
                yield f"Image.{name}", value
        for position, value in enumerate(self.extra_indexes):
            yield f"Image.extra_indexes[{position}]", value


def _check_no_credentials(field: str, value: str) -> None:
    if _CREDENTIALS.search(value):
        raise InvalidField(
            "an address with credentials would stand in the plan and in the user data",
            field=field,
            hint="Leave them out of it. An index can let the nodes in by their network or their role, through a proxy "
            "that knows the credentials, or with a netrc file in an image of your own.",
        )


def _check_certificate(text: str) -> None:
    field = "Image.ca_certificate"
    if "PRIVATE KEY" in text:
        raise InvalidField("holds a private key", field=field, hint="Give the certificate alone.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        hint = 'It begins with "-----BEGIN CERTIFICATE-----": Path("ca.pem").read_text().'
        raise InvalidField("no certificate in PEM", field=field, hint=hint) from None


class Worker(Declaration):
    """The workers of a node.

    concurrency: workers on one node. None is one for each slot the layout gives, or one on a CPU node; a number
    that disagrees with the layout is an error. executor: each worker is a process of its own. drain_seconds: for how
    long a task may go on on a slot that a changed layout takes away; then it is ended and starts again on another.
    """

    concurrency: int | None = Field(default=None, ge=1)
    executor: Literal["process"] = "process"
    drain_seconds: float = Field(default=600, ge=0, allow_inf_nan=False)


class Range(Declaration):
    """A number of nodes that follows the work: ``sky.Range(0, 8)`` is at least *min* and at most *max*.

    Where another number is an apply, `skyinfra scale` chooses it, from 1 on.
    """

    min: int = Field(ge=0)
    max: int = Field(ge=1)

    def __init__(self, min: int, max: int) -> None:
        super().__init__(**{"min": min, "max": max})

    @model_validator(mode="after")
    def _check_order(self) -> Range:
        if self.max <= self.min:
            fixed = f"A fixed number is nodes={self.max}." if self.max == self.min else ""
            hint = f"{fixed} Such as sky.Range(0, 8): at least none, at most eight.".strip()
            raise InvalidField(f"must be more than the least, {self.min}", field="Range.max", given=self.max, hint=hint)
        return self


class Budget(Declaration):
    """The USD that a fleet of the pool may cost from its deploy to its destroy, by the hours of its machines.

    action: ``"warn"``: from 80 % on `skyinfra status`, `skyinfra cost` and the fleet page say so, and ``--notify`` does
    from 50 % on; `skyinfra cost` exits with 1 once it is spent. It is changed without touching a node. ``"stop"``: the
    nodes end themselves once it is spent, by the account of the head, and without a head by what it said last; those
    that a later deploy makes go on with that account. A machine has the budget that it was made with.
    """

    usd: float = Field(gt=0, allow_inf_nan=False)
    action: Literal["warn", "stop"] = "warn"


def _provider(given: object) -> object:
    """Returns *given*. Raises ValueError, with what to write, for a name or a class in place of a provider."""
    classes = {
        each.kind: each for each in _classes(Provider.__subclasses__()) if getattr(each, "kind", None) in kinds()
    }
    if isinstance(given, str):
        names = {each.__name__.lower(): each for each in classes.values()} | classes
        near = get_close_matches(given.lower(), names, n=1)
        write = f"Write sky.{names[near[0]].__name__}(...)." if near else "Such as sky.AWS(...) or sky.Local(...)."
        raise ValueError(f"expected a provider, not its name\n{write}")
    if isinstance(given, type) and issubclass(given, Provider):
        raise ValueError(f"expected a provider, not its class\nWrite sky.{given.__name__}(...).")
    if not isinstance(given, Provider):
        raise ValueError("expected a provider\nSuch as sky.AWS(...) or sky.Local(...).")
    return given


def _each(pool: type[Declaration], position: int, given: object) -> Provider:
    try:
        return cast(Provider, _provider(given))
    except ValueError as error:
        why, _, hint = str(error).partition("\n")
        field = f"{pool.__name__}.provider[{position}]"
        raise InvalidField(why, field=field, given=str(given), hint=hint or None) from None


def _classes(found: Iterable[type[Provider]]) -> Iterator[type[Provider]]:
    """Yields the classes *found* and all below them."""
    for each in found:
        yield each
        yield from _classes(each.__subclasses__())


def _nodes(given: object) -> object:
    """Returns *given*. Raises ValueError, in one sentence, for what is neither a number of nodes nor a range."""
    if isinstance(given, Range):
        return given
    if isinstance(given, bool) or not isinstance(given, int):
        raise ValueError("expected a whole number, or a range such as sky.Range(0, 8)")
    if given < 1:
        raise ValueError("input should be greater than or equal to 1")
    return given


if TYPE_CHECKING:

    class _Providers:
        """Takes a provider, or several in order, and is one: for type checkers."""

        def __get__(self, pool: object, cls: type) -> Provider: ...

        def __set__(self, pool: object, given: Provider | Sequence[Provider] | Places) -> None: ...


class ComputePool(Declaration):
    """N nodes of one accelerator at one provider.

    provider: where the nodes come from, such as ``sky.Local(simulate=True)``; a list of clouds in order, or
    ``sky.cheapest([...])``: `skyinfra deploy` goes on with the next one where it is refused for want of capacity.
    accelerator: a string such as ``"H100:8/3g.40gb"``, an `Accelerator`, a list of them in order of preference, or None
    for CPU nodes; of a list the first that the shipped offers have is taken, and the others are tried as further places
    are. places: the list that is given as provider. name: of the pool, unique in its stack. nodes: how many, or
    ``sky.Range(0, 8)``: the head, which then carries no slots, starts nodes for work that no slot can take, and a node
    that had no task for idle_seconds ends; where another number is an apply, `skyinfra scale` chooses it. spot:
    interruptible capacity. vcpus, memory_gb, disk_gb: minima of one node. max_hourly_cost: USD per hour and node. rdma:
    nodes reach each other's memory (InfiniBand, RoCE, EFA), on machines that the provider connects so. labels: put on
    everything that is created. stack: the stack of a pool that is used as ``with sky.ComputePool(...) as pool:``.
    layout: ``sky.mig.Follow(among=[...])``: the GPUs change between these layouts as the work asks for it; the declared
    one is that which a node begins with, or the first of them. volumes: that outlive the fleet, by the path where nodes
    mount them: ``{"/data": sky.Volume(...)}``. mounts: folders of buckets that every node mounts:
    ``[sky.Mount("s3://my-bucket/data", "/data")]``. stop_after_idle: such as ``"30m"``: the nodes end themselves when
    nothing has used the fleet for that long; the next deploy makes them anew. max_lifetime: such as ``"12h"``: they end
    then, whatever runs. A pool that declares none of them, or ``"never"``, stays; a ``with`` block of machines that
    cost something has limits of its own. budget: what the fleet may cost in all, ``sky.Budget(usd=200)``. replace_sick:
    a deploy replaces nodes of which half of the slots or more have been sick for ten minutes, but for the head, and two
    an hour at most.

    Raises a `DeclarationError`, with the path of the field, for what cannot be.
    """

    if TYPE_CHECKING:
        provider: _Providers = Field()
    else:
        provider: Annotated[Provider, BeforeValidator(_provider)]
    accelerator: str | Accelerator | Sequence[str | Accelerator] | None = None
    name: str = Field(default="pool", pattern=_NAME, examples=["train-2"])
    stack: str | None = Field(default=None, pattern=STACK_NAME, examples=["Inference", "gpu_2"])
    nodes: Annotated[int | Range, BeforeValidator(_nodes)] = 1
    idle_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    image: Image = Field(default_factory=Image)
    worker: Worker = Field(default_factory=Worker)
    plugins: Annotated[tuple[Mig | Environment, ...] | list[Mig | Environment], BeforeValidator(strings)] = ()
    spot: bool = False
    vcpus: int | None = Field(default=None, ge=1)
    memory_gb: float | None = Field(default=None, gt=0)
    disk_gb: int | None = Field(default=None, ge=1)
    max_hourly_cost: float | None = Field(default=None, gt=0)
    rdma: bool = False
    labels: Mapping[str, str] = Field(default_factory=dict)
    layout: InstanceOf[Follow] | None = None
    volumes: Volumes = Field(default_factory=dict)
    mounts: Mounts = ()
    stop_after_idle: DurationOrNever | None = None
    max_lifetime: DurationOrNever | None = None
    budget: Budget | None = None
    replace_sick: bool = False
    places: InstanceOf[Places] | None = None

    @model_validator(mode="before")
    @classmethod
    def _split_places(cls, values: Any) -> Any:
        given = values.get("provider") if isinstance(values, dict) else None
        if isinstance(given, list | tuple):
            given = Places(each=tuple(_each(cls, position, each) for position, each in enumerate(given)))
        if not isinstance(given, Places):
            return values
        if not given.each:
            hint = "Such as provider=[sky.AWS(), sky.GCP()]."
            raise InvalidField(
                "expected at least one provider", field=f"{cls.__name__}.provider", given="[]", hint=hint
            )
        return {**values, "provider": given.each[0], "places": given if len(given.each) > 1 else None}

    @classmethod
    def also_wrong(cls, values: Mapping[str, Any]) -> Sequence[SkyinfraError]:
        """See `Declaration`: a misspelled accelerator, say, beside an unknown field."""
        try:
            catalog.parse_preferences(values.get("accelerator"))
        except SkyinfraError as error:
            return (error.at(f"{cls.__name__}.accelerator"),)
        except (TypeError, ValueError, AttributeError):  # pydantic complains about it
            pass
        return ()

    @model_validator(mode="after")
    def _check_size(self) -> ComputePool:
        if self.idle_seconds is not None and self.range is None:
            raise InvalidField(
                "a fixed number of nodes stays, and one that ends would be started again",
                field="ComputePool.idle_seconds",
                given=self.idle_seconds,
                hint=f"Declare nodes=sky.Range(0, {self.most_nodes}), or the end of the whole fleet: "
                'stop_after_idle="30m".',
            )
        return self

    @property
    def range(self) -> Range | None:
        """The least and the most nodes, where the number follows the work."""
        return self.nodes if isinstance(self.nodes, Range) else None

    @property
    def most_nodes(self) -> int:
        """The number of nodes, or the most that there may be."""
        return self.nodes.max if isinstance(self.nodes, Range) else self.nodes

    @cached_property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The declared accelerators in order of preference, with the plugins applied; empty for CPU nodes."""
        parsed, layout = self._parsed(), self.layout
        if layout is None:
            return parsed
        return tuple(each if each.mig is not None else each.with_(mig=layout.among[0]) for each in parsed)

    def _parsed(self) -> tuple[Accelerator, ...]:
        parsed = catalog.parse_preferences(self.accelerator)
        for plugin in self.plugins:
            if isinstance(plugin, Mig):
                parsed = tuple(plugin.apply(accelerator) for accelerator in parsed)
        return parsed

    @property
    def variables(self) -> dict[str, str]:
        """The variables of every worker: those of the image, and of the plugins where the image says nothing."""
        declared: dict[str, str] = {}
        for plugin in self.plugins:
            if isinstance(plugin, Environment):
                declared.update(plugin.variables)
        clear = {name: value for name, value in self.image.env.items() if isinstance(value, str)}
        return {name: value for name, value in (declared | clear).items() if name not in self.secrets}

    @property
    def secrets(self) -> dict[str, str]:
        """The names of the secrets that the image declares, by their variables."""
        return {name: value.name for name, value in self.image.env.items() if isinstance(value, Secret)}

    @property
    def extra_indexes(self) -> tuple[str, ...]:
        """URLs of the package indexes that are asked besides: the image's, and the plugins'.

        Where the image says in place of PyPI where packages come from, its own alone.
        """
        own = tuple(self.image.extra_indexes)
        if self.image.index is not None or self.image.wheelhouse is not None:
            return own
        added = [plugin.index for plugin in self.plugins if isinstance(plugin, Environment) and plugin.index]
        return tuple(dict.fromkeys((*own, *added)))

    @model_validator(mode="after")
    def _check(self) -> ComputePool:
        with at(f"ComputePool({self.name!r}).accelerator"):
            accelerators = self._parsed()
        if self.layout is not None:
            self._check_follow(accelerators)
        if not accelerators and any(isinstance(plugin, Mig) for plugin in self.plugins):
            raise InvalidField("a layout needs an accelerator", field=f"ComputePool({self.name!r}).plugins")
        for plugin in self.plugins:
            if isinstance(plugin, Environment):
                with at(f"ComputePool({self.name!r})", InvalidField):
                    plugin.check(accelerators)
        for accelerator in self.accelerators:
            check_concurrency(self, accelerator)
        return self

    def _check_follow(self, accelerators: Sequence[Accelerator]) -> None:
        field = f"ComputePool({self.name!r})"
        if not accelerators:
            raise InvalidField("layouts need an accelerator", field=f"{field}.layout")
        if self.worker.concurrency is not None:
            raise InvalidField(
                "the number of slots follows the layouts",
                field=f"{field}.worker.concurrency",
                given=self.worker.concurrency,
                hint="Leave concurrency out.",
            )
        for accelerator in accelerators:
            follow_on(accelerator, self.layout, f"{field}.layout")

    def __enter__(self) -> skyinfra.Pool:
        """Deploys the pool as a stack of its own and connects to it; leaving the block destroys it."""
        try:
            return skyinfra._enter(self)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # without what was under way: Terraform, or the Node of cdktf

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            skyinfra._leave(self)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    def __rrshift__(self, task: object) -> NoReturn:
        raise self._deployed_first(f"{_called(task)} >> pool")

    def __rmatmul__(self, task: object) -> NoReturn:
        raise self._deployed_first(f"{_called(task)} @ pool")

    def _deployed_first(self, written: str) -> InvalidField:
        return InvalidField(
            "is a declaration, and runs nothing before it is deployed",
            field=f"ComputePool({self.name!r})",
            hint=f"Deploy it around a block: `with sky.ComputePool(...) as pool: {written}`. Or connect to a fleet "
            f'that is deployed: `pool = sky.connect("STACK/{self.name}")`.',
        )


def _called(task: object) -> str:
    """Returns how *task* was made, as far as its name says."""
    return f"{getattr(task, 'name', 'task').split('.')[-1]}(...)"


def follow_on(accelerator: Accelerator, layout: Follow | None, field: str = "layout") -> Follow | None:
    """*layout* with the names of the profiles of *accelerator*; None for None.

    Raises a `LayoutError` where one of the layouts has no placement on it.
    """
    if layout is None:
        return None
    with at(field):
        return layout.on(accelerator.mig_geometry())


def check_concurrency(pool: ComputePool, accelerator: Accelerator) -> None:
    """Raises `ConcurrencyMismatch` where ``worker.concurrency`` is not the number of slots of one node.

    With no count declared, the node may carry several accelerators, so a multiple of one accelerator's slots passes;
    the compiler, which knows the machine, checks again.
    """
    concurrency = pool.worker.concurrency
    if concurrency is None:
        return
    count = accelerator.count or 1
    slots = slot_count(accelerator, count)
    if concurrency == slots or (accelerator.count is None and concurrency % slots == 0):
        return
    raise ConcurrencyMismatch(
        f"{accelerator} gives {slots} slot{'s' if slots != 1 else ''} on each node, one worker each",
        field=f"ComputePool({pool.name!r}).worker.concurrency",
        given=concurrency,
        hint=f"Leave concurrency out, or set it to {slots}.",
    )


def slot_count(accelerator: Accelerator, count: int) -> int:
    """Slots of a node with *count* of *accelerator*: its partitions, or one for each accelerator."""
    layouts = accelerator.layouts(count)
    return sum(len(parts(layout)) or 1 for layout in layouts) if layouts else count
