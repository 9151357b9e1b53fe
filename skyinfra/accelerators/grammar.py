"""The string form of an accelerator: NAME[-MEMORY][-FORM FACTOR][!][:COUNT][/LAYOUT].

"H100", "A100-40GB:4", "H100!:8", "H100:8/3g.40gb+2g.20gb+1g.10gb*2". A bar joins the layouts of single GPUs:
"H100:2/3g.40gb|7g.80gb".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from skyinfra._errors import InvalidAccelerator, InvalidLayout
from skyinfra.accelerators.catalog import Spelling, read_name
from skyinfra.mig import PerGpu, per_gpu, text

_FORM = 'Write it like "H100", "A100-40GB:4", "H100!:8" or "H100:8/3g.40gb".'
_HEAD = re.compile(r"(?P<name>[^:!]*)(?P<before>!?)(?::(?P<count>[^:!]*)(?P<after>!?))?", re.A)
_COUNT = re.compile(r"[1-9]\d{0,5}", re.A)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one string declares."""

    spelling: Spelling
    count: int | None
    exact: bool
    mig: str | PerGpu | None


def read(written: str) -> Declaration:
    """Takes the string apart.

    Raises UnknownAccelerator with the nearest names, InvalidAccelerator naming the part that cannot be read, and
    InvalidLayout (field "mig") for the layout.
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
    return Declaration(
        spelling,
        count=None if form["count"] is None else int(form["count"]),
        exact=bool(form["before"] or form["after"]),
        mig=_layout(layout) if slash else None,
    )


def _layout(written: str) -> str | PerGpu:
    try:
        return per_gpu(*written.split("|")) if "|" in written else text(written)
    except InvalidLayout as error:
        error.at("mig")
        raise
