locals {
  # The tag by which the firewall holds for a droplet from its first moment on.
  tags = concat([digitalocean_tag.pool.name], [for key, value in var.labels : "${key}:${value}"])
}

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
  source = "../hosts"
  kind   = "digitalocean"
  secret = terraform_data.secret
  zone   = var.region
  ids    = { for node, droplet in digitalocean_droplet.node : node => droplet.id }
  machines = {
    for node, droplet in digitalocean_droplet.node : node => { address = droplet.ipv4_address, inside = droplet.ipv4_address_private, user = "root", key_file = var.key_file }
  }
  patience  = 600
  host_keys = tls_private_key.host
  # https://docs.digitalocean.com/reference/api/: a VPC's name has letters, digits, dots and dashes
  names = { limit = 63, reserve = 8 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

# DigitalOcean takes a key once: one that the account has is named by its id or fingerprint.
resource "digitalocean_ssh_key" "login" {
  count      = var.ssh_key_id == null ? 1 : 0
  name       = module.hosts.names.own
  public_key = trimspace(var.ssh_public_key)

  lifecycle { ignore_changes = [name] }
}

resource "digitalocean_vpc" "pool" {
  count  = var.vpc_id == null ? 1 : 0
  name   = "${module.hosts.names.own}-${var.region}"
  region = var.region

  lifecycle { ignore_changes = [name] }
}

resource "digitalocean_tag" "pool" {
  name = module.hosts.names.own

  lifecycle { ignore_changes = [name] }
}

resource "digitalocean_firewall" "pool" {
  name = module.hosts.names.own
  tags = [digitalocean_tag.pool.id]

  inbound_rule {
    protocol         = "tcp"
    port_range       = "22"
    source_addresses = var.allow_cidrs
  }

  inbound_rule {
    protocol         = "tcp"
    port_range       = tostring(var.scheduler_port)
    source_addresses = var.allow_cidrs
  }

  # The nodes among themselves.
  dynamic "inbound_rule" {
    for_each = ["tcp", "udp"]
    content {
      protocol    = inbound_rule.value
      port_range  = "1-65535"
      source_tags = [digitalocean_tag.pool.id]
    }
  }

  inbound_rule {
    protocol    = "icmp"
    source_tags = [digitalocean_tag.pool.id]
  }

  dynamic "outbound_rule" {
    for_each = ["tcp", "udp"]
    content {
      protocol              = outbound_rule.value
      port_range            = "1-65535"
      destination_addresses = ["0.0.0.0/0", "::/0"]
    }
  }

  outbound_rule {
    protocol              = "icmp"
    destination_addresses = ["0.0.0.0/0", "::/0"]
  }

  lifecycle { ignore_changes = [name] }
}

# A size would be changed in place, for which the droplet is switched off; one with a GPU cannot be.
resource "terraform_data" "size" {
  input = var.machine_types[0]
}

resource "digitalocean_droplet" "node" {
  for_each = module.hosts.names.nodes

  name               = each.key
  region             = var.region
  size               = var.machine_types[0]
  image              = var.image
  ssh_keys           = [var.ssh_key_id == null ? digitalocean_ssh_key.login[0].id : var.ssh_key_id]
  vpc_uuid           = var.vpc_id == null ? digitalocean_vpc.pool[0].id : var.vpc_id
  tags               = local.tags
  gpu_partition_mode = var.gpu_partition_mode
  user_data          = module.hosts.cloud_config[each.key]

  # A droplet with eight GPUs takes its time to be made, and until it is unlocked to go; for its going itself the provider
  # waits 60 s, whatever stands here.
  timeouts {
    create = "30m"
    delete = "10m"
  }

  lifecycle {
    # The state has a hash of the user data alone. A key that is changed is for droplets that are made later.
    ignore_changes       = [user_data, ssh_keys]
    replace_triggered_by = [terraform_data.size, tls_private_key.host[each.key]]
  }

  # Nothing reaches a droplet that the firewall does not let in.
  depends_on = [digitalocean_firewall.pool]
}
