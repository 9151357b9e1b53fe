# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

# The host key of each machine.
resource "tls_private_key" "host" {
  for_each  = module.hosts.names.nodes
  algorithm = "ED25519"
}

module "hosts" {
  source    = "../hosts"
  kind      = "vultr"
  secret    = terraform_data.secret
  zone      = var.region
  ids       = { for node, instance in vultr_instance.node : node => instance.id }
  machines  = { for node, instance in vultr_instance.node : node => { address = instance.main_ip, inside = instance.internal_ip, user = "root", key_file = var.key_file } }
  host_keys = tls_private_key.host
  # The images close all ports but 22 in the machine itself. Here the firewall group does that.
  cloud_config = jsonencode({ runcmd = [["sh", "-c", "ufw disable || true"]] })
  # https://www.vultr.com/api/: no limit is said
  names = { limit = 63 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

resource "vultr_ssh_key" "login" {
  name    = module.hosts.names.own
  ssh_key = trimspace(var.ssh_public_key)

  lifecycle { ignore_changes = [name] }
}

resource "vultr_vpc" "pool" {
  region      = var.region
  description = module.hosts.names.own

  lifecycle { ignore_changes = [description] }
}

# It holds for the public addresses; the nodes reach each other in the VPC.
resource "vultr_firewall_group" "pool" {
  description = module.hosts.names.own

  lifecycle { ignore_changes = [description] }
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
  for_each = module.hosts.names.nodes

  region            = var.region
  plan              = var.machine_types[0]
  os_id             = tonumber(var.image)
  label             = each.value
  hostname          = each.key
  ssh_key_ids       = [vultr_ssh_key.login.id]
  vpc_ids           = [vultr_vpc.pool.id]
  firewall_group_id = vultr_firewall_group.pool.id
  user_data         = module.hosts.cloud_config[each.key]
  activation_email  = false
  tags              = concat(["skyinfra-${var.stack}-${var.name}"], [for key, value in var.labels : "${key}:${value}"])

  lifecycle {
    # A key that is changed is for machines that are made later.
    ignore_changes       = [label, user_data, ssh_key_ids]
    replace_triggered_by = [terraform_data.plan, tls_private_key.host[each.key]]
  }

  # Nothing reaches a machine that the rules do not let in.
  depends_on = [vultr_firewall_rule.from_outside]
}
