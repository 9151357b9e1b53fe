locals {
  head = "${var.name}-head"

  # Names are unique in a project: two fleets of one name differ in the last part.
  suffix = substr(terraform_data.fleet.id, 0, 6)
  prefix = "skyinfra-${var.name}-${local.suffix}"
  labels = merge(var.labels, { skyinfra-stack = lower(substr(var.stack, 0, 63)), skyinfra-pool = var.name })
  tags   = length(var.network_tags) > 0 ? var.network_tags : [local.prefix]
  zone   = terraform_data.zone.output
}

# Which fleet something is of. It outlives the secret.
resource "terraform_data" "fleet" {
  lifecycle {
    precondition {
      condition     = var.user_data_worker != ""
      error_message = "user_data_worker: needed, for the slices are nodes besides the head."
    }

    precondition {
      condition     = var.hosts == 1 || var.node_count == 1
      error_message = "node_count: a slice of ${var.hosts} hosts is a fleet of its own. Call the module once for each."
    }

    precondition {
      condition     = var.versions != null || !can(regex("@SKYINFRA_BUCKET@/versions", "${var.user_data_head}${var.user_data_worker}"))
      error_message = "versions: the user data ask for versions.json. Give versions and runner_file as `skyinfra render` wrote them."
    }

    precondition {
      condition     = local.carried_bytes + max(length(var.user_data_head), length(var.user_data_worker)) <= 500000
      error_message = "runner_file: ${local.carried_bytes} bytes in base64, and the metadata of a machine take 512 KB with its user data. Give the compressed runner (.whl.bz2), as `skyinfra render` writes it."
    }
  }
}

resource "terraform_data" "zone" {
  input = var.zones[0]

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = contains(var.zones, self.input)
      error_message = "zones: the nodes stand in ${self.input}, which is not among ${join(", ", var.zones)}. Name it too, or move the nodes, which ends what runs on them: -replace=module.NAME.terraform_data.zone."
    }
  }
}

# The head keeps the image that it was made with until `head_image` itself changes.
data "google_compute_image" "family" {
  count = can(regex("/family/", var.head_image)) ? 1 : 0

  project = split("/", var.head_image)[1]
  family  = split("/", var.head_image)[5]
}

resource "terraform_data" "image" {
  input            = try(data.google_compute_image.family[0].self_link, var.head_image)
  triggers_replace = var.head_image

  lifecycle {
    ignore_changes = [input]
  }
}

# What a node is replaced for, besides what Google Cloud cannot change on it.
resource "terraform_data" "declared" {
  for_each = toset(["head", "slice"])

  triggers_replace = [
    coalesce(var.user_data_revision, sha256(each.key == "head" ? var.user_data_head : var.user_data_worker)),
    each.key == "head" ? "${terraform_data.image.id}/${google_compute_disk.head.id}/${var.head_machine_type}/${coalesce(var.service_account, "-")}" : "",
    terraform_data.secret.id,
    google_compute_address.head.address,
    # It stands in what a node was made from: where the head listens, and where the others look for it.
    var.scheduler_port,
  ]
}

# What outlives a head that is replaced: its jobs.
resource "google_compute_disk" "head" {
  name   = "${local.prefix}-jobs"
  zone   = local.zone
  type   = "pd-balanced"
  size   = var.head_volume_gb
  labels = local.labels
}

resource "google_compute_instance" "head" {
  name         = "${local.head}-${local.suffix}"
  machine_type = var.head_machine_type
  zone         = local.zone
  labels       = merge(local.labels, { skyinfra-node = local.head })
  tags         = concat(local.tags, length(var.network_tags) == 0 ? ["${local.prefix}-head"] : [])

  metadata = merge(local.delivered, { startup-script = replace(local.user_data_head, "@SKYINFRA_NODE@", local.head) })

  boot_disk {
    initialize_params {
      image  = terraform_data.image.output
      size   = 50
      type   = "pd-balanced"
      labels = local.labels
    }
  }

  attached_disk {
    source      = google_compute_disk.head.self_link
    device_name = "skyinfra-head"
  }

  network_interface {
    subnetwork = local.subnetwork
    network_ip = google_compute_address.head.address

    dynamic "access_config" {
      for_each = google_compute_address.public[*].address

      content {
        nat_ip = access_config.value
      }
    }
  }

  dynamic "service_account" {
    for_each = var.service_account[*]

    content {
      email  = service_account.value
      scopes = ["cloud-platform"]
    }
  }

  lifecycle {
    # Labels of a disk would replace its machine.
    ignore_changes       = [metadata["startup-script"], boot_disk[0].initialize_params[0].labels]
    replace_triggered_by = [terraform_data.declared["head"]]
  }

  # Its first boot fetches packages, so the way to them is there before it is.
  depends_on = [google_compute_router_nat.this, google_compute_firewall.this]
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
    replace_triggered_by = [terraform_data.declared["slice"]]
  }

  depends_on = [google_compute_router_nat.this, google_compute_firewall.this]
}
