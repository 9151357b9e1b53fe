"""The questions that can be asked of a provider before anything is made there: ``[preflight]`` of its data file.

Paths lead into an answer: ``instance_type.specs.gpus`` takes fields, ``*`` each entry of a list or an object, and ""
is the answer itself. Where rows are read from an object, ``_key`` is the name of each. A text with braces is filled
with paths: ``"{id} (secure)"``. In addresses, queries and headers ``{0}``, ``{1}`` are the values of the environment
variables of the credentials in their order, ``{token}`` what `Token` has got, ``{region}`` the region that is asked
about, ``{machines}`` the machine types, and ``{NAME}`` another environment variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from skyinfra.declared import Declaration

Texts = Mapping[str, str]


class Machines(Declaration):
    """Reads machine types out of an answer.

    path, query: what is asked. next: path of the address of the next page. rows: path of the list. where, skip:
    patterns by path; a row is kept where all of the first are found, and none of the second. name: of the machine type,
    as in offers. price, spot: USD per hour; scale: what they are multiplied with. spot_where: patterns of rows whose
    price is that of spot machines. priced_in: the region of the price, where regions have prices of their own.
    regions: those that have it now. accelerator, count, memory_gb, vcpus, ram_gib: of one that the offers lack;
    memory_scale, ram_scale: what the sizes are multiplied with. memory_of: whether the memory is of one device, or of
    all. machine: the text for each machine type of the query in {machines}; joined: what stands between them. region:
    the one that is asked about where the query names none. cheapest: how many machines of each accelerator and count
    are kept. complete: whether a machine type that is not listed cannot be had. general: whether machines without
    accelerators are listed too.
    """

    path: str
    query: Texts = Field(default_factory=dict)
    next: str = ""
    rows: str = ""
    where: Texts = Field(default_factory=dict)
    skip: Texts = Field(default_factory=dict)
    name: str
    price: str = ""
    spot: str = ""
    scale: float = 1.0
    spot_where: Texts = Field(default_factory=dict)
    priced_in: str = ""
    regions: str = ""
    accelerator: str = ""
    count: str = ""
    memory_gb: str = ""
    memory_scale: float = 1.0
    memory_of: str = "one"
    vcpus: str = ""
    ram_gib: str = ""
    ram_scale: float = 1.0
    machine: str = "{}"
    joined: str = ","
    region: str = ""
    cheapest: int | None = None
    complete: bool = True
    general: bool = False


class Capacity(Declaration):
    """Reads where machine types can be had now out of another answer: the region of a row, and the names there."""

    path: str
    rows: str = ""
    where: Texts = Field(default_factory=dict)
    skip: Texts = Field(default_factory=dict)
    region: str
    names: str


class Quota(Declaration):
    """Reads a quota. limit, used: paths in a row. what: its unit, in the singular.

    rows, name: for a list of quotas, of which `names` says the one for a machine type: pattern of the type, the quota
    for machines on demand, and for spot. per: whether it counts nodes or accelerators.
    """

    path: str
    rows: str = ""
    name: str = ""
    names: Sequence[Sequence[str]] = ()
    limit: str
    used: str = ""
    what: str
    per: str = "node"


class Existing(Declaration):
    """Reads the machines that an account has; see `Machines`.

    A row holds the name that the fleet has at the provider, of the machine or of what it has, such as its key. id,
    where: of the machine, and its region.
    """

    path: str
    next: str = ""
    rows: str
    id: str
    where: str
    source: str
    date: str


class Token(Declaration):
    """Gets a token for the other questions by posting *fields* as JSON; read: its path in the answer."""

    path: str
    fields: Texts
    read: str


class Asked(Declaration):
    """The questions that a provider answers, and how they are asked.

    nothing: why there is nothing to ask. module: the module with a `check` of its own, for a provider whose API needs
    more than this. credentials: environment variables, those of `[terraform]`; elsewhere: where Terraform's provider
    finds credentials besides. login: how they are made. open: whether the machine types can be asked without. address,
    address_variable: of the API, and the environment variable with another one. headers: of every question. account: a
    path that only valid credentials may ask. existing: the machines that there are, where two may have one name.
    unasked: a sentence on what the provider cannot be asked.
    """

    nothing: str = ""
    module: str = ""
    credentials: Sequence[Sequence[str]] = ()
    elsewhere: str = ""
    login: str = ""
    open: bool = False
    address: str = ""
    address_variable: str = ""
    headers: Texts = Field(default_factory=dict)
    token: Token | None = None
    account: str = ""
    machines: Sequence[Machines] = ()
    capacity: Capacity | None = None
    existing: Existing | None = None
    quota: Quota | None = None
    unasked: str = ""
    source: str = ""
    date: str = ""
