locals {
  names = [for index in range(var.node_count) : "${var.name}-${index}"]
  head  = "${var.name}-head"
  # Without the address of Compute Engine, as Google's examples name them: the provider compares what it reads as text.
  # https://github.com/hashicorp/terraform-provider-google-beta google-beta/services/tpuv2/resource_tpu_v2_vm.go, read 2026-11-27
  network = { for name in ["network", "subnetwork"] : name => replace(module.google[name], "/^https://.*?/(projects/)/", "$1") }
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

module "google" {
  source        = "../google"
  kind          = "gcptpu"
  secret        = terraform_data.secret
  head          = local.head
  nodes         = [local.head]
  group_nodes   = var.node_count * var.hosts
  zone          = terraform_data.zone.output
  images        = { head = var.head_image }
  user_data_key = "startup-script"
  machines      = { head = { type = var.head_machine_type, machine = var.head_machine_type, disk = "pd-balanced", disk_gb = 50 } }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port
    subnetwork     = var.subnetwork, network_tags = var.network_tags, service_account = var.service_account, head_volume_gb = var.head_volume_gb, layout = var.layout
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
    module.google.address.address,
    # It stands in what a node was made from: where the head listens, and where the others look for it.
    var.scheduler_port,
  ]
}

resource "google_tpu_v2_vm" "slice" {
  provider = google-beta
  for_each = toset(local.names)

  name             = "${each.key}-${module.google.suffix}"
  zone             = terraform_data.zone.output
  accelerator_type = var.machine_types[0]
  runtime_version  = var.image
  labels           = merge(module.google.labels, { skyinfra-node = each.key })
  tags             = module.google.tags

  metadata = merge(module.google.delivered, { startup-script = replace(module.google.user_data_worker, "@SKYINFRA_NODE@", each.key) })

  network_config {
    network             = local.network.network
    subnetwork          = local.network.subnetwork
    enable_external_ips = false
  }

  # One that says nothing but false would be planned anew for ever: Google answers it empty, and the provider then reads none.
  dynamic "scheduling_config" {
    for_each = var.spot ? [true] : []

    content {
      spot = true
    }
  }

  dynamic "service_account" {
    for_each = var.service_account[*]

    content {
      email = service_account.value
      scope = ["https://www.googleapis.com/auth/cloud-platform"]
    }
  }

  lifecycle {
    # Another subnetwork gives the head another address, for which slices are replaced.
    ignore_changes       = [metadata["startup-script"], network_config]
    replace_triggered_by = [terraform_data.slices]

    # Google keeps a spot slice that it took back, so that it is never found gone.
    # https://docs.cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes#State
    postcondition {
      condition     = self.state != "PREEMPTED" && self.state != "TERMINATED"
      error_message = "${each.key}: the slice was taken back (${self.state}). Have another one made: -replace='module.NAME.google_tpu_v2_vm.slice[\"${each.key}\"]'."
    }
  }
}
