# What is the same where nodes are containers that a marketplace rents, to which nothing is brought but their environment,
# and whose ports it maps: `python -m tools.core` copies it from modules/market.tf into the folders of their modules. A
# module says in locals: `made` (what a container is made from besides its user data) and `head_id`; and in answers.py
# how its API says where a container is reached.

variable "ssh_public_key" {
  description = "Key to log in with. What a marketplace rents has the keys of the account, or no SSH server, so only the empty string is allowed."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.ssh_public_key == ""
    error_message = "ssh_public_key: what a marketplace rents has the keys of the account, or none; leave it empty."
  }
}

variable "allow_cidrs" {
  description = "Networks that may reach the head. A marketplace has no firewall, so only the empty list is allowed."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.allow_cidrs) == 0
    error_message = "allow_cidrs: the port of the head is open to all, and every connection mutual TLS; leave it empty."
  }
}

variable "labels" {
  description = "Labels. What a marketplace rents has none, so only the empty map is allowed."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = length(var.labels) == 0
    error_message = "labels: what a marketplace rents has none; leave it empty."
  }
}

variable "min_cuda" {
  description = "The oldest CUDA that the driver of the host has to serve, such as 12.8."
  type        = string
  default     = null

  validation {
    condition     = var.min_cuda == null || can(regex("^[0-9]+\\.[0-9]+$", var.min_cuda))
    error_message = "min_cuda: such as 12.8."
  }
}

variable "wait_seconds" {
  description = "How long a container may take to start, in seconds, and the head until its port is mapped."
  type        = number
  default     = 1200
  nullable    = false

  validation {
    condition     = var.wait_seconds >= 1
    error_message = "wait_seconds: at least 1."
  }
}

locals {
  head = local.names[0]

  # Where the head is, once it was started: address and port, as the API of the marketplace says them.
  found  = split(" ", terraform_data.address.output)
  places = { head = join(":", local.found), bucket = "file://${local.delivered}", runner = "" }
  volume = ""
  # What Linux takes for one variable of the environment, in base64.
  limit = { bytes = 96000, gzip = true, called = "the environment of a container" }

  # What a container does at its start stands in the variable SKYINFRA_START, compressed. What the nodes of other modules
  # get from a bucket is written first, for root alone.
  unpack    = "mkdir -p /opt/skyinfra && umask 077 && printf %s \"$SKYINFRA_START\" | base64 -d | gzip -dc >/opt/skyinfra/start"
  delivered = "/opt/skyinfra/delivered"
  versions  = var.versions == null ? "" : jsonencode({ version = 1, python = var.versions.python, requirements = var.versions.requirements, wheel = null })
  first     = <<-EOT
    umask 077
    mkdir -p ${local.delivered}
    printf %s '${local.secret}' >${local.delivered}/secret
    printf %s '${replace(local.versions, "'", "'\\''")}' >${local.delivered}/versions.json
  EOT
  # The text of the head names no head, whose address is not known before it.
  start_head   = base64gzip("${local.first}${replace(replace(var.user_data_head, "@SKYINFRA_BUCKET@", "file://${local.delivered}"), "@SKYINFRA_NODE@", local.head)}")
  start_worker = { for name in slice(local.names, 1, length(local.names)) : name => base64gzip("${local.first}${replace(local.user_data_worker, "@SKYINFRA_NODE@", name)}") }
}

# What a container is made from. Another one is another container.
resource "terraform_data" "head" {
  triggers_replace = [local.made, coalesce(var.user_data_revision, sha256(var.user_data_head))]

  lifecycle {
    precondition {
      condition     = var.versions != null || !can(regex("@SKYINFRA_BUCKET@/versions", "${var.user_data_head}${var.user_data_worker}"))
      error_message = "versions: the user data ask for versions.json. Give versions as `skyinfra render` wrote them."
    }

    precondition {
      condition     = var.node_count == 1 || var.user_data_worker != ""
      error_message = "user_data_worker: needed, for this pool has nodes besides its head."
    }
  }
}

resource "terraform_data" "worker" {
  for_each = toset(slice(local.names, 1, length(local.names)))

  # They know the head by the address that it has when they are made.
  triggers_replace = [local.made, coalesce(var.user_data_revision, sha256(var.user_data_worker)), terraform_data.address.id]
}

# The public address and port of the head, which the Terraform provider does not give. What a provisioner finds out
# reaches the state by way of a file, which is read once and removed.
resource "terraform_data" "found" {
  input            = "${path.root}/.skyinfra-${var.stack}-${var.name}.head"
  triggers_replace = [local.head_id]

  lifecycle {
    ignore_changes = [input]
  }

  provisioner "local-exec" {
    command     = "python3 -B '${path.module}/address.py' find"
    environment = { FILE = self.input, CONTAINER = local.head_id, PORT = var.scheduler_port, WAIT = var.wait_seconds }
  }
}

resource "terraform_data" "address" {
  input            = try(trimspace(file(terraform_data.found.output)), "")
  triggers_replace = [terraform_data.found.id]

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = self.input != ""
      error_message = "The address of the head was found by an apply that was cut off. Have it looked up again: terraform apply -replace=module.${var.name}.terraform_data.found"
    }
  }

  provisioner "local-exec" {
    command     = "python3 -B '${path.module}/address.py' forget"
    environment = { FILE = terraform_data.found.output }
  }
}
