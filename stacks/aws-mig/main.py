"""Two machines of eight H100 on AWS, every GPU divided into four: 64 slots, and a CPU node beside them.

TF_CLOUD_ORGANIZATION=NAME keeps the state in HCP Terraform, in the workspace aws-mig; without it, it is a file here.
LIBRARY=cdktn declares the same stack with CDK Terrain in place of cdktf.
"""

import importlib
import os

import skyinfra as sky

App = importlib.import_module(os.environ.get("LIBRARY", "cdktf")).App
organization = os.environ.get("TF_CLOUD_ORGANIZATION")

app = App()
sky.FleetStack(
    app,
    "aws-mig",
    backend=sky.HCPTerraform(organization=organization, workspace="aws-mig") if organization else None,
    pools=[
        sky.ComputePool(
            name="mig",
            nodes=2,
            provider=sky.AWS(region="us-east-1"),
            accelerator=sky.accelerators.H100(count=8, mig={"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2}),
            image=sky.Image(pip=["torch"]),
            labels={"team": "research"},
        ),
        sky.ComputePool(
            name="cpu",
            provider=sky.AWS(region="us-east-1"),
            vcpus=8,
            worker=sky.Worker(concurrency=4),
        ),
    ],
)
app.synth()
