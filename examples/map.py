"""Many tasks over all slots of a fleet; results come in order, or as they are ready.

In a project of `skyinfra init`: skyinfra deploy && python map.py
"""

import random

import skyinfra as sky


@sky.compute(retries=2)
def inside(seed: int, points: int = 100_000) -> int:
    """Counts random points inside of the quarter circle."""
    numbers = random.Random(seed)
    return sum(numbers.random() ** 2 + numbers.random() ** 2 < 1 for _ in range(points))


with sky.connect("quickstart", "mig") as pool:
    found = list(pool.map(inside, range(40), ordered=False))
    print(f"pi is about {4 * sum(found) / (len(found) * 100_000):.2f}")
