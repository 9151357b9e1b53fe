"""The prebuilt typed bindings of the aws provider, in a virtual environment of their own below build/."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

VERSION = "20.1.0"
FOLDER = Path(__file__).resolve().parent.parent / "build" / "bindings"

# One instance as the bindings declare it; skyinfra's pool of one node is this one, with its network and its access.
INSTANCE = """
from cdktf import App, TerraformStack
from cdktf_cdktf_provider_aws.instance import Instance
from cdktf_cdktf_provider_aws.provider import AwsProvider
app = App()
stack = TerraformStack(app, "s")
AwsProvider(stack, "aws", region="us-east-1")
Instance(stack, "head", ami="ami-0123456789abcdef0", instance_type="p5.4xlarge", user_data="#cloud-config",
         tags={"Name": "s/pool-0"})
app.synth()
"""


def python() -> Path | None:
    """The Python that has them, installed where it is not there yet (some minutes); None where that fails."""
    program, done = FOLDER / "bin" / "python", FOLDER / f".installed-{VERSION}"
    if done.exists():
        return program
    print(f"installing cdktf-cdktf-provider-aws {VERSION} in {FOLDER} ...", file=sys.stderr)
    wanted = [f"cdktf=={metadata.version('cdktf')}", f"cdktf-cdktf-provider-aws=={VERSION}"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True, stdout=sys.stderr)
        install = [str(program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
        subprocess.run(install, check=True, stdout=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"left out: {error}", file=sys.stderr)
        return None
    done.touch()
    return program
