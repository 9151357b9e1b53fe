"""The end of a deploy: waiting for nodes that boot."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyinfra.terraform.project import SynthesizedStack


def wait_for_nodes(stack: SynthesizedStack, patience: float) -> None:
    """Waits until the bought fleets of *stack* are ready, and says how far they are on stderr.

    Local nodes are ready when Terraform is. Raises what `wait_until_ready` raises.
    """
    from skyinfra.client.arrival import wait_until_ready

    for name, manifest in stack.fleets().items():
        if manifest.provider == "local":
            continue

        def say(text: str, name: str = name) -> None:
            sys.stderr.write(f"{name}: {text}\n")
            sys.stderr.flush()

        wait_until_ready(manifest, patience=patience, on_change=say)
