"""A function on one slot of a fleet, and on every slot.

In a project of `skyinfra init`: skyinfra deploy && python one_task.py
"""

import os

import skyinfra as sky


@sky.compute
def device() -> str:
    """Returns the slot that runs this, and the device that it sees."""
    return f"{sky.instance_info().slot} sees {os.environ.get('CUDA_VISIBLE_DEVICES', 'no GPU')}"


with sky.connect("quickstart", "mig") as pool:
    print("one slot:", device() >> pool)
    for line in device() @ pool:
        print("every slot:", line)
