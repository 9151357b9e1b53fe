locals {
  # Addresses come with the length of their prefix. A machine that has stopped has none.
  addresses = {
    for node, instance in nebius_compute_v1_instance.node : node => {
      private = try(split("/", instance.status.network_interfaces[0].ip_address.address)[0], null)
      public  = try(split("/", instance.status.network_interfaces[0].public_ip_address.address)[0], null)
    }
  }
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
  source    = "../hosts"
  kind      = "nebius"
  secret    = terraform_data.secret
  account   = var.project_id
  zone      = var.region
  ids       = { for node, instance in nebius_compute_v1_instance.node : node => instance.id }
  machines  = { for node, address in local.addresses : node => { address = address.public, inside = address.private, user = "ubuntu", key_file = var.key_file } }
  host_keys = tls_private_key.host
  # The images have no user that one could log in as.
  cloud_config = jsonencode({
    users = [{
      name                = "ubuntu"
      shell               = "/bin/bash"
      sudo                = "ALL=(ALL) NOPASSWD:ALL"
      ssh_authorized_keys = [trimspace(var.ssh_public_key)]
    }]
  })
  # dstackai/dstack 511c318c nebius/resources.py: MAX_RESOURCE_NAME_LEN = 63, ^[a-z][_\-a-z0-9]{0,62}$
  names = { limit = 63, reserve = 8 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds, volumes = var.volumes
  }
}

data "nebius_vpc_v1_subnet" "pool" {
  id = var.subnet_id
}

resource "nebius_vpc_v1_security_group" "pool" {
  parent_id  = var.project_id
  name       = module.hosts.names.own
  network_id = data.nebius_vpc_v1_subnet.pool.network_id
  labels     = var.labels

  lifecycle { ignore_changes = [name] }
}

# A rule has at most 8 networks.
resource "nebius_vpc_v1_security_rule" "from_outside" {
  for_each = { for number, cidrs in chunklist(var.allow_cidrs, 8) : number => cidrs }

  parent_id = nebius_vpc_v1_security_group.pool.id
  name      = "${module.hosts.names.own}-in-${each.key}"
  access    = "ALLOW"
  protocol  = "TCP"
  ingress   = { source_cidrs = each.value, destination_ports = [22, var.scheduler_port] }

  lifecycle { ignore_changes = [name] }
}

resource "nebius_vpc_v1_security_rule" "among_themselves" {
  parent_id = nebius_vpc_v1_security_group.pool.id
  name      = "${module.hosts.names.own}-nodes"
  access    = "ALLOW"
  protocol  = "ANY"
  ingress   = { source_security_group_id = nebius_vpc_v1_security_group.pool.id }

  lifecycle { ignore_changes = [name] }
}

resource "nebius_vpc_v1_security_rule" "to_outside" {
  parent_id = nebius_vpc_v1_security_group.pool.id
  name      = "${module.hosts.names.own}-out"
  access    = "ALLOW"
  protocol  = "ANY"
  egress    = { destination_cidrs = ["0.0.0.0/0"] }

  lifecycle { ignore_changes = [name] }
}

# What the provider would change in place, or try to: a machine that is stopped for it, or refused.
resource "terraform_data" "machine" {
  # A running machine has the filesystems mounted that it was made with.
  input = concat([var.project_id, var.subnet_id, var.region, var.machine_types[0], var.image, var.disk_gb, var.spot], var.volumes[*].id)
}

# The nodes join it when they are made, and in no other way.
resource "nebius_compute_v1_gpu_cluster" "pool" {
  count = var.infiniband_fabric == null ? 0 : 1

  parent_id         = var.project_id
  name              = module.hosts.names.own
  infiniband_fabric = var.infiniband_fabric
  labels            = var.labels

  lifecycle {
    ignore_changes = [name, labels]

    precondition {
      condition     = can(regex("/8gpu-", var.machine_types[0]))
      error_message = "infiniband_fabric: a GPU cluster takes machines with 8 GPUs alone (machine_types)."
    }
  }
}

resource "nebius_compute_v1_instance" "node" {
  for_each = module.hosts.names.nodes

  parent_id = var.project_id
  name      = each.value
  hostname  = each.key
  labels    = var.labels

  resources = {
    platform = split("/", var.machine_types[0])[0]
    preset   = split("/", var.machine_types[0])[1]
  }

  # Those that outlive the fleet, which nodes mount by their tags.
  filesystems = length(var.volumes) == 0 ? null : [
    for index, volume in var.volumes : {
      attach_mode         = "READ_WRITE"
      mount_tag           = "skyinfra-${index}"
      existing_filesystem = { id = volume.id }
    }
  ]

  # A disk that goes with the machine.
  boot_disk = {
    attach_mode = "READ_WRITE"
    managed_disk = {
      name = each.value
      spec = {
        type                = "NETWORK_SSD"
        size_gibibytes      = var.disk_gb == 0 ? 100 : var.disk_gb
        source_image_family = { image_family = var.image }
      }
    }
  }

  network_interfaces = [{
    name              = "eth0"
    subnet_id         = var.subnet_id
    ip_address        = {}
    public_ip_address = {}
    security_groups   = [{ id = nebius_vpc_v1_security_group.pool.id }]
  }]

  gpu_cluster = var.infiniband_fabric == null ? null : { id = nebius_compute_v1_gpu_cluster.pool[0].id }

  # One that is taken back is stopped, and not started again by Nebius.
  preemptible          = var.spot ? { on_preemption = "STOP" } : null
  recovery_policy      = var.spot ? "FAIL" : "RECOVER"
  cloud_init_user_data = module.hosts.cloud_config[each.key]

  lifecycle {
    # A key and labels that are changed are for machines that are made later.
    ignore_changes       = [name, boot_disk.managed_disk.name, cloud_init_user_data, labels]
    replace_triggered_by = [terraform_data.machine, tls_private_key.host[each.key]]

    postcondition {
      condition     = try(self.status.state, null) != "STOPPED"
      error_message = "${each.key} has stopped. Start it, or have another one made: -replace='module.NAME.nebius_compute_v1_instance.node[\"${each.key}\"]'. Nebius starts no preemptible machine again that it took back."
    }
  }
}
