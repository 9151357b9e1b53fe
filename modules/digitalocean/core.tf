# What is the same in the module of every provider whose nodes are machines: `python -m tools.core` copies it from
# modules/core.tf into their folders. A module says in locals: `head` (name of the head), `places` (what the
# placeholders become: head, bucket, runner), `volume` (the id of the volume with the head's jobs), and `limit` (bytes
# of user data that the provider takes, null for no limit; whether it takes them compressed; the provider's name).

variable "name" {
  description = "Name of the pool. Nodes are named NAME-0, NAME-1, ...; NAME-0 is the head. Where the workers are a machine group, the head is NAME-head."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,39}$", var.name))
    error_message = "name: lower-case letters, digits and dashes, beginning with a letter, at most 40 characters."
  }
}

variable "stack" {
  description = "Name of the stack the pool belongs to; recorded in the manifest and on what the module makes."
  type        = string
  default     = "default"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", var.stack))
    error_message = "stack: letters, digits, dashes and underscores, at most 64 characters."
  }
}

variable "node_count" {
  description = "Number of nodes that carry slots. The head is one of them, unless the workers are a machine group: then the head is a machine besides them."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.node_count >= 1 && floor(var.node_count) == var.node_count
    error_message = "node_count: a whole number of at least 1."
  }
}

variable "user_data_head" {
  description = "User data of the head, not compressed. @SKYINFRA_NODE@ becomes the node's name, @SKYINFRA_HEAD@ the scheduler's HOST:PORT, @SKYINFRA_BUCKET@ the address at which `secret` and `versions.json` stand, @SKYINFRA_RUNNER@ that of the runner, @SKYINFRA_VOLUME@ the id of the volume with the jobs of the head. @SKYINFRA_SECRET@ becomes the fleet secret itself, which then is read by whoever may read the user data."
  type        = string
  nullable    = false
}

variable "user_data_worker" {
  description = "User data of the other nodes, with the same placeholders, but @SKYINFRA_VOLUME@. The nodes of a machine group share one text, in which @SKYINFRA_NODE@ becomes the group's name."
  type        = string
  default     = ""
  nullable    = false
}

variable "slots" {
  description = "The slots of each node, for the manifest: index, kind (partition, gpu, chip, cores, host, cpu), accelerator, profile, gpu."
  type = list(object({
    index       = number
    kind        = string
    accelerator = optional(string)
    profile     = optional(string)
    gpu         = optional(number)
  }))
  default  = []
  nullable = false
}

variable "runner_file" {
  description = "A file that the nodes install at their first boot: the runner as a wheel. @SKYINFRA_RUNNER@ in the user data becomes the address at which they find it. The first one is kept: another changes nothing. Empty where the user data need none."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.runner_file == "" || try(fileexists(var.runner_file), false)
    error_message = "runner_file: there is no such file; the path counts from where Terraform runs."
  }
}

variable "versions" {
  description = "The versions that the nodes install, for `versions.json`: of Python where none is declared, and of packages that client and workers share. The first ones are kept: others change nothing. Null where the user data need none."
  type        = object({ python = string, requirements = list(string) })
  default     = null
}

variable "user_data_revision" {
  description = "What changes when nodes must be replaced for their user data. Null replaces them for every change of it; a revision computed from what is declared, without the layout, lets a layout change in place."
  type        = string
  default     = null
}

variable "scheduler_port" {
  description = "The port of the head that the scheduler listens on, as user_data_head says. Another one replaces all nodes: it stands in what they were made from."
  type        = number
  default     = 8786
  nullable    = false

  validation {
    condition     = var.scheduler_port >= 1 && var.scheduler_port <= 65535 && floor(var.scheduler_port) == var.scheduler_port
    error_message = "scheduler_port: a port, 1 to 65535."
  }
}

# The fleet secret: in `triggers_replace`, since terraform_data copies `input` to `output`, which Terraform does not
# treat as sensitive and prints in the plan of a destroy.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle {
    ignore_changes = [triggers_replace]

    precondition {
      condition     = local.limit.bytes == null || coalesce(local.sizes.user_data_head + local.slack, 0) <= coalesce(local.limit.bytes, 0)
      error_message = "user_data_head: ${local.sizes.user_data_head} bytes${local.packed}, and ${local.limit.called} takes ${coalesce(local.limit.bytes, 0)} (${local.slack} are kept for the secret). Move packages and files into the image, or fetch them at boot."
    }

    precondition {
      condition     = local.limit.bytes == null || coalesce(local.sizes.user_data_worker + local.slack, 0) <= coalesce(local.limit.bytes, 0)
      error_message = "user_data_worker: ${local.sizes.user_data_worker} bytes${local.packed}, and ${local.limit.called} takes ${coalesce(local.limit.bytes, 0)} (${local.slack} are kept for the secret). Move packages and files into the image, or fetch them at boot."
    }
  }
}

locals {
  names  = [for index in range(var.node_count) : "${var.name}-${index}"]
  secret = terraform_data.secret.triggers_replace

  # Terraform has no loop over replace(). The name of the node is filled in where the node is made.
  user_data_head   = replace(replace(replace(replace(replace(var.user_data_head, "@SKYINFRA_HEAD@", local.places.head), "@SKYINFRA_BUCKET@", local.places.bucket), "@SKYINFRA_SECRET@", local.secret), "@SKYINFRA_RUNNER@", local.places.runner), "@SKYINFRA_VOLUME@", local.volume)
  user_data_worker = replace(replace(replace(replace(var.user_data_worker, "@SKYINFRA_HEAD@", local.places.head), "@SKYINFRA_BUCKET@", local.places.bucket), "@SKYINFRA_SECRET@", local.secret), "@SKYINFRA_RUNNER@", local.places.runner)
}

# The size of the user data, with stand-ins of the same length, and as hard to compress, as the real values, which no
# plan knows.
locals {
  sample_secret = "${uuidv5("dns", "skyinfra")}${uuidv5("dns", "skyinfra.fleet")}"
  # The prefix of a bucket's name is continued with 26 digits.
  sample_bucket = "s3://skyinfra-${var.name}-20261122004911123456789012"
  samples = {
    for which, text in { user_data_head = var.user_data_head, user_data_worker = var.user_data_worker } : which => replace(replace(replace(replace(replace(replace(text, "@SKYINFRA_HEAD@", "198.51.100.247:${var.scheduler_port}"), "@SKYINFRA_BUCKET@", local.sample_bucket), "@SKYINFRA_SECRET@", local.sample_secret), "@SKYINFRA_NODE@", "${var.name}-100"), "@SKYINFRA_RUNNER@", "${local.sample_bucket}/${basename(var.runner_file)}"), "@SKYINFRA_VOLUME@", "vol-0a1b2c3d4e5f60718")
  }
  sizes  = { for which, text in local.samples : which => local.limit.gzip ? length(base64gzip(text)) * 3 / 4 : length(base64encode(text)) * 3 / 4 }
  packed = local.limit.gzip ? " after gzip" : ""
  # The real values may compress a little worse.
  slack = 48
}
