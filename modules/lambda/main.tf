locals {
  # The firewall is that of the account, and lets in port 22 alone unless somebody opens another one.
  open = [
    for rule in data.lambdalabs_firewall.account.rules : rule
    if contains(["tcp", "all"], rule.protocol) && (length(coalesce(rule.port_range, [])) < 2 || try(rule.port_range[0] <= var.scheduler_port && var.scheduler_port <= rule.port_range[1], false))
  ]
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

module "hosts" {
  source   = "../hosts"
  kind     = "lambda"
  secret   = terraform_data.secret
  zone     = var.region
  ids      = { for node, instance in lambdalabs_instance.node : node => instance.id }
  machines = { for node, instance in lambdalabs_instance.node : node => { address = instance.ip, user = "ubuntu", key_file = var.key_file } }

  # There are no user data, so no host key can be given to a machine: that of the first contact is kept.
  known_hosts = var.known_hosts
  # https://docs.lambda.ai/api/cloud: the name of an SSH key has at most 64 characters
  names = { limit = 60 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

data "lambdalabs_firewall" "account" {}

resource "lambdalabs_ssh_key" "login" {
  name       = module.hosts.names.own
  public_key = trimspace(var.ssh_public_key)

  # The provider changes none in place, and Lambda has it in the form in which it was given.
  lifecycle {
    ignore_changes       = [name, public_key]
    replace_triggered_by = [terraform_data.login]
  }
}

resource "terraform_data" "login" {
  input = trimspace(var.ssh_public_key)
}

# The provider would change a machine in place, and then refuses.
resource "terraform_data" "machine" {
  input = [var.region, var.machine_types[0]]
}

resource "lambdalabs_instance" "node" {
  for_each = module.hosts.names.nodes

  name               = each.key
  region_name        = var.region
  instance_type_name = var.machine_types[0]
  ssh_key_names      = [lambdalabs_ssh_key.login.name]

  # A machine that takes longer is in no state, and goes on costing.
  timeouts { create = "60m" }

  lifecycle {
    # A refresh finds an empty list where none was declared, and the provider updates nothing. A changed key is for machines
    # that are made later.
    ignore_changes       = [file_system_names, ssh_key_names]
    replace_triggered_by = [terraform_data.machine]

    precondition {
      condition     = var.image == "lambda-stack"
      error_message = "image: the provider launches Lambda Stack alone; give lambda-stack."
    }

    precondition {
      condition     = length(local.open) > 0
      error_message = "scheduler_port: the firewall of the account lets nobody reach TCP port ${var.scheduler_port}. Open it at https://cloud.lambda.ai/firewall for the nodes and the clients: the scheduler lets in who has the secret of the fleet."
    }
  }
}
