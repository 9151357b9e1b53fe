locals {
  kind  = "vultr"
  order = local.names
  head  = local.names[0]
  zone  = var.region

  ids = { for node, instance in vultr_instance.node : node => instance.id }
  machines = {
    for node, instance in vultr_instance.node : node => {
      address  = instance.main_ip
      inside   = instance.internal_ip
      outside  = instance.main_ip
      user     = "root"
      port     = 22
      host_key = local.host_keys[node]
      key_file = var.key_file
      via      = null
    }
  }
  contact = { for node in local.names : node => { PATIENCE = "900" } }

  # The images close all ports but 22 in the machine itself. Here the firewall group does that.
  cloud_config = { runcmd = [["sh", "-c", "ufw disable || true"]] }

  # The jobs of the head stand on its own disk.
  volume = ""
  limit  = { bytes = null, gzip = false, called = "Vultr" }

  own = "skyinfra-${var.stack}-${var.name}"
}

resource "vultr_ssh_key" "login" {
  name    = local.own
  ssh_key = trimspace(var.ssh_public_key)
}

resource "vultr_vpc" "pool" {
  region      = var.region
  description = local.own
}

# It holds for the public addresses; the nodes reach each other in the VPC.
resource "vultr_firewall_group" "pool" {
  description = local.own

  lifecycle {
    precondition {
      condition     = length(var.allow_cidrs) > 0
      error_message = "allow_cidrs: the nodes are set up over SSH, so the network of the machine that applies must be among them."
    }
  }
}

resource "vultr_firewall_rule" "from_outside" {
  for_each = { for each in setproduct(var.allow_cidrs, ["22", tostring(var.scheduler_port)]) : join(" ", each) => each }

  firewall_group_id = vultr_firewall_group.pool.id
  protocol          = "tcp"
  ip_type           = length(regexall(":", each.value[0])) > 0 ? "v6" : "v4"
  subnet            = split("/", each.value[0])[0]
  subnet_size       = tonumber(split("/", each.value[0])[1])
  port              = each.value[1]
}

# A plan would be changed in place, for which a machine is restarted; to a smaller one it is not.
resource "terraform_data" "plan" {
  input = var.machine_types[0]
}

resource "vultr_instance" "node" {
  for_each = toset(local.names)

  region            = var.region
  plan              = var.machine_types[0]
  os_id             = tonumber(var.image)
  label             = "${local.own}-${each.key}"
  hostname          = each.key
  ssh_key_ids       = [vultr_ssh_key.login.id]
  vpc_ids           = [vultr_vpc.pool.id]
  firewall_group_id = vultr_firewall_group.pool.id
  user_data         = local.host_key_data[each.key]
  activation_email  = false
  tags              = concat([local.own], [for key, value in var.labels : "${key}:${value}"])

  lifecycle {
    # A key that is changed is for machines that are made later.
    ignore_changes       = [user_data, ssh_key_ids]
    replace_triggered_by = [terraform_data.plan, tls_private_key.host[each.key]]
  }

  # Nothing reaches a machine that the rules do not let in.
  depends_on = [vultr_firewall_rule.from_outside]
}
