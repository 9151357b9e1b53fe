# Two machines that stand already, the second one behind a bastion. The user data, the runner and the variables are those
# that `skyinfra render --out DIR` writes of a pool with sky.SSH.

variable "rendered" {
  description = "What `skyinfra render` wrote: the file STACK-POOL.tfvars.json."
  type        = string
}

locals {
  inputs = jsondecode(file(var.rendered))
  folder = dirname(var.rendered)
}

module "lab" {
  source             = "../.."
  name               = local.inputs.name
  stack              = local.inputs.stack
  node_count         = 2
  user_data_head     = local.inputs.user_data_head
  user_data_worker   = local.inputs.user_data_worker
  user_data_revision = local.inputs.user_data_revision
  runner_file        = "${local.folder}/${local.inputs.runner_file}"
  versions           = local.inputs.versions
  slots              = local.inputs.slots

  hosts = [
    { address = "gpu1" },
    { address = "10.0.0.7", user = "ubuntu", via = { address = "bastion" } },
  ]
}

output "fleet_lab" {
  value     = module.lab.fleet
  sensitive = true
}
