locals {
  # By host, not by number: a host that goes changes the name of no other node.
  hosts = { for host in var.hosts : "${var.name}-${trim(replace(lower(host.address), "/[^a-z0-9]+/", "-"), "-")}" => host }
  order = [for host in var.hosts : "${var.name}-${trim(replace(lower(host.address), "/[^a-z0-9]+/", "-"), "-")}"]
  head  = local.order[0]
  # The address at which clients and the other nodes reach it.
  reached = { for node, host in local.hosts : node => host.inside == "" ? host.address : host.inside }

  connections = {
    for node, host in local.hosts : node => {
      HOST         = host.address
      SSH_USER     = host.user
      SSH_PORT     = tostring(host.port)
      HOST_KEY     = host.host_key
      KEY_FILE     = host.key_file
      VIA          = try(host.via.address, "")
      VIA_USER     = try(host.via.user, "")
      VIA_PORT     = try(tostring(host.via.port), "0")
      VIA_HOST_KEY = try(host.via.host_key, "")
      VIA_KEY_FILE = try(host.via.key_file, "")
      FLEET        = "${var.stack}/${var.name}"
      FLEET_ID     = terraform_data.fleet.id
    }
  }
  # Where a worker gets the runner that the fleet was made with.
  from_head = { for name, value in local.connections[local.head] : "HEAD_${name}" => value }

  places = {
    head   = length(regexall(":", local.reached[local.head])) > 0 ? "[${local.reached[local.head]}]:${var.scheduler_port}" : "${local.reached[local.head]}:${var.scheduler_port}"
    bucket = "file:///opt/skyinfra/delivered"
    runner = "file:///opt/skyinfra/delivered/${basename(var.runner_file)}"
  }
  # The jobs of the head stand on its own disk.
  volume = ""
  limit  = { bytes = null, gzip = false, called = "ssh" }

  versions = var.versions == null ? "" : jsonencode({
    version      = 1
    python       = var.versions.python
    requirements = var.versions.requirements
    wheel        = var.runner_file == "" ? null : { name = basename(var.runner_file), sha256 = filesha256(var.runner_file) }
  })
  delivered = { SECRET = local.secret, VERSIONS = local.versions, RUNNER = var.runner_file }
}

# Which fleet a host is of: it outlives the secret, and two fleets of one name differ in it.
resource "terraform_data" "fleet" {
  lifecycle {
    precondition {
      condition     = var.node_count == length(var.hosts)
      error_message = "node_count: ${var.node_count}, and ${length(var.hosts)} hosts are given, each of which is one node."
    }

    precondition {
      condition     = var.versions != null || !can(regex("@SKYINFRA_BUCKET@/versions", "${var.user_data_head}${var.user_data_worker}"))
      error_message = "versions: the user data ask for versions.json. Give versions and runner_file as `skyinfra render` wrote them."
    }

    precondition {
      condition     = length(var.hosts) == 1 || var.user_data_worker != ""
      error_message = "user_data_worker: needed, for this pool has nodes besides its head."
    }
  }
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

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/host.sh' down"
    environment = self.input.connection
  }
}

# Each sets its host up. Where the secret is among the variables, Terraform shows nothing of what the program says: the
# host is looked at before, and waited for after.
resource "terraform_data" "head" {
  input = local.head
  triggers_replace = [
    terraform_data.node[local.head].id,
    terraform_data.secret.id,
    coalesce(var.user_data_revision, sha256(var.user_data_head)),
    var.scheduler_port,
  ]

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' claim"
    environment = local.connections[local.head]
  }

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.connections[local.head], local.delivered, {
      USER_DATA = replace(local.user_data_head, "@SKYINFRA_NODE@", self.input)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' up"
    environment = merge(local.connections[local.head], { WAIT = var.wait_seconds })
  }
}

resource "terraform_data" "worker" {
  for_each = setsubtract(keys(local.hosts), [local.head])

  input = each.key
  triggers_replace = [
    terraform_data.node[each.key].id,
    terraform_data.secret.id,
    coalesce(var.user_data_revision, sha256(var.user_data_worker)),
    local.places.head,
  ]

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' claim"
    environment = local.connections[each.key]
  }

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.connections[each.key], local.from_head, local.delivered, {
      USER_DATA = replace(local.user_data_worker, "@SKYINFRA_NODE@", self.input)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' up"
    environment = merge(local.connections[each.key], { WAIT = var.wait_seconds })
  }

  # It takes the runner from there, and its slots are ready once the head answers.
  depends_on = [terraform_data.head]
}

# Another layout: nodes get their configuration anew, the head first, which hands the layout on. No host is set up again.
resource "terraform_data" "layout" {
  triggers_replace = [terraform_data.head.id, sha256(var.user_data_head)]

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.connections[local.head], local.delivered, {
      USER_DATA = replace(local.user_data_head, "@SKYINFRA_NODE@", local.head)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' configure"
    environment = merge(local.connections[local.head], { WAIT = var.wait_seconds })
  }

  depends_on = [terraform_data.worker]
}

resource "terraform_data" "worker_layout" {
  for_each = setsubtract(keys(local.hosts), [local.head])

  triggers_replace = [terraform_data.worker[each.key].id, sha256(var.user_data_worker)]

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.connections[each.key], local.from_head, local.delivered, {
      USER_DATA = replace(local.user_data_worker, "@SKYINFRA_NODE@", each.key)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' configure"
    environment = merge(local.connections[each.key], { WAIT = var.wait_seconds })
  }

  depends_on = [terraform_data.layout]
}
