"""Makes the skeleton of a cloud provider: ``python -m tools.new_provider KIND Class``.

The module is valid as it stands; what is written ``FILL`` is left to do, see CONTRIBUTING.md.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_CODE = '''"""{name}: FILL."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.providers.cloud import Chosen, CloudProvider
from skyinfra.providers.data import TerraformProvider


class {name}(CloudProvider):
    """FILL: what it is, and by which Terraform provider.

    region: such as ``FILL``. instance_types: to take, in order of preference. allow_cidrs: networks that may reach the
    head; with none, nothing comes in. ssh_public_key: to log in with. image: one of your own.
    """

    kind: ClassVar[str] = "{kind}"

    region: str = Field(default="FILL")
    image: str | None = None

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """The provider of the region; its token comes from the environment."""
        return (self.data.terraform_provider(region=self.region),)

    def inputs(self, chosen: Chosen, head: str | None) -> dict[str, object]:
        """The inputs of modules/{kind} besides those of every cloud."""
        return {{}}
'''
_DATA = """# {name}. `skyinfra.providers.data` says what each table means.

[about]
called = "{name}"
nodes = "FILL"
head = "FILL"
tested = "planned against the provider's schema; never on the cloud"

[terraform]
name = "{kind}"
source = "registry.terraform.io/FILL/{kind}"
version = "FILL"
config = ["region"]

[boot]
form = "cloud-config"
limit = 65_536
gzip = false
delivery = "ssh"
source = "FILL"
date = "{today}"

[traits]
layout_channel = "client"
partitioned_by = "nobody"
node_to_node = true
groups = false
spot = "no"
metadata_hosts = ["169.254.169.254"]
ssh_user = "root"
source = "FILL"
date = "{today}"

[images.cpu]
x86_64 = "FILL"

[machines]
head = "FILL"
general = []

[prices]
region = "FILL"
date = "{today}"

[prices.usd_per_hour]

[preflight]
credentials = [["FILL"]]
login = "FILL"
unasked = "FILL"
source = "FILL"
date = "{today}"
"""
_MAIN = """locals {{
  head   = local.names[0]
  places = {{ head = "FILL:${{var.scheduler_port}}", bucket = "FILL", runner = "FILL/${{basename(var.runner_file)}}" }}
  volume = ""
  limit  = {{ bytes = 65536, gzip = false, called = "{name}" }}
}}

# FILL: the network, the head, the workers.
"""
_VARIABLES = """# The core inputs whose values are this provider's; the others stand in core.tf.

variable "machine_types" {
  description = "Machine types in order of preference."
  type        = list(string)
  nullable    = false
}

variable "image" {
  description = "Machine image."
  type        = string
  nullable    = false
}

variable "disk_gb" {
  description = "Disk of a node in GB; 0 takes that of the machine type."
  type        = number
  default     = 0
  nullable    = false
}

variable "spot" {
  description = "Whether the nodes are interruptible."
  type        = bool
  default     = false
  nullable    = false
}

variable "ssh_public_key" {
  description = "OpenSSH public key to log in with; empty for none."
  type        = string
  default     = ""
  nullable    = false
}

variable "allow_cidrs" {
  description = "Networks that may reach the head's scheduler."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "labels" {
  description = "Labels on everything the module creates."
  type        = map(string)
  default     = {}
  nullable    = false
}
"""
_OUTPUTS = """output "fleet" {{
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = {{
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = "{kind}"
    simulated = false
    head      = {{ address = "FILL", port = var.scheduler_port }}
    nodes = [for name in local.names : {{
      name           = name
      id             = "FILL"
      address        = "FILL"
      public_address = null
      zone           = null
      machine_type   = var.machine_types[0]
      head           = name == local.head
    }}]
    slots  = var.slots
    secret = local.secret
  }}
}}
"""
_VERSIONS = 'terraform {\n  required_version = ">= 1.4"\n}\n'
_README = "# modules/{kind}\n\nFILL: what it makes, an example, its inputs and outputs, and what was run.\n"


def make(root: Path, kind: str, name: str) -> list[Path]:
    """Writes the files of the provider *kind*, whose class is *name*, below *root*; returns them."""
    if not re.fullmatch("[a-z][a-z0-9]*", kind) or not name.isidentifier():
        raise SystemExit("usage: python -m tools.new_provider KIND Class, such as: gcp GCP")
    values = {"kind": kind, "name": name, "today": datetime.date.today().isoformat()}
    module = f"modules/{kind}"
    texts = {
        f"skyinfra/providers/{kind}.py": _CODE.format(**values),
        f"skyinfra/providers/{kind}.toml": _DATA.format(**values),
        f"{module}/main.tf": _MAIN.format(**values),
        f"{module}/variables.tf": _VARIABLES,
        f"{module}/outputs.tf": _OUTPUTS.format(**values),
        f"{module}/versions.tf": _VERSIONS,
        f"{module}/README.md": _README.format(**values),
        f"{module}/core.tf": (ROOT / "modules" / "core.tf").read_text(encoding="utf-8"),
    }
    for path, text in texts.items():
        file = root / path
        if file.exists():
            raise SystemExit(f"{file} is there already")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return [root / path for path in texts]


if __name__ == "__main__":
    for made in make(ROOT, *(sys.argv[1:3] if len(sys.argv) == 3 else ("", ""))):
        print(made.relative_to(ROOT))
