locals {
  kind        = "gcptpu"
  head        = "${var.name}-head"
  zone        = terraform_data.zone.output
  group_nodes = var.node_count * var.hosts

  # What google_machines.tf makes: the head alone.
  machines      = [local.head]
  role          = "head"
  images        = { head = var.head_image }
  user_data_key = "startup-script"
  machine = {
    type        = var.head_machine_type
    machine     = var.head_machine_type
    gpus        = []
    disk        = "pd-balanced"
    disk_gb     = 50
    model       = "STANDARD"
    stops       = false
    flex        = null
    reservation = null
    policies    = []
    compact     = false
    direct      = []
  }
}

resource "terraform_data" "zone" {
  input = var.zones[0]

  lifecycle {
    ignore_changes = [input]

    precondition {
      condition     = var.hosts == 1 || var.node_count == 1
      error_message = "node_count: a slice of ${var.hosts} hosts is a fleet of its own. Call the module once for each."
    }

    postcondition {
      condition     = contains(var.zones, self.input)
      error_message = "zones: the nodes stand in ${self.input}, which is not among ${join(", ", var.zones)}. Name it too, or move the nodes, which ends what runs on them: -replace=module.NAME.terraform_data.zone."
    }
  }
}

# What a slice is replaced for, besides what Google Cloud cannot change on it.
resource "terraform_data" "slices" {
  triggers_replace = [
    coalesce(var.user_data_revision, sha256(var.user_data_worker)),
    terraform_data.secret.id,
    google_compute_address.head.address,
    # It stands in what a node was made from: where the head listens, and where the others look for it.
    var.scheduler_port,
  ]
}

resource "google_tpu_v2_vm" "slice" {
  provider = google-beta
  for_each = toset(local.names)

  name             = "${each.key}-${local.suffix}"
  zone             = local.zone
  accelerator_type = var.machine_types[0]
  runtime_version  = var.image
  labels           = merge(local.labels, { skyinfra-node = each.key })
  tags             = local.tags

  metadata = merge(local.delivered, { startup-script = replace(local.user_data_worker, "@SKYINFRA_NODE@", each.key) })

  network_config {
    network             = local.network
    subnetwork          = local.subnetwork
    enable_external_ips = false
  }

  scheduling_config {
    spot = var.spot
  }

  dynamic "service_account" {
    for_each = var.service_account[*]

    content {
      email = service_account.value
      scope = ["https://www.googleapis.com/auth/cloud-platform"]
    }
  }

  lifecycle {
    ignore_changes       = [metadata["startup-script"]]
    replace_triggered_by = [terraform_data.slices]
  }

  depends_on = [google_compute_router_nat.this, google_compute_firewall.this]
}
