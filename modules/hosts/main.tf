# Sets machines up over SSH, whoever bought them, and says in the manifest what they are.

module "core" {
  source = "../core"
  pool   = var.pool
  secret = var.secret
  places = local.places
  names  = var.names
  # What Linux takes for one variable of the environment, by which host.sh gets them.
  limit = { bytes = 131000, gzip = false, called = "the environment of a program" }
}

locals {
  nodes = var.nodes == null ? [for index in range(var.pool.node_count) : "${var.pool.name}-${index}"] : var.nodes
  head  = local.nodes[0]
  ids   = merge(var.ids, { for node, host in terraform_data.node : node => host.id })

  connections = {
    for node, machine in var.machines : node => merge(length(machine.hops) == 0 ? {} : {
      # The machines to reach `via` through, a line for each, with a unit separator between its parts.
      HOPS = join("\n", [for hop in machine.hops : join("\u001f", [hop.address, hop.user, tostring(hop.port), hop.host_key, hop.key_file])])
      }, {
      HOST         = machine.address
      SSH_USER     = machine.user
      SSH_PORT     = tostring(machine.port == 0 && !var.give_back ? 22 : machine.port)
      HOST_KEY     = machine.host_key != null ? machine.host_key : try(trimspace(var.host_keys[node].public_key_openssh), "")
      KEY_FILE     = machine.key_file
      VIA          = try(machine.via.address, "")
      VIA_USER     = try(machine.via.user, "")
      VIA_PORT     = try(tostring(machine.via.port), "0")
      VIA_HOST_KEY = try(machine.via.host_key, "")
      VIA_KEY_FILE = try(machine.via.key_file, "")
      FLEET        = "${var.pool.stack}/${var.pool.name}"
      FLEET_ID     = terraform_data.fleet.id
    })
  }
  # What host.sh is told of a node. A machine that stands already is known before its first contact.
  contact = {
    for node, connection in local.connections : node => merge(
      connection,
      { PATIENCE = var.give_back ? "0" : tostring(var.patience) },
      { for name, file in { KNOWN_HOSTS = var.known_hosts, KNOWN_AS = "skyinfra-${var.kind}-${local.ids[node]}" } : name => file if var.known_hosts != "" },
    )
  }
  # Where a worker gets the runner that the fleet was made with.
  from_head = { for name, value in local.contact[local.head] : "HEAD_${name}" => value }

  # A machine that was just made may have no address yet, and can be destroyed all the same.
  inside      = { for node, machine in var.machines : node => machine.inside == null ? machine.address : machine.inside }
  inside_head = coalesce(local.inside[local.head], "unknown")
  places = {
    head   = length(regexall(":", local.inside_head)) > 0 ? "[${local.inside_head}]:${var.pool.scheduler_port}" : "${local.inside_head}:${var.pool.scheduler_port}"
    bucket = "file:///opt/skyinfra/delivered"
    runner = "file:///opt/skyinfra/delivered/${basename(var.pool.runner_file)}"
  }

  delivered = { SECRET = var.secret.triggers_replace, VERSIONS = module.core.versions, RUNNER = var.pool.runner_file }

  # The manifest.
  fleet = merge(module.core.fleet, {
    provider = var.kind
    account  = var.account
    head = {
      address = var.machines[local.head].outside == null ? var.machines[local.head].address : var.machines[local.head].outside
      port    = var.pool.scheduler_port
    }
    nodes = [
      for node in local.nodes : {
        name           = node
        id             = local.ids[node]
        address        = local.inside[node]
        public_address = var.machines[node].address
        zone           = var.zone
        machine_type   = var.pool.machine_types[0]
        head           = node == local.head
        # What ssh has to be told; null is what it takes by itself.
        ssh = {
          user     = try(coalesce(var.machines[node].user), null)
          port     = contains([0, 22], coalesce(var.machines[node].port, 0)) ? null : var.machines[node].port
          key_file = try(coalesce(var.machines[node].key_file), null)
          # As ssh -J takes it: the first one is the next to the client.
          via = var.machines[node].via == null ? null : join(",", [
            for hop in reverse(concat([var.machines[node].via], var.machines[node].hops)) : join("", [
              hop.user == "" ? "" : "${hop.user}@",
              length(regexall(":", hop.address)) > 0 ? "[${hop.address}]" : hop.address,
              contains([0, 22], hop.port) ? "" : ":${hop.port}",
            ])
          ])
        }
      }
    ]
    group_nodes = 0
  })
}

# Which fleet a host is of: it outlives the secret, and two fleets of one name differ in it.
resource "terraform_data" "fleet" {}

# A host that stands already. Destroying it gives the machine back. It is made by other resources (`head`, `worker`): what
# Terraform could not create whole it does not destroy by its program either.
resource "terraform_data" "node" {
  for_each = toset(var.give_back ? local.nodes : [])

  input = {
    connection = local.connections[each.key]
    labels     = var.pool.labels
  }
  triggers_replace = [terraform_data.fleet.id]

  provisioner "local-exec" {
    when        = destroy
    command     = "sh '${path.module}/host.sh' down"
    environment = merge(self.input.connection, { NODE = each.key })
  }
}

# Each sets its host up. Where the secret is among the variables, Terraform shows nothing of what the program says: the
# host is looked at before, and waited for after.
resource "terraform_data" "head" {
  input = local.head
  triggers_replace = [
    local.ids[local.head],
    var.secret.id,
    coalesce(var.pool.user_data_revision, sha256(var.pool.user_data_head)),
    var.pool.scheduler_port,
  ]

  lifecycle {
    precondition {
      condition     = coalesce(var.machines[local.head].address, "unknown") != "unknown"
      error_message = "${local.head} has no address yet: the cloud is still making it. Deploy again in a minute. Where none comes, -replace of its machine has another one made."
    }
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' claim"
    environment = merge(local.contact[local.head], { NODE = self.input })
  }

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.contact[local.head], local.delivered, {
      USER_DATA = replace(module.core.user_data_head, "@SKYINFRA_NODE@", self.input)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' up"
    environment = merge(local.contact[local.head], { WAIT = var.pool.wait_seconds })
  }
}

resource "terraform_data" "worker" {
  for_each = setsubtract(local.nodes, [local.head])

  input = each.key
  triggers_replace = [
    local.ids[each.key],
    var.secret.id,
    coalesce(var.pool.user_data_revision, sha256(var.pool.user_data_worker)),
    local.places.head,
  ]

  lifecycle {
    precondition {
      condition     = coalesce(var.machines[each.key].address, "unknown") != "unknown"
      error_message = "${each.key} has no address yet: the cloud is still making it. Deploy again in a minute. Where none comes, -replace of its machine has another one made."
    }
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' claim"
    environment = merge(local.contact[each.key], { NODE = self.input })
  }

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.contact[each.key], local.from_head, local.delivered, {
      USER_DATA = replace(module.core.user_data_worker, "@SKYINFRA_NODE@", self.input)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' up"
    environment = merge(local.contact[each.key], { WAIT = var.pool.wait_seconds })
  }

  # It takes the runner from there, and its slots are ready once the head answers.
  depends_on = [terraform_data.head]
}

# Another layout: nodes get their configuration anew, the head first, which hands the layout on. No host is set up again.
resource "terraform_data" "layout" {
  triggers_replace = [terraform_data.head.id, sha256(var.pool.user_data_head)]

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.contact[local.head], local.delivered, {
      USER_DATA = replace(module.core.user_data_head, "@SKYINFRA_NODE@", local.head)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' configure"
    environment = merge(local.contact[local.head], { WAIT = var.pool.wait_seconds })
  }

  depends_on = [terraform_data.worker]
}

resource "terraform_data" "worker_layout" {
  for_each = setsubtract(local.nodes, [local.head])

  triggers_replace = [terraform_data.worker[each.key].id, sha256(var.pool.user_data_worker)]

  provisioner "local-exec" {
    command = "sh '${path.module}/host.sh' deliver"
    environment = merge(local.contact[each.key], local.from_head, local.delivered, {
      USER_DATA = replace(module.core.user_data_worker, "@SKYINFRA_NODE@", each.key)
    })
  }

  provisioner "local-exec" {
    command     = "sh '${path.module}/host.sh' configure"
    environment = merge(local.contact[each.key], { WAIT = var.pool.wait_seconds })
  }

  depends_on = [terraform_data.layout]
}
