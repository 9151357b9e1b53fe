"""A gang: one function as ranks on several slots, which start and end together.

In a project of `skyinfra init`: skyinfra deploy && python gang.py

`sky.plugins.torch()` and `skyinfra run --torchrun` start ranks of torch.distributed in the same way.
"""

import skyinfra as sky


def rank() -> str:
    """Returns the place of this rank in its gang."""
    gang = sky.gang()
    return f"rank {gang.rank} of {gang.world_size} on {sky.instance_info().slot}"


with sky.connect("quickstart", "mig") as pool:
    for line in pool.launch(rank, framework="none"):
        print(line)
