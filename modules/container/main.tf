# Which engine answers. What a provisioner finds out reaches the state by way of a file, which is read once: later
# applies, on other machines too, keep that engine. Declaring another one makes everything anew.
resource "terraform_data" "found" {
  input            = "${var.root}/${var.stack}/${var.name}.engine"
  triggers_replace = [var.engine, var.host]

  lifecycle { ignore_changes = [input] }

  provisioner "local-exec" {
    command     = "sh '${path.module}/node.sh' find"
    environment = { FILE = self.input, ENGINE = var.engine, HOST = var.host }
  }

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/node.sh' forget"
    environment = { FILE = self.input }
  }
}

resource "terraform_data" "engine" {
  input            = { program = try(trimspace(file(terraform_data.found.output)), ""), host = var.host }
  triggers_replace = [terraform_data.found.id]

  lifecycle { ignore_changes = [input] }
}

locals {
  # Where their number follows the work, the head is a container besides the nodes, which stand ready.
  elastic = var.min_nodes != null
  names   = [for index in range(var.node_count + (local.elastic ? 1 : 0)) : "${var.name}-${index}"]

  head   = local.names[0]
  slots  = local.elastic ? slice(local.names, 1, length(local.names)) : local.names
  engine = { ENGINE = terraform_data.engine.output.program, HOST = terraform_data.engine.output.host }

  # Names with a part of their own, for two fleets of one name.
  prefix     = "skyinfra-${var.name}-${substr(terraform_data.engine.id, 0, 8)}"
  containers = { for index, name in local.names : name => "${local.prefix}-${index}" }
  network    = var.network == "" ? local.prefix : var.network
  volumes    = merge({ jobs = "${local.prefix}-jobs", delivered = "${local.prefix}-delivered" }, local.elastic ? { group = "${local.prefix}-group" } : {})

  # Clients reach the head at a port of the host, which is the same for as long as the fleet is there.
  shared    = var.network == "host"
  elsewhere = startswith(var.host, "ssh://")
  address   = local.elsewhere ? regex("^ssh://(?:[^@/]*@)?(\\[[^]]+\\]|[^:/]+)", var.host)[0] : "127.0.0.1"
  port      = local.shared ? var.scheduler_port : coalesce(var.port, 20000 + parseint(substr(terraform_data.engine.id, 0, 4), 16) % 12000)
  published = local.shared ? "" : "${local.elsewhere ? "" : "127.0.0.1:"}${local.port}:${var.scheduler_port}"

  each_gpus = var.gpus == tolist(["all"]) ? 0 : floor(length(var.gpus) / var.node_count)
  gpus = {
    for index, name in local.slots : name => local.each_gpus == 0 ? join(",", var.gpus) : join(",", slice(var.gpus, index * local.each_gpus, (index + 1) * local.each_gpus))
  }
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

module "core" {
  source = "../core"
  secret = terraform_data.secret
  places = {
    head   = "${local.shared ? "127.0.0.1" : local.containers[local.head]}:${var.scheduler_port}"
    bucket = "file:///opt/skyinfra/delivered"
    runner = "file:///opt/skyinfra/delivered/${basename(var.runner_file)}"
  }
  head_apart = local.elastic
  volume     = local.volumes.jobs
  # What Linux takes for one variable of the environment, by which the script gets them.
  limit = { bytes = 131000, gzip = false, called = "the environment of a program" }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port
  }
}

# What outlives a head that is replaced: its jobs. Destroying it, after the nodes, removes all volumes of the pool.
# Resources that are destroyed by a program are made by another one: a creation that fails leaves nothing behind that
# Terraform would not destroy.
resource "terraform_data" "state" {
  input            = { engine = local.engine, volumes = join(" ", values(local.volumes)) }
  triggers_replace = [terraform_data.engine.id]

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/node.sh' clear"
    environment = merge(self.input.engine, { VOLUMES = self.input.volumes })
  }
}

resource "terraform_data" "network" {
  count = var.network == "" ? 1 : 0

  input            = { engine = local.engine, name = local.network }
  triggers_replace = [terraform_data.engine.id]

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/node.sh' clear"
    environment = merge(self.input.engine, { NETWORK = self.input.name })
  }
}

# The network, the volumes, and what nodes take at their first boot: the secret, the runner, and the versions of what it
# needs. They stand in a volume, not in the containers: nodes that come later get the same, whoever applies then, and an
# image that is made of a container holds none of it.
resource "terraform_data" "delivered" {
  triggers_replace = [terraform_data.state.id, terraform_data.network[*].id, terraform_data.secret.id]

  provisioner "local-exec" {
    command = "sh '${path.module}/node.sh' prepare"
    environment = merge(local.engine, {
      IMAGE     = var.image
      NETWORK   = var.network == "" ? local.network : ""
      STATE     = local.volumes.jobs
      DELIVERED = local.volumes.delivered
      SECRET    = terraform_data.secret.triggers_replace
      VERSIONS  = module.core.versions
      RUNNER    = var.runner_file
    })
  }

  lifecycle {
    precondition {
      condition     = var.gpus == tolist(["all"]) || length(var.gpus) % var.node_count == 0
      error_message = "gpus: ${length(var.gpus)} are given, which ${var.node_count} nodes cannot share evenly."
    }
  }
}

# What a node is. Destroying it stops and removes the container.
resource "terraform_data" "node" {
  for_each = toset(local.names)

  input = {
    engine    = local.engine
    container = local.containers[each.key]
    node      = each.key
    labels    = var.labels
  }

  triggers_replace = [
    terraform_data.delivered.id,
    coalesce(var.user_data_revision, sha256(each.key == local.head ? var.user_data_head : var.user_data_worker)),
    var.image,
    lookup(local.gpus, each.key, ""),
    local.network,
    var.scheduler_port,
    each.key == local.head ? local.published : "",
  ]

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/node.sh' down"
    environment = merge(self.input.engine, { CONTAINER = self.input.container })
  }
}

locals {
  # Of every node. Its labels come from what it was made with.
  common = merge(local.engine, {
    IMAGE       = var.image
    NETWORK     = local.network
    OWN_NETWORK = var.network == "" ? "1" : ""
    HEAD        = local.containers[local.head]
    DELIVERED   = local.volumes.delivered
    GROUP       = lookup(local.volumes, "group", "")
    LABELS      = join("\n", [for key, value in var.labels : "${key}=${value}"])
    WAIT        = var.wait_seconds
    RESTART     = var.restart
  })
}

resource "terraform_data" "head" {
  input            = local.containers[local.head]
  triggers_replace = [terraform_data.node[local.head].id]

  provisioner "local-exec" {
    command = "sh '${path.module}/node.sh' up"
    environment = merge(local.common, {
      CONTAINER = self.input
      NODE      = local.head
      MADE_FOR  = terraform_data.node[local.head].id
      GPUS      = lookup(local.gpus, local.head, "")
      PUBLISH   = local.published
      STATE     = local.volumes.jobs
      USER_DATA = replace(module.core.user_data_head, "@SKYINFRA_NODE@", local.head)
    })
  }
}

resource "terraform_data" "worker" {
  for_each = toset(slice(local.names, 1, length(local.names)))

  input            = local.containers[each.key]
  triggers_replace = [terraform_data.node[each.key].id]

  provisioner "local-exec" {
    command = "sh '${path.module}/node.sh' up"
    environment = merge(local.common, {
      CONTAINER = self.input
      NODE      = each.key
      MADE_FOR  = terraform_data.node[each.key].id
      GPUS      = local.gpus[each.key]
      PUBLISH   = ""
      STATE     = ""
      USER_DATA = replace(module.core.user_data_worker, "@SKYINFRA_NODE@", each.key)
    })
  }

  # Its slots are ready once the head answers.
  depends_on = [terraform_data.head]
}

# Between how many nodes the head chooses, which takes over another number while it runs.
resource "terraform_data" "bounds" {
  count = local.elastic ? 1 : 0

  triggers_replace = [var.min_nodes, var.node_count, terraform_data.state.id]
  depends_on       = [terraform_data.head]

  provisioner "local-exec" {
    command     = "sh '${path.module}/node.sh' bounds"
    environment = merge(local.engine, { CONTAINER = local.containers[local.head], BOUNDS = "${coalesce(var.min_nodes, 0)} ${var.node_count}" })
  }
}
