locals {
  kind  = "scaleway"
  order = local.names
  head  = local.names[0]
  zone  = var.region

  ids = { for node, server in scaleway_instance_server.node : node => server.id }
  machines = {
    for node, ip in scaleway_instance_ip.node : node => {
      address  = ip.address
      inside   = ip.address
      outside  = ip.address
      user     = "root"
      port     = 22
      host_key = local.host_keys[node]
      key_file = var.key_file
      via      = null
    }
  }
  contact = { for node in local.names : node => { PATIENCE = "900" } }

  cloud_config = {}

  # The jobs of the head stand on its own disk.
  volume = ""
  limit  = { bytes = null, gzip = false, called = "Scaleway" }

  own = "skyinfra-${var.stack}-${var.name}"
}

# Every machine of the project lets it in.
resource "scaleway_iam_ssh_key" "login" {
  name       = local.own
  public_key = trimspace(var.ssh_public_key)
}

resource "scaleway_instance_ip" "node" {
  for_each = toset(local.names)
  zone     = var.region
}

resource "scaleway_instance_security_group" "pool" {
  name                   = local.own
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

  lifecycle {
    precondition {
      condition     = length(var.allow_cidrs) > 0
      error_message = "allow_cidrs: the nodes are set up over SSH, so the network of the machine that applies must be among them."
    }
  }
}

# What would be changed in place, for which a machine is stopped.
resource "terraform_data" "machine" {
  input = [var.image, var.disk_gb]
}

resource "scaleway_instance_server" "node" {
  for_each = toset(local.names)

  name = "${local.own}-${each.key}"
  zone = var.region
  type = var.machine_types[0]
  # The provider plans no change to a type that Scaleway would not migrate the machine to.
  replace_on_type_change = true
  image                  = var.image
  ip_id                  = scaleway_instance_ip.node[each.key].id
  security_group_id      = scaleway_instance_security_group.pool.id
  user_data              = { cloud-init = local.host_key_data[each.key] }
  tags                   = concat([local.own], [for key, value in var.labels : "${key}=${value}"])

  root_volume {
    volume_type           = "sbs_volume"
    size_in_gb            = var.disk_gb == 0 ? 125 : var.disk_gb
    delete_on_termination = true
  }

  lifecycle {
    ignore_changes       = [user_data]
    replace_triggered_by = [terraform_data.machine, tls_private_key.host[each.key]]
  }

  depends_on = [scaleway_iam_ssh_key.login]
}
