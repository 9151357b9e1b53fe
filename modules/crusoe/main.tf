locals {
  cidr = "10.84.0.0/16"

  # InfiniBand networks of the location that have machines of the type, those with room for the nodes first.
  networks = [for each in try(data.crusoe_ib_networks.all[0].ib_networks, []) : {
    id   = each.id
    free = sum([for capacity in each.capacities : capacity.slice_type == var.machine_types[0] ? capacity.quantity : 0])
  } if each.location == var.region && contains(each.capacities[*].slice_type, var.machine_types[0])]
  # A quantity counts GPUs, of which TYPE.8x has eight.
  wanted  = var.node_count * try(tonumber(regex("\\.(\\d+)x$", var.machine_types[0])[0]), 1)
  network = try(concat([for each in local.networks : each.id if each.free >= local.wanted], local.networks[*].id)[0], "")

  # Who may come in, and where: source and ports.
  allowed = merge(
    { for pair in setproduct(var.allow_cidrs, ["22", tostring(var.scheduler_port)]) : "${join("-", pair)}-tcp" => { source = pair[0], ports = pair[1], protocol = "tcp" } },
    { for protocol in ["tcp", "udp"] : "nodes-${protocol}" => { source = local.cidr, ports = "1-65535", protocol = protocol } },
  )
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
  source  = "../hosts"
  kind    = "crusoe"
  secret  = terraform_data.secret
  account = crusoe_compute_instance.node["${var.name}-0"].project_id
  zone    = var.region
  ids     = { for node, instance in crusoe_compute_instance.node : node => instance.id }
  machines = {
    for node, instance in crusoe_compute_instance.node : node => { address = instance.network_interfaces[0].public_ipv4.address, inside = instance.network_interfaces[0].private_ipv4.address, user = "ubuntu", key_file = var.key_file }
  }
  host_keys = tls_private_key.host
  # read in documents only: https://docs.crusoecloud.com/compute/virtual-machines/managing-vms
  names = { limit = 63, reserve = 10 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

resource "crusoe_vpc_network" "pool" {
  name = module.hosts.names.own
  cidr = local.cidr

  lifecycle { ignore_changes = [name] }
}

resource "crusoe_vpc_subnet" "pool" {
  name     = module.hosts.names.own
  cidr     = local.cidr
  location = var.region
  network  = crusoe_vpc_network.pool.id

  lifecycle { ignore_changes = [name] }
}

resource "crusoe_vpc_firewall_rule" "in" {
  for_each = local.allowed

  name              = "${module.hosts.names.own}-${substr(sha1(each.key), 0, 8)}"
  network           = crusoe_vpc_network.pool.id
  action            = "allow"
  direction         = "ingress"
  protocols         = each.value.protocol
  source            = each.value.source
  source_ports      = "1-65535"
  destination       = local.cidr
  destination_ports = each.value.ports

  lifecycle { ignore_changes = [name] }
}

# A type of the same family would be changed in place, for which a machine is stopped; whether it is in a partition too.
resource "terraform_data" "type" {
  input = var.rdma ? "${var.machine_types[0]} in a partition" : var.machine_types[0]
}

data "crusoe_ib_networks" "all" {
  count = var.rdma && var.ib_network_id == null ? 1 : 0
}

# The network that the pool was made in: what is free elsewhere later moves no node.
resource "terraform_data" "network" {
  count = var.rdma ? 1 : 0

  input            = var.ib_network_id == null ? local.network : var.ib_network_id
  triggers_replace = [var.region, var.machine_types[0], var.ib_network_id]

  lifecycle {
    ignore_changes = [input]

    precondition {
      condition     = can(regex("-ib\\.", var.machine_types[0]))
      error_message = "rdma: types that end in -ib are in an InfiniBand network (machine_types)."
    }

    postcondition {
      condition     = self.output != ""
      error_message = "rdma: no InfiniBand network of ${var.region} has machines of ${var.machine_types[0]}; crusoe networking ib-networks list shows where there are some. Declare another region, or leave rdma out."
    }
  }
}

resource "crusoe_ib_partition" "pool" {
  count = var.rdma ? 1 : 0

  name          = module.hosts.names.own
  ib_network_id = terraform_data.network[0].output

  lifecycle {
    ignore_changes       = [name]
    replace_triggered_by = [terraform_data.network]
  }
}

resource "crusoe_compute_instance" "node" {
  for_each = module.hosts.names.nodes

  name     = each.value
  type     = var.machine_types[0]
  image    = var.image
  location = var.region
  ssh_key  = trimspace(var.ssh_public_key)

  network_interfaces = [{
    subnet      = crusoe_vpc_subnet.pool.id
    public_ipv4 = { type = "static" }
  }]

  host_channel_adapters = var.rdma ? [{ ib_partition_id = crusoe_ib_partition.pool[0].id }] : null

  # Gives the machine its host key, at every start. Until it has run, the machine answers with another one, and is asked
  # again.
  startup_script = module.hosts.key_script[each.key]

  lifecycle {
    # A key that is changed is for machines that are made later. The provider compares its own words for an interface.
    ignore_changes       = [name, startup_script, ssh_key, network_interfaces]
    replace_triggered_by = [terraform_data.type, tls_private_key.host[each.key], crusoe_vpc_subnet.pool.id]
  }

  # Nothing reaches a machine that the rules do not let in.
  depends_on = [crusoe_vpc_firewall_rule.in]
}
