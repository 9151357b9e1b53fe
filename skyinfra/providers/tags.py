"""A layout as the value of a tag, which the node reads through its metadata service.

Tags take letters, digits, spaces and ``+ - = . _ : / @``, so that ``*`` is written ``:`` and ``|`` ``/``:
``3g.40gb+1g.10gb:2/7g.80gb``. `skyinfra.runner` reads it back.
"""

from __future__ import annotations

from skyinfra.accelerators import Accelerator
from skyinfra.errors import NotSupported

LIMIT = 256
OFF = "off"


def layout_tag(accelerator: Accelerator) -> str | None:
    """The tag of the declared layout; ``off`` without one, None for what has no layouts. Raises `NotSupported`."""
    if accelerator.mig_model is None:
        return None
    if accelerator.mig is None:
        return OFF
    text = str(accelerator.mig).replace("*", ":").replace("|", "/")
    if len(text) > LIMIT:
        raise NotSupported(
            f"a layout travels in a tag of at most {LIMIT} characters",
            field="accelerator.mig",
            given=f"{len(text)} characters",
            hint="Give more of the GPUs the same layout, or declare a pool for each kind of node.",
        )
    return text
