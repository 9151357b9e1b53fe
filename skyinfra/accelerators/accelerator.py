"""Accelerator: the hardware wanted on one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from skyinfra import mig as _mig
from skyinfra.accelerators import catalog, grammar, partitions
from skyinfra.errors import (
    InvalidAccelerator,
    InvalidPartition,
    LayoutError,
    MigNotSupported,
    PartitionNotSupported,
    UnknownProfile,
    at,
)
from skyinfra.mig import Declared, Geometry, Layout, PerGpu

Scalar: TypeAlias = str | int | float | bool | None
_T = TypeVar("_T", int, str)


class Options(TypedDict, total=False):
    """Arguments of a factory.

    count: how many on one node; None is the smallest machine that carries it.
    memory: of one device, as 80, "80GB" or "80 GB".
    form_factor: such as "SXM", "PCIe" or "NVL".
    mig: one profile name fills each GPU; a list, a mapping or a string with several is each GPU's exact layout;
        mig.per_gpu(...) gives each GPU its own.
    partition, memory_mode: of every AMD GPU, such as "CPX" and "NPS4"; a partition mode alone goes with NPS1.
    exact: no other accelerator may stand in for it, even a better one.
    """

    count: int | None
    memory: str | int | None
    form_factor: str | None
    mig: Declared | PerGpu | None
    partition: str | None
    memory_mode: str | None
    exact: bool


class Changes(Options, total=False):
    """Arguments of `Accelerator.with_`."""

    name: str


@dataclass(frozen=True, init=False)
class Accelerator:
    """The hardware wanted on one node. Immutable and hashable; checked where it is made.

    name: the catalog's, such as "H100"; vendor: "nvidia", "amd", "aws", "google", "intel", "qualcomm", or a custom
    one's own.
    memory_gb: nominal, in decimal GB, of one device.
    count: None is the smallest machine that carries it.
    form_factor: None is any.
    mig: the declared layout, as one string, or one for each GPU.
    partition, memory_mode: the modes of every AMD GPU, such as "CPX" and "NPS1"; None where nothing is declared.
    exact: no other accelerator may stand in for it.
    mig_model: the key of its MIG geometry, None without MIG.
    custom: made by Custom(), not from the catalog.

    Raises UnknownAccelerator for a name that is not in the catalog; InvalidAccelerator for a memory, form factor or
    count that does not exist; MigNotSupported, InvalidLayout, UnknownProfile or LayoutDoesNotFit for the layout;
    PartitionNotSupported or InvalidPartition for the modes.
    """

    name: str
    vendor: str
    memory_gb: int
    count: int | None
    form_factor: str | None
    mig: str | PerGpu | None
    partition: str | None
    memory_mode: str | None
    exact: bool
    architecture: str | None
    mig_model: str | None
    custom: bool
    _chips: int = field(repr=False)
    # What mig was read to, one for each GPU that has a layout of its own.
    _layouts: tuple[Layout, ...] = field(repr=False, compare=False)
    _details: tuple[tuple[str, Scalar], ...] = field(repr=False)

    def __init__(
        self,
        name: str,
        *,
        count: int | None = None,
        memory: str | int | None = None,
        form_factor: str | None = None,
        mig: Declared | PerGpu | None = None,
        partition: str | None = None,
        memory_mode: str | None = None,
        exact: bool = False,
    ) -> None:
        spelling = catalog.read_name(name)
        size = None if memory is None else catalog.read_memory(memory)
        size = _agreed("memory", name, spelling.memory_gb, size)
        form = None if form_factor is None else catalog.read_form_factor(spelling.name, form_factor)
        form = _agreed("form_factor", name, spelling.form_factor, form)
        row = catalog.choose(spelling.name, size, form)
        details = {"memory_type": row.memory_type, "cuda_min": row.cuda_min}
        self._set(
            name=row.name,
            vendor=row.vendor,
            memory_gb=row.memory_gb,
            form_factor=form,
            exact=exact,
            architecture=row.architecture,
            mig_model=row.mig_model,
            custom=False,
            _chips=row.chips,
            _details=tuple((key, value) for key, value in details.items() if value is not None),
        )
        if mig is not None and (partition is not None or memory_mode is not None):
            hint = "mig= divides NVIDIA GPUs, partition= AMD GPUs: give the one that this GPU has."
            raise InvalidPartition("a GPU is divided in one way only", field="partition", given=partition, hint=hint)
        self._set_count_and_mig(count, mig)
        self._set_modes(partition, memory_mode)

    @classmethod
    def parse(cls, text: str) -> Accelerator:
        """Reads a string such as "H100", "A100-40GB:4", "H100!:8" or "H100:8/3g.40gb"; see skyinfra.accelerators.

        Raises InvalidAccelerator with the part that cannot be read, and what the class itself raises.
        """
        if not isinstance(text, str):
            raise InvalidAccelerator("an accelerator is a string or an Accelerator", given=text)
        read = grammar.read(text)
        return cls(
            read.spelling.name,
            memory=read.spelling.memory_gb,
            form_factor=read.spelling.form_factor,
            count=read.count,
            mig=read.mig,
            partition=read.partition,
            memory_mode=read.memory_mode,
            exact=read.exact,
        )

    @classmethod
    def of_custom(
        cls,
        name: str,
        *,
        memory: str | int,
        count: int | None = None,
        form_factor: str | None = None,
        mig: Declared | PerGpu | None = None,
        exact: bool = False,
        vendor: str = "custom",
        mig_model: str | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> Accelerator:
        """Returns an accelerator that is not in the catalog; see Custom."""
        if not isinstance(name, str) or not name.strip():
            raise InvalidAccelerator("a custom accelerator needs a name", field="name", given=name)
        if mig_model is not None:
            with at("mig_model", MigNotSupported):
                _mig.geometry(mig_model)
        for key in {"partition", "memory_mode"} & set(metadata or ()):
            hint = f"They are known for {', '.join(each.name for each in partitions.parts())}."
            raise PartitionNotSupported("a custom accelerator has no partition modes", field=key, hint=hint)
        if mig is not None and vendor != "nvidia":
            hint = 'Say vendor="nvidia", with the name that `nvidia-smi -L` has for it.'
            raise MigNotSupported("NVIDIA's driver makes partitions", field="vendor", given=vendor, hint=hint)
        made = object.__new__(cls)
        made._set(
            name=name.strip(),
            vendor=vendor,
            memory_gb=catalog.read_memory(memory),
            form_factor=form_factor,
            exact=exact,
            architecture=None,
            mig_model=mig_model,
            custom=True,
            _chips=1,
            _details=tuple(sorted((metadata or {}).items())),
            partition=None,
            memory_mode=None,
        )
        made._set_count_and_mig(count, mig)
        return made

    @property
    def memory(self) -> str:
        """The memory of one device, as the argument of that name takes it: ``80GB``."""
        return f"{self.memory_gb}GB"

    @property
    def mig_capable(self) -> bool:
        """Whether it can be partitioned and the profiles are known."""
        return self.mig_model is not None and bool(_mig.geometry(self.mig_model).profiles)

    def mig_geometry(self) -> Geometry:
        """Returns the MIG geometry of one GPU. Raises MigNotSupported, with the GPUs that have one."""
        if self.mig_model is None or not self.mig_capable:
            raise self._no_mig()
        return _mig.geometry(self.mig_model)

    @property
    def chips(self) -> int:
        """The number of devices on one node; a TPU slice has several chips."""
        return (self.count or 1) * self._chips

    @property
    def total_memory_gb(self) -> int:
        """The memory of all its chips, which are separate memories, in decimal GB."""
        return self.chips * self.memory_gb

    @property
    def metadata(self) -> dict[str, Scalar]:
        """Further facts: cuda_min and memory_type where known, and the arguments of Custom."""
        return dict(self._details)

    def layouts(self, count: int | None = None) -> tuple[Layout, ...]:
        """Returns the layout of each GPU, for *count* GPUs (default: the declared count, or 1); () for whole GPUs.

        The partitions of an AMD GPU bear the name of its partition mode; start and size are in XCDs. Raises
        InvalidLayout where per_gpu() holds another number of layouts.
        """
        gpus = (self.count or 1) if count is None else count
        if self.partition is not None:
            return (partitions.part(self.name).layout(self.partition),) * gpus
        if isinstance(self.mig, PerGpu):
            self.mig.check_gpus(gpus)
            return self._layouts
        return self._layouts * gpus

    def with_(self, **changes: Unpack[Changes]) -> Accelerator:
        """Returns a copy with the given fields changed.

        With another name, memory and form factor start from that name's; with another partition mode, the memory mode
        starts from NPS1.
        """
        options: dict[str, Any] = {"name": self.name, "count": self.count, "mig": self.mig, "exact": self.exact}
        if self.custom or "name" not in changes:
            options |= {"memory": self.memory_gb, "form_factor": self.form_factor}
        if not self.custom:
            options |= {"partition": self.partition}
            options |= {} if "partition" in changes else {"memory_mode": self.memory_mode}
        options |= changes
        if not self.custom:
            return Accelerator(**options)
        return self.of_custom(vendor=self.vendor, mig_model=self.mig_model, metadata=self.metadata, **options)

    def __str__(self) -> str:
        """Returns the canonical string; unless custom, it parses back to an equal Accelerator."""
        text = self.name
        usual = None if self.custom else catalog.choose(self.name, form_factor=self.form_factor).memory_gb
        if self.memory_gb != usual:
            text += f"-{self.memory_gb}GB"
        if self.form_factor:
            text += f"-{self.form_factor}"
        if self.exact:
            text += "!"
        if self.count is not None:
            text += f":{self.count}"
        if self.partition is not None:
            memory = "" if self.memory_mode == partitions.UNIFORM else f"+{self.memory_mode}"
            return f"{text}/{self.partition}{memory}"
        return text if self.mig is None else f"{text}/{self.mig}"

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _set_count_and_mig(self, count: int | None, declared: Declared | PerGpu | None) -> None:
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise InvalidAccelerator("the count is a whole number from 1", field="count", given=count)
        self._set(count=count, mig=None, _layouts=())
        if declared is None:
            return
        with at("mig", LayoutError):
            self._set(mig=self._checked(declared))
        if isinstance(declared, PerGpu) and count is None:
            self._set(count=len(declared.layouts))

    def _set_modes(self, partition: str | None, memory_mode: str | None) -> None:
        self._set(partition=None, memory_mode=None)
        if partition is None and memory_mode is None:
            return
        with at("memory_mode" if partition is None else "partition", PartitionNotSupported):
            part = partitions.part(self.name, self.vendor)
        if partition is None:
            raise partitions.memory_alone(part, memory_mode)
        mode, memory = partitions.choose(part, partition, memory_mode)
        self._set(partition=mode, memory_mode=memory)

    def _checked(self, declared: Declared | PerGpu) -> str | PerGpu:
        """The layout in its canonical form. It is the same on every GPU unless given per GPU, so one is tried."""
        geometry = self.mig_geometry()
        if not isinstance(declared, PerGpu):
            self._set(_layouts=self._read(declared, geometry, 1))
            return _mig.text(declared, geometry)
        self._set(_layouts=self._read(declared, geometry, self.count or len(declared.layouts)))
        named = declared.named(geometry)
        return named.layouts[0] if len(named.layouts) == 1 else named

    def _read(self, declared: Declared | PerGpu, geometry: Geometry, gpus: int) -> tuple[Layout, ...]:
        try:
            return _mig.resolve(declared, geometry, gpus)
        except UnknownProfile as error:
            for row in () if self.custom else catalog.variants(self.name):
                other = _mig.geometry(row.mig_model).profiles if row.mig_model else ()
                if any(profile.name == error.given for profile in other):
                    error.hint = f"{error.hint} {self.name}-{row.memory_gb}GB has it."
                    break
            raise

    def _no_mig(self) -> MigNotSupported:
        modes = next((part.modes for part in partitions.parts() if part.name == self.name), None)
        if self.custom and self.mig_model is None:
            hint = f"Give mig_model=, the MIG geometry it has: {', '.join(_mig.models())}."
        elif modes is not None and not self.custom:
            named = " or ".join(f'"{mode}"' for mode in modes)
            return MigNotSupported(
                f"{self.name} has no MIG", hint=f"It is divided by partition modes: partition={named}."
            )
        else:
            rows = (row for name in catalog.names() for row in catalog.variants(name))
            able = (row.name for row in rows if row.mig_model and _mig.geometry(row.mig_model).profiles)
            hint = f"With MIG: {', '.join(dict.fromkeys(able))}."
        if self.mig_model is not None:
            reason = "; ".join(_mig.geometry(self.mig_model).notes) or "no source lists them"
            return MigNotSupported(f"the profiles of {self.name} are not known: {reason}", hint=hint)
        return MigNotSupported(f"{self.name} cannot be partitioned, or its profiles are not known", hint=hint)


def parse(value: str | Accelerator) -> Accelerator:
    """Reads an accelerator string; returns an Accelerator as it is. Raises the errors of Accelerator.parse."""
    return value if isinstance(value, Accelerator) else Accelerator.parse(value)


def parse_preferences(value: str | Accelerator | Sequence[str | Accelerator] | None) -> tuple[Accelerator, ...]:
    """Returns the accelerators in order of preference; () for None.

    Raises InvalidAccelerator for an empty sequence, and what parse() raises, with the index as field.
    """
    if value is None:
        return ()
    if isinstance(value, str | Accelerator):
        return (parse(value),)
    if not isinstance(value, Sequence) or not value:
        raise InvalidAccelerator(
            "accelerators are a string, an Accelerator, or a list of them in order of preference",
            given=value,
            hint='Such as "H100:8", or ["H100:8", "A100:8"].',
        )
    found = []
    for index, each in enumerate(value):
        with at(f"[{index}]"):
            found.append(parse(each))
    return tuple(found)


def _agreed(field: str, name: str, named: _T | None, given: _T | None) -> _T | None:
    if named is not None and given is not None and named != given:
        raise InvalidAccelerator(f"{name!r} says {named}", field=field, given=given)
    return given if named is None else named
