# What is the same where nodes are containers that a marketplace rents, to which nothing is brought but their environment,
# and whose ports it maps.

module "core" {
  source = "../core"
  pool   = var.pool
  secret = var.secret
  places = local.places
  names  = var.names
  # What Linux takes for one variable of the environment, in base64.
  limit = { bytes = 96000, gzip = true, called = "the environment of a container" }
}

locals {
  names = [for index in range(var.pool.node_count) : "${var.pool.name}-${index}"]
  head  = local.names[0]

  # Where the head is, once it was started: address and port, as the API of the marketplace says them.
  found  = split(" ", terraform_data.address.output)
  places = { head = join(":", local.found), bucket = "file://${local.delivered}", runner = "" }

  # What a container does at its start stands in the variable SKYINFRA_START, compressed. What the nodes of other modules
  # get from a bucket is written first, for root alone.
  unpack = join(" && ", concat(
    ["mkdir -p /opt/skyinfra && umask 077 && printf %s \"$SKYINFRA_START\" | base64 -d | gzip -dc >/opt/skyinfra/start"],
    # Where it is deleted, and the key that it may do this with, and nothing else: `skyinfra.idle.ending`.
    var.deleted == null ? [] : ["printf \"%s %s\" \"${var.deleted.url}\" \"${var.deleted.key}\" >/opt/skyinfra/rented"],
  ))
  delivered = "/opt/skyinfra/delivered"
  first     = <<-EOT
    umask 077
    mkdir -p ${local.delivered}
    printf %s '${var.secret.triggers_replace}' >${local.delivered}/secret
    printf %s '${replace(module.core.versions, "'", "'\\''")}' >${local.delivered}/versions.json
  EOT
  # The text of the head names no head, whose address is not known before it.
  start_head   = base64gzip("${local.first}${replace(replace(var.pool.user_data_head, "@SKYINFRA_BUCKET@", "file://${local.delivered}"), "@SKYINFRA_NODE@", local.head)}")
  start_worker = { for name in slice(local.names, 1, length(local.names)) : name => base64gzip("${local.first}${replace(module.core.user_data_worker, "@SKYINFRA_NODE@", name)}") }
}

# The public address and port of the head, which the Terraform provider does not give. What a provisioner finds out
# reaches the state by way of a file, which is read once and removed.
resource "terraform_data" "found" {
  input            = "${path.root}/.skyinfra-${var.pool.stack}-${var.pool.name}.head"
  triggers_replace = [var.head_id]

  lifecycle { ignore_changes = [input] }

  provisioner "local-exec" {
    command     = "python3 -B '${path.module}/address.py' find"
    environment = { FILE = self.input, ANSWERS = var.answers, CONTAINER = var.head_id, PORT = var.pool.scheduler_port, WAIT = var.pool.wait_seconds }
  }
}

resource "terraform_data" "address" {
  input            = try(trimspace(file(terraform_data.found.output)), "")
  triggers_replace = [terraform_data.found.id]

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = self.input != ""
      error_message = "The address of the head was found by an apply that was cut off. Have it looked up again: terraform apply -replace=module.${var.pool.name}.module.market.terraform_data.found"
    }
  }

  provisioner "local-exec" {
    command     = "python3 -B '${path.module}/address.py' forget"
    environment = { FILE = terraform_data.found.output, ANSWERS = var.answers }
  }
}
