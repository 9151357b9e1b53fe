locals {
  # By host, not by number: a host that goes changes the name of no other node. Machines behind one address are told apart
  # by their ports, and by the machine next to each on its way, where they have no names; skyinfra/providers/ssh.py makes the same names.
  plain = [for host in var.hosts : host.name != null ? host.name : trim(replace(lower(host.address), "/[^a-z0-9]+/", "-"), "-")]
  labels = [
    for index, host in var.hosts : host.name != null || length([for each in local.plain : each if each == local.plain[index]]) == 1 ? local.plain[index] : join("-", compact([
      local.plain[index],
      host.port == 0 ? "" : tostring(host.port),
      trim(replace(lower(try(host.via.address, "")), "/[^a-z0-9]+/", "-"), "-"),
    ]))
  ]
  nodes = [for label in local.labels : "${var.name}-${label}"]
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle {
    ignore_changes = [triggers_replace]

    precondition {
      condition     = var.node_count == length(var.hosts)
      error_message = "node_count: ${var.node_count}, and ${length(var.hosts)} hosts are given, each of which is one node."
    }

    precondition {
      condition     = length(distinct(local.labels)) == length(local.labels)
      error_message = "hosts: none twice. Machines behind one address differ in port or via, and each has its own `inside`."
    }
  }
}

module "hosts" {
  source = "../hosts"
  kind   = "ssh"
  secret = terraform_data.secret
  nodes  = local.nodes
  machines = {
    for index, host in var.hosts : local.nodes[index] => merge(host, {
      inside  = host.inside == "" ? host.address : host.inside
      outside = host.inside == "" ? host.address : host.inside
    })
  }
  give_back = true
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}
