locals {
  names = [for index in range(var.node_count) : "${var.name}-${index}"]

  # Spot and fallback lists need a group that goes on trying; everything else is plain machines.
  grouped = length(var.machine_types) > 1 || coalesce(var.group, var.spot && var.node_count > 1)
  # Where the head starts the nodes, they are machines that stand ready.
  elastic     = var.min_nodes != null
  apart       = local.grouped || local.elastic
  group_nodes = local.grouped ? var.node_count : coalesce(var.min_nodes, 0)
  head        = local.apart ? "${var.name}-head" : local.names[0]
  machines    = concat(local.apart ? [local.head] : [], local.grouped ? [] : local.names)
  role        = local.grouped ? "head" : "nodes"
  images      = merge({ nodes = var.image }, local.apart ? { head = coalesce(var.head_image, var.image) } : {})

  roles = merge(
    {
      nodes = {
        type        = var.machine_types[0]
        disk_gb     = coalesce(var.disk_gb == 0 ? null : var.disk_gb, 50)
        model       = var.flex_start_seconds != null ? "FLEX_START" : var.reservation_bound ? "RESERVATION_BOUND" : var.spot ? "SPOT" : "STANDARD"
        flex        = var.flex_start_seconds
        reservation = var.reservation
        compact     = var.compact_placement
      }
    },
    local.apart ? { head = { type = var.head_machine_type, disk_gb = 50, model = "STANDARD", flex = null, reservation = null, compact = false } } : {},
  )
  types = {
    for type in concat(var.machine_types, values(local.roles)[*].type) : type => {
      machine = split("+", type)[0]
      gpus    = [for part in slice(split("+", type), 1, length(split("+", type))) : { type = split(":", part)[0], count = tonumber(split(":", part)[1]) }]
      disk    = can(regex("^(a3-ultra|a4|g4|c4|n4)", type)) ? "hyperdisk-balanced" : "pd-balanced"
      moves   = !can(regex("^(a|g)[2-9]|\\+", type))
    }...
  }
  of = {
    for role, each in local.roles : role => merge(each, local.types[each.type][0], {
      # Machines with GPUs, and those that Google may take back, are not moved to another host.
      stops = each.model != "STANDARD" || each.compact || !local.types[each.type][0].moves
    })
  }
  policies = google_compute_resource_policy.this[*].self_link
  machine = merge(local.of[local.role], {
    policies = local.of[local.role].compact ? local.policies : []
    direct   = [for index, subnetwork in google_compute_subnetwork.direct : { subnetwork = subnetwork.self_link, nic_type = index == 0 ? "GVNIC" : "MRDMA" }]
  })
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

module "google" {
  source        = "../google"
  kind          = "gcp"
  secret        = terraform_data.secret
  head          = local.head
  nodes         = local.machines
  group_nodes   = local.group_nodes
  elastic       = local.elastic ? { least = coalesce(var.min_nodes, 0), most = var.node_count } : null
  zone          = terraform_data.zone.output
  images        = local.images
  user_data_key = "user-data"
  machines      = merge({ (local.role) = local.machine }, { for role in local.elastic ? ["head"] : [] : role => merge(local.of[role], { policies = [], direct = [] }) })
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port
    subnetwork     = var.subnetwork, network_tags = var.network_tags, service_account = var.service_account, head_volume_gb = var.head_volume_gb, layout = var.layout, volumes = var.volumes
    buckets        = var.buckets
    starts_stopped = var.starts_stopped
  }
}

resource "google_compute_resource_policy" "this" {
  count = var.compact_placement ? 1 : 0

  name = module.google.prefix

  group_placement_policy {
    collocation = "COLLOCATED"
  }
}

# GPUDirect RDMA of A3 Ultra and A4: a second gVNIC, and an interface for each GPU in a network that is bound to the zone and lets in whatever is in it.
# https://docs.cloud.google.com/ai-hypercomputer/docs/create/create-vm, https://docs.cloud.google.com/vpc/docs/rdma-network-profiles
resource "google_compute_network" "direct" {
  for_each = toset(var.gpudirect ? ["host", "rdma"] : [])

  name                    = "${module.google.prefix}-${each.key}"
  auto_create_subnetworks = false
  mtu                     = 8896
  network_profile         = each.key == "rdma" ? "projects/${module.google.address.project}/global/networkProfiles/${terraform_data.zone.output}-vpc-roce" : null
}

resource "google_compute_subnetwork" "direct" {
  count = var.gpudirect ? 9 : 0

  name          = "${module.google.prefix}-${count.index == 0 ? "host" : "rdma-${count.index - 1}"}"
  network       = google_compute_network.direct[count.index == 0 ? "host" : "rdma"].id
  ip_cidr_range = cidrsubnet("10.85.0.0/16", 4, count.index)
}

resource "google_compute_firewall" "direct" {
  count = var.gpudirect ? 1 : 0

  name        = "${module.google.prefix}-host"
  network     = google_compute_network.direct["host"].id
  source_tags = module.google.tags
  target_tags = module.google.tags

  allow {
    protocol = "all"
  }
}
