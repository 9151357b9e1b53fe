"""Two nodes on this machine, each with a simulated H100 that is partitioned in two.

LIBRARY=cdktn declares the same stack with CDK Terrain in place of cdktf.
"""

import importlib
import os

import skyinfra as sky

App = importlib.import_module(os.environ.get("LIBRARY", "cdktf")).App

app = App()
sky.FleetStack(
    app,
    "quickstart",
    pools=[
        sky.ComputePool(
            name="mig",
            nodes=2,
            provider=sky.Local(simulate=True),
            accelerator=sky.accelerators.H100(mig="3g.40gb"),
        ),
    ],
)
app.synth()
