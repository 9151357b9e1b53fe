"""An object that stays on a slot between tasks: a model that is loaded once.

In a project of `skyinfra init`: skyinfra deploy && python stateful.py
"""

import skyinfra as sky


@sky.cls
class Model:
    """A model with one weight."""

    @sky.enter
    def load(self) -> None:
        """Runs once in the process of each slot, before the first prediction there."""
        self.weight = 2.0
        print("loaded")

    def predict(self, x: float) -> float:
        """Runs as a task."""
        return self.weight * x


with sky.connect("quickstart", "mig") as pool:
    model = Model()
    print("predictions:", [model.predict(float(x)) >> pool for x in range(5)])
