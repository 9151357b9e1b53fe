locals {
  names = [for index in range(var.node_count) : "${var.name}-${index}"]
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

# The host key of each machine.
resource "tls_private_key" "host" {
  for_each  = toset(local.names)
  algorithm = "ED25519"
}

module "hosts" {
  source    = "../hosts"
  kind      = "scaleway"
  secret    = terraform_data.secret
  account   = scaleway_instance_server.node[local.names[0]].project_id
  zone      = var.region
  ids       = { for node, server in scaleway_instance_server.node : node => server.id }
  machines  = { for node, ip in scaleway_instance_ip.node : node => { address = ip.address, user = "root", key_file = var.key_file } }
  host_keys = tls_private_key.host
  # https://www.scaleway.com/en/developers/api/instances/: no limit is said
  names = { limit = 63 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

# Every machine of the project lets it in.
resource "scaleway_iam_ssh_key" "login" {
  name       = module.hosts.names.own
  public_key = trimspace(var.ssh_public_key)

  lifecycle { ignore_changes = [name] }
}

resource "scaleway_instance_ip" "node" {
  for_each = toset(local.names)
  zone     = var.region
}

resource "scaleway_instance_security_group" "pool" {
  name                   = module.hosts.names.own
  zone                   = var.region
  inbound_default_policy = "drop"

  dynamic "inbound_rule" {
    for_each = setproduct(var.allow_cidrs, [22, var.scheduler_port])
    content {
      action   = "accept"
      protocol = "TCP"
      port     = inbound_rule.value[1]
      ip_range = inbound_rule.value[0]
    }
  }

  # The nodes among themselves, by their public addresses.
  dynamic "inbound_rule" {
    for_each = local.names
    content {
      action   = "accept"
      protocol = "ANY"
      ip_range = "${scaleway_instance_ip.node[inbound_rule.value].address}/32"
    }
  }

  lifecycle { ignore_changes = [name] }
}

# What would be changed in place, for which a machine is stopped.
resource "terraform_data" "machine" {
  input = [var.image, var.disk_gb]
}

resource "scaleway_instance_server" "node" {
  for_each = toset(local.names)

  name = module.hosts.names.nodes[each.key]
  zone = var.region
  type = var.machine_types[0]
  # The provider plans no change to a type that Scaleway would not migrate the machine to.
  replace_on_type_change = true
  image                  = var.image
  ip_id                  = scaleway_instance_ip.node[each.key].id
  security_group_id      = scaleway_instance_security_group.pool.id
  user_data              = { cloud-init = module.hosts.cloud_config[each.key] }
  tags                   = concat(["skyinfra-${var.stack}-${var.name}"], [for key, value in var.labels : "${key}=${value}"])

  root_volume {
    volume_type           = "sbs_volume"
    size_in_gb            = var.disk_gb == 0 ? 125 : var.disk_gb
    delete_on_termination = true
  }

  lifecycle {
    ignore_changes       = [name, user_data]
    replace_triggered_by = [terraform_data.machine, tls_private_key.host[each.key]]
  }

  depends_on = [scaleway_iam_ssh_key.login]
}
