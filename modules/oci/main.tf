locals {
  shape = split("/", var.machine_types[0])
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

# The region that the pool was made in. In another one the provider finds nothing of it, and Terraform would forget machines
# that run: no plan is made there.
resource "terraform_data" "place" {
  input = var.region

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = self.input == var.region
      error_message = "region: the pool is in ${self.input}, and Terraform would not find it in ${var.region}, and forget machines that run. Destroy it in ${self.input} first, or give the one in ${var.region} another name."
    }
  }
}

module "hosts" {
  source  = "../hosts"
  kind    = "oci"
  secret  = terraform_data.secret
  account = var.compartment_id
  zone    = var.availability_domain
  ids     = { for node, instance in oci_core_instance.node : node => instance.id }
  machines = {
    for node, instance in oci_core_instance.node : node => { address = instance.public_ip, inside = instance.private_ip, user = var.ssh_user, key_file = var.key_file }
  }
  # A bare machine takes its time to boot.
  patience  = 1800
  host_keys = tls_private_key.host
  # The images close all ports but 22 in the machine itself. Here the network does that.
  cloud_config = jsonencode({
    runcmd = [["sh", "-c", "systemctl disable --now firewalld; iptables -P INPUT ACCEPT; iptables -F INPUT; iptables -F FORWARD; netfilter-persistent save; true"]]
  })
  # oracle/oci: display_name has at most 255 characters
  names = { limit = 63 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

resource "oci_core_vcn" "pool" {
  compartment_id = var.compartment_id
  cidr_blocks    = ["10.0.0.0/16"]
  display_name   = module.hosts.names.own
  freeform_tags  = var.labels

  lifecycle { ignore_changes = [display_name] }
}

resource "oci_core_internet_gateway" "pool" {
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.pool.id
  display_name   = module.hosts.names.own

  lifecycle { ignore_changes = [display_name] }
}

resource "oci_core_default_route_table" "pool" {
  manage_default_resource_id = oci_core_vcn.pool.default_route_table_id

  route_rules {
    destination       = "0.0.0.0/0"
    network_entity_id = oci_core_internet_gateway.pool.id
  }
}

# Without rules: the one that a network is made with lets everybody reach port 22.
resource "oci_core_default_security_list" "pool" {
  manage_default_resource_id = oci_core_vcn.pool.default_security_list_id
}

resource "oci_core_subnet" "pool" {
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.pool.id
  cidr_block     = "10.0.0.0/20"
  display_name   = module.hosts.names.own
  freeform_tags  = var.labels

  depends_on = [oci_core_default_security_list.pool, oci_core_default_route_table.pool]

  lifecycle { ignore_changes = [display_name] }
}

resource "oci_core_network_security_group" "pool" {
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.pool.id
  display_name   = module.hosts.names.own
  freeform_tags  = var.labels

  lifecycle { ignore_changes = [display_name] }
}

resource "oci_core_network_security_group_security_rule" "from_outside" {
  for_each = { for each in setproduct(var.allow_cidrs, ["22", tostring(var.scheduler_port)]) : join(" ", each) => each }

  network_security_group_id = oci_core_network_security_group.pool.id
  direction                 = "INGRESS"
  protocol                  = "6"
  source                    = each.value[0]
  source_type               = "CIDR_BLOCK"

  tcp_options {
    destination_port_range {
      min = tonumber(each.value[1])
      max = tonumber(each.value[1])
    }
  }
}

resource "oci_core_network_security_group_security_rule" "among_themselves" {
  network_security_group_id = oci_core_network_security_group.pool.id
  direction                 = "INGRESS"
  protocol                  = "all"
  source                    = oci_core_network_security_group.pool.id
  source_type               = "NETWORK_SECURITY_GROUP"
}

resource "oci_core_network_security_group_security_rule" "to_outside" {
  network_security_group_id = oci_core_network_security_group.pool.id
  direction                 = "EGRESS"
  protocol                  = "all"
  destination               = "0.0.0.0/0"
  destination_type          = "CIDR_BLOCK"
}

# What would be changed in place, for which a machine is restarted.
resource "terraform_data" "machine" {
  input = concat([var.machine_types[0], var.image, var.disk_gb, var.spot], var.rdma ? ["rdma"] : [])
}

# The nodes join its network when they are made. A cluster network would make them itself, as an instance pool, whose machines
# have no names and no user data of their own.
resource "oci_core_compute_cluster" "pool" {
  count = var.rdma ? 1 : 0

  compartment_id      = var.compartment_id
  availability_domain = var.availability_domain
  display_name        = module.hosts.names.own
  freeform_tags       = var.labels

  lifecycle {
    ignore_changes = [display_name]

    precondition {
      condition     = can(regex("^BM\\.", var.machine_types[0]))
      error_message = "rdma: bare machines alone join a compute cluster (machine_types)."
    }
  }
}

resource "oci_core_instance" "node" {
  for_each = module.hosts.names.nodes

  compartment_id      = var.compartment_id
  availability_domain = var.availability_domain
  display_name        = each.value
  shape               = local.shape[0]
  freeform_tags       = var.labels
  metadata = {
    ssh_authorized_keys = trimspace(var.ssh_public_key)
    user_data           = base64encode(module.hosts.cloud_config[each.key])
  }
  preserve_boot_volume = false

  compute_cluster_id = var.rdma ? oci_core_compute_cluster.pool[0].id : null

  # What lets a machine into the network, and gives its interfaces their addresses.
  dynamic "agent_config" {
    for_each = var.rdma ? [true] : []
    content {
      dynamic "plugins_config" {
        for_each = ["Compute HPC RDMA Authentication", "Compute HPC RDMA Auto-Configuration"]
        content {
          name          = plugins_config.value
          desired_state = "ENABLED"
        }
      }
    }
  }

  # Of a shape that has sizes: SHAPE/OCPUS/GB.
  dynamic "shape_config" {
    for_each = length(local.shape) == 3 ? [local.shape] : []
    content {
      ocpus         = tonumber(shape_config.value[1])
      memory_in_gbs = tonumber(shape_config.value[2])
    }
  }

  source_details {
    source_type             = "image"
    source_id               = var.image
    boot_volume_size_in_gbs = tostring(var.disk_gb == 0 ? 100 : var.disk_gb)
  }

  create_vnic_details {
    subnet_id        = oci_core_subnet.pool.id
    assign_public_ip = "true"
    nsg_ids          = [oci_core_network_security_group.pool.id]
  }

  dynamic "preemptible_instance_config" {
    for_each = var.spot ? [true] : []
    content {
      preemption_action {
        type                 = "TERMINATE"
        preserve_boot_volume = false
      }
    }
  }

  lifecycle {
    # A key that is changed is for machines that are made later.
    ignore_changes       = [display_name, metadata]
    replace_triggered_by = [terraform_data.machine, tls_private_key.host[each.key]]
  }
}
