locals {
  # By host, not by number: a host that goes changes the name of no other node.
  hosts = { for host in var.hosts : "${var.name}-${trim(replace(lower(host.address), "/[^a-z0-9]+/", "-"), "-")}" => host }
  order = [for host in var.hosts : "${var.name}-${trim(replace(lower(host.address), "/[^a-z0-9]+/", "-"), "-")}"]
  head  = local.order[0]
  zone  = null
  kind  = "ssh"

  ids = { for node, host in terraform_data.node : node => host.id }
  machines = {
    for node, host in local.hosts : node => merge(host, {
      inside  = host.inside == "" ? host.address : host.inside
      outside = host.inside == "" ? host.address : host.inside
    })
  }
  contact = { for node in local.order : node => {} }

  # The jobs of the head stand on its own disk.
  volume = ""
  limit  = { bytes = null, gzip = false, called = "ssh" }
}

# A host of this fleet. Destroying it gives the machine back. It is made by other resources (`head`, `worker`): what
# Terraform could not create whole it does not destroy by its program either.
resource "terraform_data" "node" {
  for_each = local.hosts

  input = {
    connection = local.connections[each.key]
    labels     = var.labels
  }
  triggers_replace = [terraform_data.fleet.id]

  lifecycle {
    precondition {
      condition     = var.node_count == length(var.hosts)
      error_message = "node_count: ${var.node_count}, and ${length(var.hosts)} hosts are given, each of which is one node."
    }
  }

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/host.sh' down"
    environment = self.input.connection
  }
}
