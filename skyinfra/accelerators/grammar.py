"""The string form of an accelerator: NAME[-MEMORY][-FORM FACTOR][!][:COUNT][/LAYOUT].

"H100", "A100-40GB:4", "H100!:8", "H100:8/3g.40gb+2g.20gb+1g.10gb*2". A bar joins the layouts of single GPUs:
"H100:2/3g.40gb|7g.80gb". Of an AMD GPU the layout is its partition mode, with its memory mode: "MI300X:8/CPX+NPS4".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from skyinfra.accelerators.catalog import Spelling, read_name, variants
from skyinfra.accelerators.partitions import FORM as PARTITION_FORM
from skyinfra.errors import InvalidAccelerator, InvalidLayout, InvalidPartition, at
from skyinfra.mig import PerGpu, per_gpu, text

_FORM = 'Write it like "H100", "A100-40GB:4", "H100!:8" or "H100:8/3g.40gb".'
_HEAD = re.compile(r"(?P<name>[^:!]*)(?P<before>!?)(?::(?P<count>[^:!]*)(?P<after>!?))?", re.A)
_COUNT = re.compile(r"[1-9]\d{0,5}", re.A)
_MODES = re.compile(r"(?P<partition>[a-z]+)(?:\s*\+\s*(?P<memory>[a-z]+\d*))?", re.A | re.I)
# Words that are partition modes on any accelerator, so that the error names the mode.
_PARTITION = re.compile(r"[a-z]PX\b", re.A | re.I)


@dataclass(frozen=True, slots=True)
class Declaration:
    """The parts of one accelerator string."""

    spelling: Spelling
    count: int | None
    exact: bool
    mig: str | PerGpu | None
    partition: str | None = None
    memory_mode: str | None = None


def read(written: str) -> Declaration:
    """Takes the string apart.

    Raises UnknownAccelerator with the nearest names, InvalidAccelerator naming the part that cannot be read, and
    InvalidLayout (field "mig") or InvalidPartition (field "partition") for the layout.
    """
    head, slash, layout = written.partition("/")
    form = _HEAD.fullmatch(head.strip())
    if not form or not form["name"].strip() or (form["before"] and form["after"]):
        raise InvalidAccelerator("cannot be read as an accelerator", given=head.strip(), hint=_FORM)
    spelling = read_name(form["name"])
    if form["count"] is not None and not _COUNT.fullmatch(form["count"].strip()):
        raise InvalidAccelerator(
            "the count is a whole number from 1", field="count", given=form["count"].strip(), hint=_FORM
        )
    modes = slash and (variants(spelling.name)[0].vendor == "amd" or _PARTITION.match(layout.strip()))
    partition, memory_mode = _modes(layout) if modes else (None, None)
    return Declaration(
        spelling,
        count=None if form["count"] is None else int(form["count"]),
        exact=bool(form["before"] or form["after"]),
        mig=read_layout(layout) if slash and partition is None else None,
        partition=partition,
        memory_mode=memory_mode,
    )


def _modes(written: str) -> tuple[str | None, str | None]:
    """The partition and the memory mode; nothing where it is a MIG layout, which begins with a digit or a size."""
    form = _MODES.fullmatch(written.strip())
    if form:
        return form["partition"], form["memory"]
    if written.strip()[:1] in tuple("0123456789>"):
        return None, None
    every = "every GPU of a node has the same modes" if "|" in written else "not a partition mode"
    raise InvalidPartition(every, field="partition", given=written.strip(), hint=PARTITION_FORM)


def read_layout(written: str) -> str | PerGpu:
    with at("mig", InvalidLayout):
        return per_gpu(*written.split("|")) if "|" in written else text(written)
