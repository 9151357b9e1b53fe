locals {
  folder  = "${var.root}/${var.stack}/${var.name}"
  elastic = var.min_nodes != null
  names   = [for index in range(local.elastic ? 1 : var.node_count) : "${var.name}-${index}"]
  head    = local.names[0]

  configurations = {
    for name in local.names : name => replace(
      name == local.head ? var.user_data_head : var.user_data_worker, "@SKYINFRA_NODE@", name
    )
  }

  # The head writes where its scheduler listens once it does. The output of a resource is unknown while that resource
  # is being created, so Terraform reads the file after the head is up, never before.
  scheduler = try(trimspace(file("${terraform_data.head.output}/scheduler")), "127.0.0.1:0")
}

# The fleet secret. It is kept in `triggers_replace`, not in `input`: terraform_data copies `input` to `output`, which
# Terraform does not treat as sensitive and prints in the plan of a destroy.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

# Its copy for the nodes. Terraform prints no output of this one, since it handles a sensitive value.
resource "terraform_data" "credential" {
  input            = local.folder
  triggers_replace = [terraform_data.secret.id]

  provisioner "local-exec" {
    command     = "sh '${path.module}/node.sh' secret"
    environment = { FOLDER = self.input, SECRET = terraform_data.secret.triggers_replace }
  }

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/node.sh' forget"
    environment = { FOLDER = self.input }
  }
}

# What outlives a head that is replaced: its jobs. Destroying it, after the nodes, removes them.
resource "terraform_data" "state" {
  input = "${local.folder}/head"

  depends_on = [terraform_data.credential]

  provisioner "local-exec" {
    command     = "sh '${path.module}/node.sh' state"
    environment = { FOLDER = self.input }
  }

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/node.sh' down"
    environment = { FOLDER = self.input }
  }
}

# What a node is, apart from its configuration: its folder. Destroying it stops the node and removes the folder.
resource "terraform_data" "node" {
  for_each = toset(local.names)

  input = {
    folder = "${local.folder}/${each.key}"
    labels = var.labels
  }

  depends_on = [terraform_data.state]

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/node.sh' down"
    environment = { FOLDER = self.input.folder }
  }
}

# The nodes that the head starts and that end by themselves: their number is nothing of Terraform's. Destroying it, after
# the head, ends all of them.
resource "terraform_data" "group" {
  count = local.elastic ? 1 : 0

  input      = { folder = local.folder, name = var.name }
  depends_on = [terraform_data.state]

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/node.sh' end_group"
    environment = { FOLDER = self.input.folder, NAME = self.input.name }
  }
}

# Their configuration, which the head hands to nodes that run, and to those that it starts.
resource "terraform_data" "template" {
  count = local.elastic ? 1 : 0

  input            = terraform_data.group[0].output.folder
  triggers_replace = [var.user_data_worker, terraform_data.group[0].id]

  provisioner "local-exec" {
    command     = "sh '${path.module}/node.sh' template"
    environment = { FOLDER = self.input, CONFIGURATION = var.user_data_worker }
  }
}

# The configuration of a node. A change replaces this resource, not the node: the running node takes the new one over.
resource "terraform_data" "head" {
  input            = terraform_data.node[local.head].output.folder
  triggers_replace = [local.configurations[local.head], terraform_data.secret.id, terraform_data.node[local.head].id]
  depends_on       = [terraform_data.template]

  provisioner "local-exec" {
    command = "sh '${path.module}/node.sh' up"
    environment = {
      FOLDER        = self.input
      CONFIGURATION = local.configurations[local.head]
      STATE         = terraform_data.state.output
      RUNNER        = var.runner
      WAIT          = var.wait_seconds
    }
  }
}

resource "terraform_data" "worker" {
  for_each = toset(slice(local.names, 1, length(local.names)))

  input = terraform_data.node[each.key].output.folder
  triggers_replace = [
    replace(local.configurations[each.key], "@SKYINFRA_HEAD@", local.scheduler),
    terraform_data.secret.id,
    terraform_data.node[each.key].id,
  ]

  provisioner "local-exec" {
    command = "sh '${path.module}/node.sh' up"
    environment = {
      FOLDER        = self.input
      CONFIGURATION = replace(local.configurations[each.key], "@SKYINFRA_HEAD@", local.scheduler)
      RUNNER        = var.runner
      WAIT          = var.wait_seconds
    }
  }
}
