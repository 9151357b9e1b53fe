locals {
  kind  = "digitalocean"
  order = local.names
  head  = local.names[0]
  zone  = var.region

  ids = { for node, droplet in digitalocean_droplet.node : node => droplet.id }
  machines = {
    for node, droplet in digitalocean_droplet.node : node => {
      address  = droplet.ipv4_address
      inside   = droplet.ipv4_address_private
      outside  = droplet.ipv4_address
      user     = "root"
      port     = 22
      host_key = local.host_keys[node]
      key_file = var.key_file
      via      = null
    }
  }
  contact = { for node in local.names : node => { PATIENCE = "600" } }

  cloud_config = {}

  # The jobs of the head stand on its own disk.
  volume = ""
  limit  = { bytes = null, gzip = false, called = "DigitalOcean" }

  # The tag by which the firewall holds for a droplet from its first moment on.
  tag  = "skyinfra-${var.stack}-${var.name}"
  tags = concat([local.tag], [for key, value in var.labels : "${key}:${value}"])
}

# DigitalOcean takes a key once: one that the account has is named by its id or fingerprint.
resource "digitalocean_ssh_key" "login" {
  count      = var.ssh_key_id == null ? 1 : 0
  name       = local.tag
  public_key = trimspace(var.ssh_public_key)
}

resource "digitalocean_vpc" "pool" {
  count  = var.vpc_id == null ? 1 : 0
  name   = replace("${local.tag}-${var.region}", "_", "-")
  region = var.region
}

resource "digitalocean_tag" "pool" {
  name = local.tag
}

resource "digitalocean_firewall" "pool" {
  name = replace(local.tag, "_", "-")
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

  lifecycle {
    precondition {
      condition     = length(var.allow_cidrs) > 0
      error_message = "allow_cidrs: the nodes are set up over SSH, so the network of the machine that applies must be among them."
    }
  }
}

# A size would be changed in place, for which the droplet is switched off; one with a GPU cannot be.
resource "terraform_data" "size" {
  input = var.machine_types[0]
}

resource "digitalocean_droplet" "node" {
  for_each = toset(local.names)

  name               = each.key
  region             = var.region
  size               = var.machine_types[0]
  image              = var.image
  ssh_keys           = [var.ssh_key_id == null ? digitalocean_ssh_key.login[0].id : var.ssh_key_id]
  vpc_uuid           = var.vpc_id == null ? digitalocean_vpc.pool[0].id : var.vpc_id
  tags               = local.tags
  gpu_partition_mode = var.gpu_partition_mode
  user_data          = local.host_key_data[each.key]

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
