# Machines of Compute Engine that Terraform makes one by one, the disk of the head, the inputs of every such module and the manifest: `python -m tools.core` copies it. A module says in locals:
#   kind, head, zone      of the provider; name of the head; where the machines stand
#   machines, role        names of these machines, the head among them; which one of `images` they have
#   images                by role: an image, or a family of which the newest one is taken and kept
#   user_data_key         the attribute with the user data
#   group_nodes           how many nodes there are besides
#   machine               what each of these machines is:
#     type, machine, gpus   as it is declared; the name of Google Cloud, and the GPUs that are added: type, count
#     disk, disk_gb         kind and size of the boot disk
#     model, stops          provisioning model; whether maintenance of its host stops it
#     flex, reservation     seconds to run with FLEX_START; the reservation to stand in; null for none
#     policies, compact     placement policies, and whether there are any
#     direct                interfaces besides the first: subnetwork, nic_type

variable "ssh_public_key" {
  description = "OpenSSH public key to log in with as the user ubuntu; empty for none. `gcloud compute ssh` works without one."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.ssh_public_key == "" || can(regex("^(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/=]+( .*)?$", trimspace(var.ssh_public_key)))
    error_message = "ssh_public_key: one line, beginning with ssh-ed25519 or ssh-rsa."
  }
}

variable "allow_cidrs" {
  description = "IPv4 networks that may reach the head's scheduler, and its port 22 where ssh_public_key is given: the head has a static external address then. With none, clients come through Identity-Aware Proxy."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.allow_cidrs : can(cidrnetmask(cidr)) && try(cidrhost(cidr, 0) == split("/", cidr)[0], false)])
    error_message = "allow_cidrs: the first address of an IPv4 network, with its length: 203.0.113.7/32 for one address."
  }
}

variable "labels" {
  description = "Labels on everything that takes them."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for key, value in var.labels : can(regex("^[a-z][a-z0-9_-]{0,62}$", key)) && can(regex("^[a-z0-9_-]{0,63}$", value)) && !startswith(key, "skyinfra-")]) && length(var.labels) <= 60
    error_message = "labels: at most 60 names and values of small letters, digits, dashes and underscores, at most 63 characters; a name begins with a letter, and not with skyinfra-."
  }
}

variable "subnetwork" {
  description = "Self link of the subnetwork to stand in (projects/PROJECT/regions/REGION/subnetworks/NAME), which needs a way to the internet. Null makes a network with Cloud NAT."
  type        = string
  default     = null
}

variable "network_tags" {
  description = "Network tags of the nodes, whose firewall rules are the caller's: nodes reach each other, clients the head. Empty makes rules of the module's own."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "service_account" {
  description = "E-mail address of the service account of the nodes; null for none."
  type        = string
  default     = null
}

variable "head_volume_gb" {
  description = "The disk with the jobs of the head in GB, which outlives a head that is replaced. It may only grow; the head takes the room at its next boot."
  type        = number
  default     = 20
  nullable    = false

  validation {
    condition     = var.head_volume_gb >= 10 && var.head_volume_gb <= 65536 && floor(var.head_volume_gb) == var.head_volume_gb
    error_message = "head_volume_gb: a whole number from 10 to 65536."
  }
}

variable "head_machine_type" {
  description = "Machine type of a head that is a machine besides the nodes: on-demand and without slots."
  type        = string
  default     = "e2-standard-2"
  nullable    = false
}

variable "layout" {
  description = "The wanted layout as a short text: the attribute skyinfra-layout of the head, which the head reads through the metadata service. Changing it changes that attribute and nothing else. Empty for none."
  type        = string
  default     = ""
  nullable    = false
}

locals {
  # Names are unique in a project: two fleets of one name differ in the last part.
  suffix = substr(terraform_data.fleet.id, 0, 6)
  prefix = "skyinfra-${var.name}-${local.suffix}"
  labels = merge(var.labels, { skyinfra-stack = lower(substr(var.stack, 0, 63)), skyinfra-pool = var.name })
  tags   = length(var.network_tags) > 0 ? var.network_tags : [local.prefix]
}

# Which fleet something is of. It outlives the secret.
resource "terraform_data" "fleet" {
  lifecycle {
    precondition {
      condition     = (local.group_nodes == 0 && var.node_count == 1) || var.user_data_worker != ""
      error_message = "user_data_worker: needed, for this pool has nodes besides its head."
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

# A node keeps the image that it was made with until the input itself changes.
data "google_compute_image" "family" {
  for_each = { for role, image in local.images : role => split("/", image) if can(regex("/family/", image)) }

  project = each.value[1]
  family  = each.value[5]
}

resource "terraform_data" "image" {
  for_each = local.images

  input            = try(data.google_compute_image.family[each.key].self_link, each.value)
  triggers_replace = each.value

  lifecycle {
    ignore_changes = [input]
  }
}

# What a machine is replaced for, besides what Google Cloud cannot change on one. Its user data are not among it: they
# carry the layout the node begins with, and a changed layout reaches running nodes in place.
resource "terraform_data" "declared" {
  for_each = toset(local.machines)

  triggers_replace = [
    coalesce(var.user_data_revision, sha256(each.key == local.head ? var.user_data_head : var.user_data_worker)),
    terraform_data.image[local.role].id,
    terraform_data.secret.id,
    google_compute_address.head.address,
    each.key == local.head ? google_compute_disk.head.id : "",
    # It stands in what a node was made from: where the head listens, and where the others look for it.
    var.scheduler_port,
    jsonencode([local.machine.type, local.machine.model, local.machine.flex, local.machine.reservation, local.machine.compact, var.service_account]),
  ]
}

# What outlives a head that is replaced: its jobs.
resource "google_compute_disk" "head" {
  name   = "${local.prefix}-jobs"
  zone   = local.zone
  type   = local.machine.disk
  size   = var.head_volume_gb
  labels = local.labels

  lifecycle {
    # A head of another family may take another kind of disk, which would be one without the jobs.
    ignore_changes = [type]
  }
}

resource "google_compute_instance" "node" {
  for_each = toset(local.machines)

  name              = "${each.key}-${local.suffix}"
  machine_type      = local.machine.machine
  zone              = local.zone
  labels            = merge(local.labels, { skyinfra-node = each.key })
  tags              = concat(local.tags, each.key == local.head && length(var.network_tags) == 0 ? ["${local.prefix}-head"] : [])
  resource_policies = local.machine.policies

  metadata = merge(
    local.delivered,
    { (local.user_data_key) = replace(each.key == local.head ? local.user_data_head : local.user_data_worker, "@SKYINFRA_NODE@", each.key) },
    each.key == local.head && var.layout != "" ? { skyinfra-layout = var.layout } : {},
  )

  boot_disk {
    initialize_params {
      image  = terraform_data.image[local.role].output
      size   = local.machine.disk_gb
      type   = local.machine.disk
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

  dynamic "network_interface" {
    for_each = local.machine.direct

    content {
      subnetwork = network_interface.value.subnetwork
      nic_type   = network_interface.value.nic_type
    }
  }

  dynamic "guest_accelerator" {
    for_each = local.machine.gpus

    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }

  scheduling {
    provisioning_model          = local.machine.model
    preemptible                 = local.machine.model == "SPOT"
    automatic_restart           = contains(["STANDARD", "RESERVATION_BOUND"], local.machine.model)
    on_host_maintenance         = local.machine.stops ? "TERMINATE" : "MIGRATE"
    instance_termination_action = local.machine.model == "STANDARD" ? null : "DELETE"

    dynamic "max_run_duration" {
      for_each = local.machine.flex[*]

      content {
        seconds = max_run_duration.value
      }
    }
  }

  dynamic "reservation_affinity" {
    for_each = local.machine.flex != null ? ["NO_RESERVATION"] : local.machine.reservation != null ? ["SPECIFIC_RESERVATION"] : []

    content {
      type = reservation_affinity.value

      dynamic "specific_reservation" {
        for_each = local.machine.reservation[*]

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
    create = local.machine.flex == null ? "20m" : "150m"
  }

  lifecycle {
    # The disks that a machine type brings are no part of what is declared; labels of a disk would replace its machine.
    ignore_changes       = [metadata["user-data"], metadata["startup-script"], scratch_disk, boot_disk[0].initialize_params[0].labels]
    replace_triggered_by = [terraform_data.declared[each.key]]
  }

  # Its first boot fetches packages, so the way to them is there before it is.
  depends_on = [google_compute_router_nat.this, google_compute_firewall.this]
}

locals {
  # The manifest.
  fleet = merge({
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = local.kind
    simulated = false
    head = {
      address = coalesce(one(google_compute_address.public[*].address), google_compute_address.head.address)
      port    = var.scheduler_port
    }
    # Other nodes come and go without Terraform; the scheduler knows them.
    nodes = [for node in local.machines : {
      name           = node
      id             = google_compute_instance.node[node].instance_id
      address        = google_compute_instance.node[node].network_interface[0].network_ip
      public_address = node == local.head ? one(google_compute_address.public[*].address) : null
      zone           = google_compute_instance.node[node].zone
      machine_type   = local.machine.type
      head           = node == local.head
    }]
    group_nodes = local.group_nodes
    slots       = var.slots
    secret      = local.secret
    }, {
    # A client that does not reach that address goes through Identity-Aware Proxy.
    for name, via in { via = { kind = "iap", target = google_compute_instance.node[local.head].name, zone = google_compute_instance.node[local.head].zone, project = google_compute_instance.node[local.head].project } } : name => via if length(var.allow_cidrs) == 0
  })
}
