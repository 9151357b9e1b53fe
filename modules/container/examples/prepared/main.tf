# Two nodes from an image that has the runner (`pip install skyinfra`): they install nothing. User data written by hand
# are a script that writes the node configuration and becomes the runner; those of `skyinfra render` set up any image
# with Python.
locals {
  node = {
    version     = 1
    stack       = "default"
    pool        = "cpu"
    node        = "@SKYINFRA_NODE@"
    provider    = "container"
    cpu_slots   = 2
    secret_file = "/opt/skyinfra/delivered/secret"
    folder      = "/var/lib/skyinfra"
  }
  starts = {
    for role, scheduler in { head = "0.0.0.0:8786", worker = "@SKYINFRA_HEAD@" } : role => <<-EOT
      #!/bin/sh
      mkdir -p /var/lib/skyinfra
      cat >/etc/skyinfra/node.json <<'END'
      ${jsonencode(merge(local.node, { head = role == "head", scheduler = scheduler }))}
      END
      exec skyinfra-runner boot --config /etc/skyinfra/node.json
    EOT
  }
}

module "cpu" {
  source = "../.."

  name             = "cpu"
  node_count       = 2
  image            = "registry.example.com/skyinfra"
  user_data_head   = local.starts["head"]
  user_data_worker = local.starts["worker"]
  slots            = [{ index = 0, kind = "cpu" }, { index = 1, kind = "cpu" }]
}

output "fleet_cpu" {
  value     = module.cpu.fleet
  sensitive = true
}
