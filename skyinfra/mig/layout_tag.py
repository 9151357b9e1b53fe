"""A layout as the value of the tag `NAME` of a cloud instance: Terraform writes it, the head reads it.

Tags take letters, digits, spaces and ``+ - = . _ : / @``: ``:`` stands for ``*`` and ``/`` for ``|``, so that
``3g.40gb+1g.10gb:2/7g.80gb`` is ``3g.40gb+1g.10gb*2`` on one GPU and ``7g.80gb`` on the other; ``off`` is no MIG.
"""

from __future__ import annotations

from skyinfra.errors import InvalidLayout, LayoutError, NotSupported, at
from skyinfra.mig.geometry import geometry
from skyinfra.mig.grid import Layout
from skyinfra.mig.layout import PerGpu, per_gpu
from skyinfra.mig.placement import resolve

NAME = "skyinfra:layout"
# Its name where keys take no colon.
ATTRIBUTE = "skyinfra-layout"
LIMIT = 256
_OFF = "off"


def write_tag(declared: str | PerGpu | None) -> str:
    """The tag of a declared layout in its canonical form, None for no MIG. Raises NotSupported where it is too long."""
    if declared is None:
        return _OFF
    text = str(declared).replace("*", ":").replace("|", "/")
    if len(text) > LIMIT:
        raise NotSupported(
            f"a layout travels in a tag of at most {LIMIT} characters",
            field="accelerator.mig",
            given=f"{len(text)} characters",
            hint="Give more of the GPUs the same layout, or declare a pool for each kind of node.",
        )
    return text


def read_tag(text: str, model: str | None, gpus: int) -> tuple[Layout, ...]:
    """One layout for each of *gpus* GPUs of the MIG geometry *model*; none where MIG is off.

    Raises InvalidLayout, and what resolve() raises, with the name of the tag.
    """
    if text.strip().lower() == _OFF:
        return ()
    parts = [part.strip().replace(":", "*") for part in text.split("/")]
    with at(f"tag {NAME}", LayoutError):
        if model is None:
            raise InvalidLayout("the accelerators of this node cannot be partitioned", given=text)
        return resolve(parts[0] if len(parts) == 1 else per_gpu(*parts), geometry(model), gpus)
