"""What the example is rendered from: two machines of eight H100, every GPU divided into four, with EFA."""

from cdktf import App

import skyinfra as sky

app = App()
sky.FleetStack(
    app,
    "examples",
    pools=[
        sky.ComputePool(
            name="mig",
            nodes=2,
            provider=sky.AWS(efa=True),
            accelerator=sky.accelerators.H100(count=8, mig={"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}),
            # From a package index: the runner that travels with a stack is a file, which no repository should keep.
            image=sky.Image(python="3.12", runner="skyinfra==0.1.0"),
            disk_gb=500,
            labels={"example": "mig"},
        ),
    ],
)
app.synth()
