"""Makes the skeleton of a cloud whose machines are set up over SSH: ``python -m tools.new_provider KIND Class``.

All of it is valid as it stands, and its tests run; what is written ``FILL`` is left to do, see CONTRIBUTING.md.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_CODE = '''"""{name}: FILL."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from skyinfra.providers.over_ssh import MachineCloud


class {name}(MachineCloud):
    """FILL: what it is, and by which Terraform provider; where its token comes from.

    region: such as ``FILL``. instance_types: one type, such as ``FILL``; empty takes the cheapest that carries the
    accelerator. image: another one. ssh_public_key, key_file, allow_cidrs, wait_seconds: see `MachineCloud`.
    """

    kind: ClassVar[str] = "{kind}"

    region: str = Field(default="FILL")
'''
_DATA = """# {name}. `skyinfra.providers.data` says what each table means.

exports = "{kind}: {name}"

[about]
called = "{name}"
nodes = "FILL"
head = "FILL"
tested = "planned against the provider's schema; never on the cloud"

# What proves the images and names; which version of the provider applied the module, against what, when.
[verified]
images = "FILL"
names = "FILL"
applied = ""
against = ""
date = ""

[terraform]
name = "{kind}"
source = "registry.terraform.io/FILL/{kind}"
version = ">= 1.0.0, < 2.0.0"
config = []
# Variables that the provider reads, each list an alternative.
credentials = [["FILL"]]
machines.{kind}_instance = {{ type = "type", region = "region" }}

[boot]
form = "script"
# `host.sh` gets them in one variable of its environment: see container.toml.
limit = 120_000
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
ssh_user = "ubuntu"
host_keys = "given"
source = "FILL"
date = "{today}"

# What the place has not, and why.
[lacks]
volumes = "this version makes no disks there that outlive their machine"
disk_gb = "the disk of a machine of {name} comes with its type"
# FILL: or the networks between its machines, as rows of [[fabrics]]: skyinfra/providers/fabrics.py
rdma = "no network for RDMA between the machines of {name} is known"

# The first row that fits a machine counts; machines = a pattern of types, where a family has an image of its own.
[[images]]
vendor = "cpu"
image = "FILL"
source = "FILL"
date = "{today}"

[[images]]
vendor = "nvidia"
image = "FILL"
# open, proprietary, grid, ...: skyinfra/providers/images.py
kind = "unnamed modules"
driver = "580"
source = "FILL: the line that says so"
date = "{today}"

[machines]
head = "FILL"
general = [["FILL", 2, 8]]

[prices]
region = "all regions"
date = "{month}"

[prices.usd_per_hour]
FILL = 0.1

[[errors]]
cause = "CapacityUnavailable"
codes = []
texts = ["FILL: what its API says"]
quotes = [["FILL: what its API says, the whole sentence", "FILL: the line of its source, or where it was recorded"]]
says = "{name} has no such machine there now"
hint = "Declare another region or type, or run it again later."

[preflight]
login = "FILL"
unasked = "FILL"
source = "FILL"
date = "{today}"
"""
_MAIN = """terraform {{
  required_version = ">= 1.4"

  required_providers {{
    {kind} = {{
      source  = "registry.terraform.io/FILL/{kind}"
      version = ">= 1.0.0, < 2.0.0"
    }}
    tls = {{
      source  = "registry.terraform.io/hashicorp/tls"
      version = ">= 4.0.0, < 5.0.0"
    }}
  }}
}}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {{
  triggers_replace = sensitive("${{uuid()}}${{uuid()}}")

  lifecycle {{ ignore_changes = [triggers_replace] }}
}}

# The host key of each machine.
resource "tls_private_key" "host" {{
  for_each  = module.hosts.names.nodes
  algorithm = "ED25519"
}}

module "hosts" {{
  source = "../hosts"
  kind   = "{kind}"
  secret = terraform_data.secret
  zone   = var.region
  ids    = {{ for node, instance in {kind}_instance.node : node => instance.id }}
  machines = {{
    for node, each in {kind}_instance.node : node => {{ address = each.ip, user = "ubuntu", key_file = var.key_file }}
  }}
  host_keys = tls_private_key.host
  # FILL: where the length that a name takes stands.
  names = {{ limit = 63 }}
  pool = {{
{pool}  }}
}}

output "fleet" {{
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value       = module.hosts.fleet
}}

# FILL: the network, and who comes in: var.allow_cidrs at port 22 and var.scheduler_port.

resource "{kind}_ssh_key" "login" {{
  name       = module.hosts.names.own
  public_key = trimspace(var.ssh_public_key)

  lifecycle {{ ignore_changes = [name] }}
}}

resource "{kind}_instance" "node" {{
  for_each = module.hosts.names.nodes

  name      = each.value
  region    = var.region
  type      = var.machine_types[0]
  image     = var.image
  ssh_keys  = [{kind}_ssh_key.login.id]
  user_data = module.hosts.cloud_config[each.key]

  lifecycle {{
    # A key that is changed is for machines that are made later.
    ignore_changes       = [name, user_data, ssh_keys]
    replace_triggered_by = [tls_private_key.host[each.key]]
  }}
}}
"""
_README = """# modules/{kind}

FILL: what it makes, by which Terraform provider, where its token comes from.

```hcl
module "train" {{
  source           = "./modules/{kind}"
  name             = "train"
  node_count       = 2
  region           = "FILL"
  machine_types    = ["FILL"]
  image            = "FILL"
  ssh_public_key   = "{key}"
  allow_cidrs      = ["203.0.113.7/32"]
  user_data_head   = file("train.head.sh")
  user_data_worker = file("train.worker.sh")
}}

output "fleet_train" {{
  value     = module.train.fleet
  sensitive = true
}}
```

| input | type | default | |
|---|---|---|---|
{inputs}
| output | |
|---|---|
| `fleet` | the manifest, sensitive: what a client needs to reach the fleet |

## What was run

FILL. The provider itself was not run with it.
"""
_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8VhYh0z0o0m7m4b3qvJqk0d1k2m3n4p5q6r7s8t9u0"
_CASE = """# A pool and a module of modules/{kind} in tests: see tests/helpers/cloud_modules/cases.py.

mock = ["{kind}", "tls"]
pool = {{}}
# What makes a machine anew, one at a time.
replacing = [
    {{ image = "other" }},
    {{ machine_types = ["other"] }},
    {{ region = "other" }},
]

[inputs]
region = "FILL"
machine_types = ["FILL"]
image = "FILL"
allow_cidrs = ["203.0.113.7/32"]
"""


def _schema(kind: str) -> str:
    """As much of a schema as the skeleton of the module needs; `tools.provider_schema` writes the real one."""
    given = {"type": "string", "required": True, "replaces": True}
    made = {"type": "string", "computed": True}
    listed = {"type": ["list", "string"], "optional": True}
    data = {"type": "string", "optional": True}
    document = {
        "source": f"FILL/{kind}",
        "version": "1.0.0",
        "from": "FILL: this is what tools/new_provider.py made up",
        "framework": False,
        "schemas": {
            "provider": {},
            f"{kind}_ssh_key": {"id": made, "name": given, "public_key": given},
            f"{kind}_instance": {
                **dict.fromkeys(("name", "region", "type", "image"), given),
                **{"id": made, "ip": made, "ssh_keys": listed, "user_data": data},
            },
        },
    }
    return json.dumps(document, indent=1) + "\n"


def make(root: Path, kind: str, name: str) -> list[Path]:
    """Writes the files of the provider *kind*, whose class is *name*, below *root*; returns them."""
    if not re.fullmatch("[a-z][a-z0-9]*", kind) or not name.isidentifier():
        raise SystemExit("usage: python -m tools.new_provider KIND Class, such as: zeta Zeta")
    today = datetime.date.today().isoformat()
    # Those of a module that adds none of its own.
    variables = (ROOT / "modules" / "vultr" / "variables.tf").read_text(encoding="utf-8")
    names = re.findall(r'^variable "(\w+)"', variables, re.MULTILINE)
    call = (
        (ROOT / "modules" / "vultr" / "main.tf").read_text(encoding="utf-8").split("  pool = {\n")[1].split("  }\n")[0]
    )
    rows = "".join(f"| `{each}` | | | FILL |\n" for each in names)
    values = {"kind": kind, "name": name, "today": today, "month": today[:7], "pool": call, "inputs": rows, "key": _KEY}
    module = f"modules/{kind}"
    texts = {
        f"skyinfra/providers/{kind}.py": _CODE.format(**values),
        f"skyinfra/providers/{kind}.toml": _DATA.format(**values),
        f"{module}/main.tf": _MAIN.format(**values),
        f"{module}/variables.tf": variables,
        f"{module}/README.md": _README.format(**values),
        f"tests/clouds/{kind}.toml": _CASE.format(**values),
        f"tests/mock_provider/schemas/{kind}.json": _schema(kind),
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
