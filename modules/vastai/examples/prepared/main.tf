# Two nodes from an image that has the runner (`pip install skyinfra`): they install nothing. User data written by hand
# are a script that writes the node configuration and becomes the runner; those of `skyinfra render` set up any image
# with Python.
terraform {
  required_providers {
    vastai = {
      source  = "registry.terraform.io/realnedsanders/vastai"
      version = "~> 1.0"
    }
  }
}

# The key comes from VASTAI_API_KEY.
provider "vastai" {}

locals {
  node = {
    version     = 1
    stack       = "default"
    pool        = "gpu"
    node        = "@SKYINFRA_NODE@"
    provider    = "vastai"
    accelerator = { name = "RTX 4090", vendor = "nvidia", count = 1 }
    secret_file = "/opt/skyinfra/delivered/secret"
    folder      = "/var/lib/skyinfra"
  }
  starts = {
    for role, scheduler in { head = "0.0.0.0:8786", worker = "@SKYINFRA_HEAD@" } : role => <<-EOT
      #!/bin/sh
      mkdir -p /var/lib/skyinfra /etc/skyinfra
      cat >/etc/skyinfra/node.json <<'END'
      ${jsonencode(merge(local.node, { head = role == "head", scheduler = scheduler }))}
      END
      exec skyinfra-runner boot --config /etc/skyinfra/node.json
    EOT
  }
}

module "gpu" {
  source = "../.."

  name             = "gpu"
  node_count       = 2
  machine_types    = ["1x-RTX_4090"]
  image            = "registry.example.com/skyinfra"
  user_data_head   = local.starts["head"]
  user_data_worker = local.starts["worker"]
  slots            = [{ index = 0, kind = "gpu", accelerator = "RTX 4090" }]
}

output "fleet_gpu" {
  value     = module.gpu.fleet
  sensitive = true
}
