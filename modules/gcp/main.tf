locals {
  # Spot and fallback lists need a group that goes on trying; everything else is plain machines.
  grouped = length(var.machine_types) > 1 || coalesce(var.group, var.spot && var.node_count > 1)
  head    = local.grouped ? "${var.name}-head" : local.names[0]
  # The machines that Terraform itself makes.
  machines = local.grouped ? [local.head] : local.names
  role     = local.grouped ? "head" : "nodes"

  # Names are unique in a project: two fleets of one name differ in the last part.
  suffix = substr(terraform_data.fleet.id, 0, 6)
  prefix = "skyinfra-${var.name}-${local.suffix}"
  labels = merge(var.labels, { skyinfra-stack = lower(substr(var.stack, 0, 63)), skyinfra-pool = var.name })
  tags   = length(var.network_tags) > 0 ? var.network_tags : [local.prefix]

  roles = merge(
    { nodes = { type = var.machine_types[0], image = var.image, disk_gb = coalesce(var.disk_gb == 0 ? null : var.disk_gb, 50), spot = var.spot, flex = var.flex_start_seconds, reservation = var.reservation, policies = google_compute_resource_policy.this[*].self_link } },
    local.grouped ? { head = { type = var.head_machine_type, image = coalesce(var.head_image, var.image), disk_gb = 50, spot = false, flex = null, reservation = null, policies = [] } } : {},
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
      stops = each.spot || each.flex != null || length(each.policies) > 0 || !local.types[each.type][0].moves
      model = each.flex != null ? "FLEX_START" : each.spot ? "SPOT" : "STANDARD"
    })
  }
}

# Which fleet something is of. It outlives the secret.
resource "terraform_data" "fleet" {
  lifecycle {
    precondition {
      condition     = (!local.grouped && var.node_count == 1) || var.user_data_worker != ""
      error_message = "user_data_worker: needed, for this pool has nodes besides its head."
    }

    precondition {
      condition     = var.versions != null || !can(regex("@SKYINFRA_BUCKET@/versions", "${var.user_data_head}${var.user_data_worker}"))
      error_message = "versions: the user data ask for versions.json. Give versions and runner_file as `skyinfra render` wrote them."
    }

    precondition {
      condition     = length(var.machine_types) == 1 || !can(regex("\\+", join(" ", var.machine_types)))
      error_message = "machine_types: a machine type with GPUs that are added to it stands alone."
    }

    precondition {
      condition     = length([for one in [var.spot, var.flex_start_seconds != null, var.reservation != null] : one if one]) <= 1
      error_message = "spot: a node is a spot machine, or comes by flex_start_seconds, or out of a reservation. Leave the others out."
    }

    precondition {
      condition     = !local.grouped || var.flex_start_seconds == null
      error_message = "flex_start_seconds: for machines of one type, which are no group."
    }

    precondition {
      condition     = local.carried_bytes + max(length(var.user_data_head), length(var.user_data_worker)) <= 500000
      error_message = "runner_file: ${local.carried_bytes} bytes in base64, and the metadata of a machine take 512 KB with its user data. Give the compressed runner (.whl.bz2), as `skyinfra render` writes it."
    }
  }
}

# A node keeps the image that it was made with until `image` itself changes.
data "google_compute_image" "family" {
  for_each = { for role, each in local.roles : role => split("/", each.image) if can(regex("/family/", each.image)) }

  project = each.value[1]
  family  = each.value[5]
}

resource "terraform_data" "image" {
  for_each = toset(keys(local.roles))

  input            = try(data.google_compute_image.family[each.key].self_link, local.roles[each.key].image)
  triggers_replace = local.roles[each.key].image

  lifecycle {
    ignore_changes = [input]
  }
}

# What a node is replaced for, besides what Google Cloud cannot change on a machine. Its user data are not among it: they
# carry the layout the node begins with, and a changed layout reaches running nodes in place.
resource "terraform_data" "declared" {
  for_each = toset(concat(local.machines, local.grouped ? ["group"] : []))

  triggers_replace = [
    coalesce(var.user_data_revision, sha256(each.key == local.head ? var.user_data_head : var.user_data_worker)),
    terraform_data.image[each.key == "group" ? "nodes" : local.role].id,
    terraform_data.secret.id,
    google_compute_address.head.address,
    each.key == local.head ? google_compute_disk.head.id : "",
    # It stands in what a node was made from: where the head listens, and where the others look for it.
    var.scheduler_port,
    # A group gives these to the nodes that it makes from then on.
    each.key == "group" ? "" : jsonencode([local.of[local.role].type, local.of[local.role].model, local.of[local.role].reservation, var.flex_start_seconds, var.compact_placement, var.service_account]),
  ]
}

# What outlives a head that is replaced: its jobs.
resource "google_compute_disk" "head" {
  name   = "${local.prefix}-jobs"
  zone   = terraform_data.zone.output
  type   = local.of[local.role].disk
  size   = var.head_volume_gb
  labels = local.labels

  lifecycle {
    # A head of another family may take another kind of disk, which would be one without the jobs.
    ignore_changes = [type]
  }
}

resource "google_compute_resource_policy" "this" {
  count = var.compact_placement ? 1 : 0

  name = local.prefix

  group_placement_policy {
    collocation = "COLLOCATED"
  }
}

resource "google_compute_instance" "node" {
  for_each = toset(local.machines)

  name              = "${each.key}-${local.suffix}"
  machine_type      = local.of[local.role].machine
  zone              = terraform_data.zone.output
  labels            = merge(local.labels, { skyinfra-node = each.key })
  tags              = concat(local.tags, each.key == local.head && length(var.network_tags) == 0 ? ["${local.prefix}-head"] : [])
  resource_policies = local.of[local.role].policies

  metadata = merge(
    local.delivered,
    { user-data = replace(each.key == local.head ? local.user_data_head : local.user_data_worker, "@SKYINFRA_NODE@", each.key) },
    each.key == local.head && var.layout != "" ? { skyinfra-layout = var.layout } : {},
  )

  boot_disk {
    initialize_params {
      image  = terraform_data.image[local.role].output
      size   = local.of[local.role].disk_gb
      type   = local.of[local.role].disk
      labels = local.labels
    }
  }

  dynamic "attached_disk" {
    for_each = each.key == local.head ? [google_compute_disk.head.self_link] : []

    content {
      source      = attached_disk.value
      device_name = "skyinfra-head"
    }
  }

  network_interface {
    subnetwork = local.subnetwork
    network_ip = each.key == local.head ? google_compute_address.head.address : null
    nic_type   = "GVNIC"

    dynamic "access_config" {
      for_each = each.key == local.head ? google_compute_address.public[*].address : []

      content {
        nat_ip = access_config.value
      }
    }
  }

  dynamic "guest_accelerator" {
    for_each = local.of[local.role].gpus

    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }

  scheduling {
    provisioning_model          = local.of[local.role].model
    preemptible                 = local.of[local.role].spot
    automatic_restart           = local.of[local.role].model == "STANDARD"
    on_host_maintenance         = local.of[local.role].stops ? "TERMINATE" : "MIGRATE"
    instance_termination_action = local.of[local.role].model == "STANDARD" ? null : "DELETE"

    dynamic "max_run_duration" {
      for_each = local.of[local.role].flex[*]

      content {
        seconds = max_run_duration.value
      }
    }
  }

  dynamic "reservation_affinity" {
    for_each = local.of[local.role].flex != null ? ["NO_RESERVATION"] : local.of[local.role].reservation != null ? ["SPECIFIC_RESERVATION"] : []

    content {
      type = reservation_affinity.value

      dynamic "specific_reservation" {
        for_each = local.of[local.role].reservation[*]

        content {
          key    = "compute.googleapis.com/reservation-name"
          values = [specific_reservation.value]
        }
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

  timeouts {
    create = var.flex_start_seconds == null ? "20m" : "150m"
  }

  lifecycle {
    # The disks that a machine type brings are no part of what is declared; labels of a disk would replace its machine.
    ignore_changes       = [metadata["user-data"], scratch_disk, boot_disk[0].initialize_params[0].labels]
    replace_triggered_by = [terraform_data.declared[each.key]]
  }

  # Its first boot fetches packages, so the way to them is there before it is.
  depends_on = [google_compute_router_nat.this, google_compute_firewall.this]
}
