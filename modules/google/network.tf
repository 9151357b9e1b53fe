# The network of the nodes. Without subnetwork they have a network of their own, which they leave by Cloud NAT.

locals {
  subnetwork = coalesce(var.pool.subnetwork, one(google_compute_subnetwork.this[*].self_link))
  network    = var.pool.subnetwork == null ? one(google_compute_network.this[*].self_link) : data.google_compute_subnetwork.given[0].network
  # What the place of the nodes is part of. In another one it has another name: it is made before the one that it replaces,
  # as everything that an instance template refers to, and Google has each name once.
  placed = {
    for each in ["head", "nodes", "shell"] : each => var.pool.subnetwork == null ? "${local.prefix}-${each}" : "${local.prefix}-${substr(each, 0, 1)}${substr(sha256(var.pool.subnetwork), 0, 4)}"
  }
}

data "google_compute_subnetwork" "given" {
  count = var.pool.subnetwork == null ? 0 : 1

  self_link = var.pool.subnetwork
}

resource "google_compute_network" "this" {
  count = var.pool.subnetwork == null ? 1 : 0

  name                    = local.prefix
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "this" {
  count = var.pool.subnetwork == null ? 1 : 0

  name                     = local.prefix
  network                  = google_compute_network.this[0].id
  ip_cidr_range            = "10.84.0.0/20"
  private_ip_google_access = true
}

resource "google_compute_router" "this" {
  count = var.pool.subnetwork == null ? 1 : 0

  name    = local.prefix
  network = google_compute_network.this[0].id
}

resource "google_compute_router_nat" "this" {
  count = var.pool.subnetwork == null ? 1 : 0

  name                               = local.prefix
  router                             = google_compute_router.this[0].name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

# Nothing else comes in. 35.235.240.0/20 is Identity-Aware Proxy: https://cloud.google.com/iap/docs/using-tcp-forwarding
resource "google_compute_firewall" "this" {
  for_each = { for who, rule in {
    nodes = { tags = [local.prefix], ranges = null, ports = null }
    head = {
      tags   = null
      ranges = length(var.pool.allow_cidrs) > 0 ? var.pool.allow_cidrs : ["35.235.240.0/20"]
      ports  = concat([tostring(var.pool.scheduler_port)], length(var.pool.allow_cidrs) > 0 && var.pool.ssh_public_key == "" ? [] : ["22"])
    }
    # Where no address of the head is open that leads on to the others.
    shell = { tags = null, ranges = ["35.235.240.0/20"], ports = ["22"] }
  } : who => rule if length(var.pool.network_tags) == 0 && (who != "shell" || length(var.pool.allow_cidrs) == 0) }

  name          = local.placed[each.key]
  network       = local.network
  source_tags   = each.value.tags
  source_ranges = each.value.ranges
  target_tags   = [each.key == "head" ? "${local.prefix}-head" : local.prefix]

  allow {
    protocol = each.value.ports == null ? "all" : "tcp"
    ports    = each.value.ports
  }

  lifecycle { ignore_changes = [name] }
}

# The head is found at the same address by nodes and clients when it is replaced.
resource "google_compute_address" "head" {
  name         = local.placed["head"]
  address_type = "INTERNAL"
  subnetwork   = local.subnetwork

  lifecycle { ignore_changes = [name] }
}

resource "google_compute_address" "public" {
  count = length(var.pool.allow_cidrs) > 0 ? 1 : 0

  name = "${local.prefix}-public"
}
