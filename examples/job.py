"""A job: the head of the fleet keeps the task and its result, also when this program ends.

In a project of `skyinfra init`: skyinfra deploy && python job.py
"""

import time

import skyinfra as sky


@sky.compute
def train(epochs: int) -> str:
    """Takes its time."""
    time.sleep(0.1 * epochs)
    return f"{epochs} epochs"


with sky.connect("quickstart", "mig") as pool:
    job = pool.submit(train(20), detach="train-20")
    print("submitted:", job.name)

# Another program, or `skyinfra jobs result quickstart/mig train-20`, may ask for the result later.
with sky.connect("quickstart", "mig") as pool:
    job = pool.job("train-20")
    print("result:", job.result(timeout=60))
    job.forget()
