# What sets machines up over SSH: `python -m tools.core` copies it, host.sh and node.sh into the folders of the modules
# whose runner arrives so. A module says in locals: `kind` (of the provider), `order` (the names of the nodes), `head`,
# `zone`, `limit` and `volume` (see core.tf), and by node
#   ids       what changes when another machine stands there
#   machines  how it is reached. address, user, port, host_key, key_file, via: by ssh, as in modules/ssh; null takes what
#             ssh takes. inside, outside: the addresses at which the other nodes and the clients reach it
#   contact   what host.sh needs besides of a machine that was bought: PATIENCE; and KNOWN_HOSTS and KNOWN_AS where its host
#             key is not known before

variable "wait_seconds" {
  description = "How long a node may take, in seconds, until every slot is ready."
  type        = number
  default     = 1800
  nullable    = false

  validation {
    condition     = var.wait_seconds >= 1
    error_message = "wait_seconds: at least 1."
  }
}

locals {
  connections = {
    for node, machine in local.machines : node => {
      HOST         = machine.address
      SSH_USER     = machine.user
      SSH_PORT     = tostring(machine.port)
      HOST_KEY     = machine.host_key
      KEY_FILE     = machine.key_file
      VIA          = try(machine.via.address, "")
      VIA_USER     = try(machine.via.user, "")
      VIA_PORT     = try(tostring(machine.via.port), "0")
      VIA_HOST_KEY = try(machine.via.host_key, "")
      VIA_KEY_FILE = try(machine.via.key_file, "")
      FLEET        = "${var.stack}/${var.name}"
      FLEET_ID     = terraform_data.fleet.id
    }
  }
  # Where a worker gets the runner that the fleet was made with.
  from_head = { for name, value in merge(local.connections[local.head], local.contact[local.head]) : "HEAD_${name}" => value }

  # A machine that was just made may have no address yet, and can be destroyed all the same.
  inside_head = coalesce(local.machines[local.head].inside, "unknown")
  places = {
    head   = length(regexall(":", local.inside_head)) > 0 ? "[${local.inside_head}]:${var.scheduler_port}" : "${local.inside_head}:${var.scheduler_port}"
    bucket = "file:///opt/skyinfra/delivered"
    runner = "file:///opt/skyinfra/delivered/${basename(var.runner_file)}"
  }

  versions = var.versions == null ? "" : jsonencode({
    version      = 1
    python       = var.versions.python
    requirements = var.versions.requirements
    wheel        = var.runner_file == "" ? null : { name = basename(var.runner_file), sha256 = filesha256(var.runner_file) }
  })
  delivered = { SECRET = local.secret, VERSIONS = local.versions, RUNNER = var.runner_file }

  # The manifest.
  fleet = {
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = local.kind
    simulated = false
    head = {
      address = local.machines[local.head].outside
      port    = var.scheduler_port
    }
    nodes = [
      for node in local.order : {
        name           = node
        id             = local.ids[node]
        address        = local.machines[node].inside
        public_address = local.machines[node].address
        zone           = local.zone
        machine_type   = var.machine_types[0]
        head           = node == local.head
        # What ssh has to be told; null is what it takes by itself.
        ssh = {
          user     = try(coalesce(local.machines[node].user), null)
          port     = contains([0, 22], coalesce(local.machines[node].port, 0)) ? null : local.machines[node].port
          key_file = try(coalesce(local.machines[node].key_file), null)
          via = try(join("", [
            local.machines[node].via.user == "" ? "" : "${local.machines[node].via.user}@",
            local.machines[node].via.address,
            contains([0, 22], local.machines[node].via.port) ? "" : ":${local.machines[node].via.port}",
          ]), null)
        }
      }
    ]
    group_nodes = 0
    slots       = var.slots
    secret      = local.secret
  }
}

# Which fleet a host is of: it outlives the secret, and two fleets of one name differ in it.
resource "terraform_data" "fleet" {
  lifecycle {
    precondition {
      condition     = var.versions != null || !can(regex("@SKYINFRA_BUCKET@/versions", "${var.user_data_head}${var.user_data_worker}"))
      error_message = "versions: the user data ask for versions.json. Give versions and runner_file as `skyinfra render` wrote them."
    }

    precondition {
      condition     = length(local.order) == 1 || var.user_data_worker != ""
      error_message = "user_data_worker: needed, for this pool has nodes besides its head."
    }
  }
}

# Each sets its host up. Where the secret is among the variables, Terraform shows nothing of what the program says: the
# host is looked at before, and waited for after.
resource "terraform_data" "head" {
  input = local.head
  triggers_replace = [
    local.ids[local.head],
    terraform_data.secret.id,
    coalesce(var.user_data_revision, sha256(var.user_data_head)),
    var.scheduler_port,
  ]

  lifecycle {
    precondition {
      condition     = coalesce(local.machines[local.head].address, "unknown") != "unknown"
      error_message = "${local.head} has no address yet: the cloud is still making it. Deploy again in a minute."
    }
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' claim"
    environment = merge(local.connections[local.head], local.contact[local.head])
  }

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.connections[local.head], local.contact[local.head], local.delivered, {
      USER_DATA = replace(local.user_data_head, "@SKYINFRA_NODE@", self.input)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' up"
    environment = merge(local.connections[local.head], local.contact[local.head], { WAIT = var.wait_seconds })
  }
}

resource "terraform_data" "worker" {
  for_each = setsubtract(local.order, [local.head])

  input = each.key
  triggers_replace = [
    local.ids[each.key],
    terraform_data.secret.id,
    coalesce(var.user_data_revision, sha256(var.user_data_worker)),
    local.places.head,
  ]

  lifecycle {
    precondition {
      condition     = coalesce(local.machines[each.key].address, "unknown") != "unknown"
      error_message = "${each.key} has no address yet: the cloud is still making it. Deploy again in a minute."
    }
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' claim"
    environment = merge(local.connections[each.key], local.contact[each.key])
  }

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.connections[each.key], local.contact[each.key], local.from_head, local.delivered, {
      USER_DATA = replace(local.user_data_worker, "@SKYINFRA_NODE@", self.input)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' up"
    environment = merge(local.connections[each.key], local.contact[each.key], { WAIT = var.wait_seconds })
  }

  # It takes the runner from there, and its slots are ready once the head answers.
  depends_on = [terraform_data.head]
}

# Another layout: nodes get their configuration anew, the head first, which hands the layout on. No host is set up again.
resource "terraform_data" "layout" {
  triggers_replace = [terraform_data.head.id, sha256(var.user_data_head)]

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.connections[local.head], local.contact[local.head], local.delivered, {
      USER_DATA = replace(local.user_data_head, "@SKYINFRA_NODE@", local.head)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' configure"
    environment = merge(local.connections[local.head], local.contact[local.head], { WAIT = var.wait_seconds })
  }

  depends_on = [terraform_data.worker]
}

resource "terraform_data" "worker_layout" {
  for_each = setsubtract(local.order, [local.head])

  triggers_replace = [terraform_data.worker[each.key].id, sha256(var.user_data_worker)]

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.connections[each.key], local.contact[each.key], local.from_head, local.delivered, {
      USER_DATA = replace(local.user_data_worker, "@SKYINFRA_NODE@", each.key)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' configure"
    environment = merge(local.connections[each.key], local.contact[each.key], { WAIT = var.wait_seconds })
  }

  depends_on = [terraform_data.layout]
}
