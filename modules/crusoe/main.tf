locals {
  kind  = "crusoe"
  order = local.names
  head  = local.names[0]
  zone  = var.region

  ids = { for node, instance in crusoe_compute_instance.node : node => instance.id }
  machines = {
    for node, instance in crusoe_compute_instance.node : node => {
      address  = instance.network_interfaces[0].public_ipv4.address
      inside   = instance.network_interfaces[0].private_ipv4.address
      outside  = instance.network_interfaces[0].public_ipv4.address
      user     = "ubuntu"
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
  limit  = { bytes = null, gzip = false, called = "Crusoe" }

  own  = "skyinfra-${var.stack}-${var.name}"
  cidr = "10.84.0.0/16"

  # Who may come in, and where: source and ports.
  allowed = merge(
    { for pair in setproduct(var.allow_cidrs, ["22", tostring(var.scheduler_port)]) : "${join("-", pair)}-tcp" => { source = pair[0], ports = pair[1], protocol = "tcp" } },
    { for protocol in ["tcp", "udp"] : "nodes-${protocol}" => { source = local.cidr, ports = "1-65535", protocol = protocol } },
  )
}

resource "crusoe_vpc_network" "pool" {
  name = local.own
  cidr = local.cidr

  lifecycle {
    precondition {
      condition     = length(var.allow_cidrs) > 0
      error_message = "allow_cidrs: the nodes are set up over SSH, so the network of the machine that applies must be among them."
    }
  }
}

resource "crusoe_vpc_subnet" "pool" {
  name     = local.own
  cidr     = local.cidr
  location = var.region
  network  = crusoe_vpc_network.pool.id
}

resource "crusoe_vpc_firewall_rule" "in" {
  for_each = local.allowed

  # Names of rules have letters, digits and dashes.
  name              = "${local.own}-${replace(each.key, "/[^a-z0-9]+/", "-")}"
  network           = crusoe_vpc_network.pool.id
  action            = "allow"
  direction         = "ingress"
  protocols         = each.value.protocol
  source            = each.value.source
  source_ports      = "1-65535"
  destination       = local.cidr
  destination_ports = each.value.ports
}

# A type of the same family would be changed in place, for which a machine is stopped.
resource "terraform_data" "type" {
  input = var.machine_types[0]
}

resource "crusoe_compute_instance" "node" {
  for_each = toset(local.names)

  name     = "${local.own}-${each.key}"
  type     = var.machine_types[0]
  image    = var.image
  location = var.region
  ssh_key  = trimspace(var.ssh_public_key)

  network_interfaces = [{
    subnet      = crusoe_vpc_subnet.pool.id
    public_ipv4 = { type = "static" }
  }]

  # Gives the machine its host key, at every start. Until it has run, the machine answers with another one, and is asked
  # again.
  startup_script = <<-EOT
    #!/bin/sh
    set -eu
    umask 077
    cat >/etc/ssh/skyinfra_host_key <<'KEY'
    ${indent(4, trimspace(tls_private_key.host[each.key].private_key_openssh))}
    KEY
    rm -f /etc/ssh/ssh_host_*
    mv /etc/ssh/skyinfra_host_key /etc/ssh/ssh_host_ed25519_key
    echo '${local.host_keys[each.key]}' >/etc/ssh/ssh_host_ed25519_key.pub
    systemctl restart ssh 2>/dev/null || systemctl restart sshd
  EOT

  lifecycle {
    # A key that is changed is for machines that are made later. The provider compares its own words for an interface.
    ignore_changes       = [startup_script, ssh_key, network_interfaces]
    replace_triggered_by = [terraform_data.type, tls_private_key.host[each.key], crusoe_vpc_subnet.pool.id]
  }

  # Nothing reaches a machine that the rules do not let in.
  depends_on = [crusoe_vpc_firewall_rule.in]
}
