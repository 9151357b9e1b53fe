# The workers of spot pools and of pools with a fallback list: a regional managed instance group that goes on trying.

resource "google_compute_instance_template" "group" {
  count = local.grouped ? 1 : 0

  name_prefix       = "${var.name}-${module.google.suffix}-"
  machine_type      = local.of.nodes.machine
  labels            = module.google.labels
  tags              = module.google.tags
  resource_policies = local.policies
  metadata          = merge(module.google.delivered, { user-data = replace(module.google.user_data_worker, "@SKYINFRA_NODE@", "${var.name}-asg") })

  disk {
    source_image = module.google.images["nodes"].output
    boot         = true
    auto_delete  = true
    disk_type    = local.of.nodes.disk
    disk_size_gb = local.of.nodes.disk_gb
    labels       = module.google.labels
  }

  network_interface {
    subnetwork = module.google.subnetwork
    nic_type   = "GVNIC"
  }

  dynamic "guest_accelerator" {
    for_each = local.of.nodes.gpus

    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }

  scheduling {
    provisioning_model          = local.of.nodes.model
    preemptible                 = var.spot
    automatic_restart           = !var.spot
    on_host_maintenance         = local.of.nodes.stops ? "TERMINATE" : "MIGRATE"
    instance_termination_action = local.of.nodes.model == "STANDARD" ? null : "DELETE"
  }

  dynamic "reservation_affinity" {
    for_each = var.reservation[*]

    content {
      type = "SPECIFIC_RESERVATION"

      specific_reservation {
        key    = "compute.googleapis.com/reservation-name"
        values = [reservation_affinity.value]
      }
    }
  }

  dynamic "service_account" {
    for_each = module.google.account

    content {
      email  = service_account.value
      scopes = ["cloud-platform"]
    }
  }

  lifecycle {
    create_before_destroy = true
    ignore_changes        = [metadata["user-data"]]
    replace_triggered_by  = [terraform_data.group[0]]
  }
}

resource "google_compute_region_instance_group_manager" "workers" {
  count = local.grouped ? 1 : 0

  name                             = module.google.prefix
  base_instance_name               = "${var.name}-${module.google.suffix}"
  target_size                      = var.node_count
  distribution_policy_zones        = terraform_data.group_zones[0].output
  distribution_policy_target_shape = var.compact_placement ? "ANY_SINGLE_ZONE" : "ANY"

  version {
    instance_template = google_compute_instance_template.group[0].self_link
  }

  # Another template is for the nodes that come later.
  update_policy {
    type                         = "OPPORTUNISTIC"
    minimal_action               = "REPLACE"
    instance_redistribution_type = "NONE"
    max_surge_fixed              = 0
    max_unavailable_fixed        = length(terraform_data.group_zones[0].output)
  }

  dynamic "instance_flexibility_policy" {
    for_each = length(var.machine_types) > 1 ? [var.machine_types] : []

    content {
      dynamic "instance_selections" {
        for_each = instance_flexibility_policy.value

        content {
          name          = "choice-${instance_selections.key}"
          rank          = instance_selections.key
          machine_types = [instance_selections.value]
        }
      }
    }
  }

  lifecycle { replace_triggered_by = [terraform_data.group[0]] }
}

resource "terraform_data" "group_zones" {
  count = local.grouped ? 1 : 0

  input            = local.group_zones
  triggers_replace = [var.machine_types, var.zones]

  lifecycle { ignore_changes = [input] }
}

resource "terraform_data" "group" {
  count = local.grouped ? 1 : 0

  # The rest is for the nodes that the group makes from then on.
  triggers_replace = [
    coalesce(var.user_data_revision, sha256(var.user_data_worker)),
    module.google.images["nodes"].id,
    terraform_data.secret.id,
    module.google.address.address,
    var.scheduler_port,
  ]
}
