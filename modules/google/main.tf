# Machines of Compute Engine that Terraform makes one by one, the disk of the head, and the manifest. Project, region and
# credentials are those of the provider that the caller passes.

module "core" {
  source     = "../core"
  head_apart = var.group_nodes > 0 || var.elastic != null
  pool       = var.pool
  secret     = var.secret
  places     = local.places
  volume     = google_compute_disk.head.name
  limit      = { bytes = 262144, gzip = false, called = "Compute Engine" }
}

locals {
  # Names are unique in a project: two fleets of one name differ in the last part.
  suffix = substr(terraform_data.fleet.id, 0, 6)
  prefix = "skyinfra-${var.pool.name}-${local.suffix}"
  labels = merge(var.pool.labels, { skyinfra-stack = lower(substr(var.pool.stack, 0, 63)), skyinfra-pool = var.pool.name })
  tags   = length(var.pool.network_tags) > 0 ? var.pool.network_tags : [local.prefix]

  role     = { for node in var.nodes : node => node == var.head && contains(keys(var.machines), "head") ? "head" : "nodes" }
  machines = { for node, role in local.role : node => var.machines[role] }
  # Those that the head starts, by the paths of Compute Engine.
  ready = var.elastic == null ? {} : { for node in var.nodes : node => "projects/${google_compute_address.head.project}/zones/${var.zone}/instances/${node}-${local.suffix}" if node != var.head }
  # The account of each machine: the caller's, or the module's own. That of the head may start the others.
  account  = var.pool.service_account != null ? [var.pool.service_account] : google_service_account.nodes[*].email
  accounts = { for node in var.nodes : node => var.elastic != null && node == var.head && var.pool.service_account == null ? google_service_account.head[*].email : local.account }
  # What the module's own may do with buckets.
  own = merge({ for account in google_service_account.head : "head" => account.email }, { for account in google_service_account.nodes : "nodes" => account.email })
  grants = merge([for role, email in local.own : {
    for each in distinct(var.pool.buckets) : "${role} ${each.write ? "writes" : "reads"} ${each.bucket}/${each.prefix}" => merge(each, { email = email })
  }]...)
}

# Which fleet something is of. It outlives the secret.
resource "terraform_data" "fleet" {
  lifecycle {
    precondition {
      condition     = length(var.pool.volumes) == 0 || (var.group_nodes == 0 && var.elastic == null && var.pool.node_count == 1)
      error_message = "volumes: a disk is attached to one node. Take node_count = 1 and one machine type, and no group."
    }

    precondition {
      condition     = alltrue([for volume in var.pool.volumes : can(regex("/zones/${var.zone}/", volume.id))])
      error_message = "volumes: ${join(", ", [for volume in var.pool.volumes : "${volume.name} (${volume.id})" if !can(regex("/zones/${var.zone}/", volume.id))])} is not in ${var.zone}, where the node is. Name its zone in zones, or take a volume there: a snapshot of it makes one."
    }

    precondition {
      # All of 512 KiB, of which 4 are for the secret, the versions and the keys.
      # https://cloud.google.com/compute/docs/reference/rest/v1/Metadata
      condition     = local.carried_bytes + max(length(var.pool.user_data_head), length(var.pool.user_data_worker)) <= 520192
      error_message = "runner_file: ${local.carried_bytes} bytes in base64, and the metadata of a machine take 512 KB with its user data. Give the compressed runner (.whl.bz2), as `skyinfra render` writes it."
    }
  }
}

# A node keeps the image that it was made with until the input itself changes.
data "google_compute_image" "family" {
  for_each = { for role, image in var.images : role => split("/", image) if can(regex("/family/", image)) }

  project = each.value[1]
  family  = each.value[5]
}

resource "terraform_data" "image" {
  for_each = var.images

  input            = try(data.google_compute_image.family[each.key].self_link, each.value)
  triggers_replace = each.value

  lifecycle { ignore_changes = [input] }
}

# What a machine is replaced for, besides what Google Cloud cannot change on one. Its user data are not among it: they
# carry the layout the node begins with, and a changed layout reaches running nodes in place.
resource "terraform_data" "declared" {
  for_each = toset(var.nodes)

  triggers_replace = concat([
    coalesce(var.pool.user_data_revision, sha256(each.key == var.head ? var.pool.user_data_head : var.pool.user_data_worker)),
    terraform_data.image[local.role[each.key]].id,
    var.secret.id,
    google_compute_address.head.address,
    each.key == var.head ? google_compute_disk.head.id : "",
    # It stands in what a node was made from: where the head listens, and where the others look for it.
    var.pool.scheduler_port,
    jsonencode([local.machines[each.key].type, local.machines[each.key].model, local.machines[each.key].flex, local.machines[each.key].reservation, local.machines[each.key].compact, var.pool.service_account != null || length(var.pool.buckets) == 0 ? var.pool.service_account : "own"]),
  ], each.key == var.head ? var.pool.volumes[*].id : [])
}

# What outlives a head that is replaced: its jobs.
resource "google_compute_disk" "head" {
  name   = "${local.prefix}-jobs"
  zone   = var.zone
  type   = local.machines[var.head].disk
  size   = var.pool.head_volume_gb
  labels = local.labels

  lifecycle {
    # A head of another family may take another kind of disk, which would be one without the jobs.
    ignore_changes = [type]
  }
}

resource "google_compute_instance" "node" {
  for_each = toset(var.nodes)

  name              = "${each.key}-${local.suffix}"
  machine_type      = local.machines[each.key].machine
  zone              = var.zone
  labels            = merge(local.labels, { skyinfra-node = each.key })
  tags              = concat(local.tags, each.key == var.head && length(var.pool.network_tags) == 0 ? ["${local.prefix}-head"] : [])
  resource_policies = local.machines[each.key].policies
  # Without it Terraform plans nothing for a machine that has stopped.
  desired_status = var.pool.starts_stopped && !contains(keys(local.ready), each.key) ? "RUNNING" : null

  metadata = merge(
    local.delivered,
    { (var.user_data_key) = replace(each.key == var.head ? module.core.user_data_head : module.core.user_data_worker, "@SKYINFRA_NODE@", each.key) },
    each.key == var.head && var.pool.layout != "" ? { skyinfra-layout = var.pool.layout } : {},
    # A change reaches the head while it runs.
    each.key == var.head && var.elastic != null ? { skyinfra-group = jsonencode(merge(var.elastic, { machines = local.ready })) } : {},
  )

  boot_disk {
    initialize_params {
      image  = terraform_data.image[local.role[each.key]].output
      size   = local.machines[each.key].disk_gb
      type   = local.machines[each.key].disk
      labels = local.labels
    }
  }

  dynamic "attached_disk" {
    for_each = each.key == var.head ? [google_compute_disk.head.self_link] : []

    content {
      source      = attached_disk.value
      device_name = "skyinfra-head"
    }
  }

  # Those that outlive the fleet. A machine that ends has written all of it before they are detached.
  dynamic "attached_disk" {
    for_each = each.key == var.head ? var.pool.volumes[*].id : []

    content {
      source      = attached_disk.value
      device_name = "skyinfra-${attached_disk.key}"
    }
  }

  network_interface {
    subnetwork = local.subnetwork
    network_ip = each.key == var.head ? google_compute_address.head.address : null
    nic_type   = "GVNIC"

    dynamic "access_config" {
      for_each = each.key == var.head ? google_compute_address.public[*].address : []

      content {
        nat_ip = access_config.value
      }
    }
  }

  dynamic "network_interface" {
    for_each = local.machines[each.key].direct

    content {
      subnetwork = network_interface.value.subnetwork
      nic_type   = network_interface.value.nic_type
    }
  }

  dynamic "guest_accelerator" {
    for_each = local.machines[each.key].gpus

    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }

  scheduling {
    provisioning_model          = local.machines[each.key].model
    preemptible                 = local.machines[each.key].model == "SPOT"
    automatic_restart           = contains(["STANDARD", "RESERVATION_BOUND"], local.machines[each.key].model)
    on_host_maintenance         = local.machines[each.key].stops ? "TERMINATE" : "MIGRATE"
    instance_termination_action = local.machines[each.key].model == "STANDARD" ? null : "DELETE"

    dynamic "max_run_duration" {
      for_each = local.machines[each.key].flex[*]

      content {
        seconds = max_run_duration.value
      }
    }
  }

  dynamic "reservation_affinity" {
    for_each = local.machines[each.key].flex != null ? ["NO_RESERVATION"] : local.machines[each.key].reservation != null ? ["SPECIFIC_RESERVATION"] : []

    content {
      type = reservation_affinity.value

      dynamic "specific_reservation" {
        for_each = local.machines[each.key].reservation[*]

        content {
          key    = "compute.googleapis.com/reservation-name"
          values = [specific_reservation.value]
        }
      }
    }
  }

  dynamic "service_account" {
    for_each = local.accounts[each.key]

    content {
      email  = service_account.value
      scopes = ["cloud-platform"]
    }
  }

  timeouts { create = local.machines[each.key].flex == null ? "20m" : "150m" }

  lifecycle {
    # The disks that a machine type brings are no part of what is declared; labels of a disk would replace its machine.
    ignore_changes       = [metadata["user-data"], metadata["startup-script"], scratch_disk, boot_disk[0].initialize_params[0].labels]
    replace_triggered_by = [terraform_data.declared[each.key]]
  }

  # Its first boot fetches packages, so the way to them is there before it is.
  depends_on = [google_compute_router_nat.this, google_compute_firewall.this, google_storage_bucket_iam_member.mounted]
}

# The account of nodes that mount buckets, and what it may do with them: below the prefix, and to list, which is asked of
# the bucket itself: no condition limits a list to a prefix (https://github.com/lanes-sh/link/pull/100, read 2026-11-27).
resource "google_service_account" "nodes" {
  count = length(var.pool.buckets) > 0 && var.pool.service_account == null ? 1 : 0

  account_id = "skyinfra-${substr(var.pool.name, 0, 12)}-n-${local.suffix}"
  # IAM takes 100 bytes (https://github.com/terraform-google-modules/terraform-google-sql-db/issues/733, read 2026-11-28).
  display_name = substr("Nodes of ${var.pool.stack}/${var.pool.name}", 0, 100)
}

resource "google_storage_bucket_iam_member" "mounted" {
  for_each = local.grants

  bucket = each.value.bucket
  role   = each.value.write ? "roles/storage.objectUser" : "roles/storage.objectViewer"
  member = "serviceAccount:${each.value.email}"

  dynamic "condition" {
    for_each = each.value.prefix == "" ? [] : ["${each.value.prefix}/"]

    content {
      title      = "Below its prefix"
      expression = "resource.name == 'projects/_/buckets/${each.value.bucket}' || resource.name.startsWith('projects/_/buckets/${each.value.bucket}/objects/${condition.value}')"
    }
  }
}

# The account of a head that starts machines, and the one permission for that, on each of them.
resource "google_service_account" "head" {
  count = var.elastic != null && var.pool.service_account == null ? 1 : 0

  account_id   = "skyinfra-${substr(var.pool.name, 0, 14)}-${local.suffix}"
  display_name = substr("Head of ${var.pool.stack}/${var.pool.name}", 0, 100)
}

resource "google_project_iam_custom_role" "start" {
  count = var.elastic != null ? 1 : 0

  role_id     = replace("${local.prefix}-start", "-", "_")
  title       = substr("Starts nodes of ${var.pool.stack}/${var.pool.name}", 0, 100)
  permissions = ["compute.instances.start"]
}

resource "google_compute_instance_iam_member" "start" {
  for_each = local.ready

  zone          = google_compute_instance.node[each.key].zone
  instance_name = google_compute_instance.node[each.key].name
  role          = google_project_iam_custom_role.start[0].id
  member        = "serviceAccount:${local.accounts[var.head][0]}"

  # The policy goes with the machine.
  lifecycle { replace_triggered_by = [google_compute_instance.node[each.key].instance_id] }
}
