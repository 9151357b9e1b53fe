# Two machines. The user data, the runner and the variables are those that `skyinfra render --out DIR` writes of a pool
# with sky.Crusoe.

variable "rendered" {
  description = "What `skyinfra render` wrote: the file STACK-POOL.tfvars.json."
  type        = string
}

variable "ssh_public_key" {
  description = "Your public key: one line such as ssh-ed25519 AAAA..."
  type        = string
}

variable "from" {
  description = "The network of this machine, such as 203.0.113.7/32."
  type        = string
}

locals {
  inputs = jsondecode(file(var.rendered))
  folder = dirname(var.rendered)
}

module "train" {
  source             = "../.."
  name               = local.inputs.name
  stack              = local.inputs.stack
  node_count         = 2
  region             = local.inputs.region
  machine_types      = local.inputs.machine_types
  image              = local.inputs.image
  user_data_head     = local.inputs.user_data_head
  user_data_worker   = local.inputs.user_data_worker
  user_data_revision = local.inputs.user_data_revision
  runner_file        = "${local.folder}/${local.inputs.runner_file}"
  versions           = local.inputs.versions
  slots              = local.inputs.slots
  ssh_public_key     = var.ssh_public_key
  allow_cidrs        = [var.from]
}

output "fleet_train" {
  value     = module.train.fleet
  sensitive = true
}
