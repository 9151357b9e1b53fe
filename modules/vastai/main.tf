locals {
  head = local.names[0]
  # "2x-RTX_4090", with what a list has written after it.
  machine = regex("^(?P<count>[0-9]+)x-(?P<gpu>[A-Za-z0-9_-]+?)(?:-[0-9]+-[0-9]+)?$", var.machine_types[0])
  disk    = var.disk_gb == 0 ? 20 : var.disk_gb

  # What is offered now and will do, the cheapest first. The ports are those of the scheduler and of SSH.
  offered = {
    for offer in coalesce(data.vastai_gpu_offers.this.offers, []) : format("%014.6f %d", offer.price_per_hour, offer.id) => offer.id
    if offer.reliability >= var.min_reliability && offer.direct_port_count >= 2 && offer.disk_space_gb >= local.disk
    && offer.cpu_cores >= var.min_vcpus && offer.cpu_ram_gb >= var.min_memory_gb
    && (var.min_cuda == null ? true : offer.cuda_version >= tonumber(var.min_cuda))
    && (var.spot ? offer.min_bid <= var.bid : true)
    && (length(var.countries) == 0 ? true : length(setintersection(toset(var.countries), toset(split(", ", coalesce(offer.geolocation, "?"))))) > 0)
  }
  # Offers perish: that of a node is taken when it is made, and no longer looked at.
  offers = values(local.offered)

  # Where the head is, once Vast.ai has started it: address and port, as its own API says them.
  found  = split(" ", terraform_data.address.output)
  places = { head = join(":", local.found), bucket = "file://${local.delivered}", runner = "" }
  volume = ""
  # What Linux takes for one variable of the environment, in base64.
  limit = { bytes = 96000, gzip = true, called = "an instance's environment" }

  # What Vast.ai's own entry runs at every start: what it does stands in the environment, compressed.
  onstart = "mkdir -p /opt/skyinfra && umask 077 && printf %s \"$SKYINFRA_START\" | base64 -d | gzip -dc >/opt/skyinfra/start && unset SKYINFRA_START CONTAINER_API_KEY && (while :; do sh /opt/skyinfra/start; sleep 5; done) >/var/log/skyinfra-start.log 2>&1 &"

  # What the nodes of other modules get from a bucket is written first, for root alone.
  delivered = "/opt/skyinfra/delivered"
  versions  = var.versions == null ? "" : jsonencode({ version = 1, python = var.versions.python, requirements = var.versions.requirements, wheel = null })
  first     = <<-EOT
    umask 077
    mkdir -p ${local.delivered}
    printf %s '${local.secret}' >${local.delivered}/secret
    printf %s '${replace(local.versions, "'", "'\\''")}' >${local.delivered}/versions.json
  EOT
  # The text of the head names no head, whose address is not known before it.
  user_data = replace(replace(var.user_data_head, "@SKYINFRA_BUCKET@", "file://${local.delivered}"), "@SKYINFRA_NODE@", local.head)

  made = [terraform_data.secret.id, var.image, var.machine_types[0], local.disk, var.spot, var.scheduler_port]
}

# The provider sorts by price with the dearest first, so all are asked for. It asks for verified machines alone.
data "vastai_gpu_offers" "this" {
  gpu_name           = replace(local.machine.gpu, "_", " ")
  num_gpus           = tonumber(local.machine.count)
  offer_type         = var.spot ? "bid" : "on-demand"
  max_price_per_hour = var.spot ? null : var.max_price
  datacenter_only    = var.datacenter
  order_by           = "dph_total"
  limit              = 1000
}

# What an instance is made from. Another one is another instance.
resource "terraform_data" "head" {
  triggers_replace = [local.made, coalesce(var.user_data_revision, sha256(var.user_data_head))]

  lifecycle {
    precondition {
      condition     = var.versions != null || !can(regex("@SKYINFRA_BUCKET@/versions", "${var.user_data_head}${var.user_data_worker}"))
      error_message = "versions: the user data ask for versions.json. Give versions as `skyinfra render` wrote them."
    }

    precondition {
      condition     = var.node_count == 1 || var.user_data_worker != ""
      error_message = "user_data_worker: needed, for this pool has nodes besides its head."
    }

    precondition {
      condition     = !var.spot || var.bid != null
      error_message = "bid: an interruptible instance needs one."
    }
  }
}

resource "terraform_data" "worker" {
  for_each = toset(slice(local.names, 1, length(local.names)))

  # They know the head by the address that it has when they are made.
  triggers_replace = [local.made, coalesce(var.user_data_revision, sha256(var.user_data_worker)), terraform_data.address.id]
}

resource "vastai_instance" "head" {
  offer_id       = try(local.offers[0], null)
  image          = var.image
  disk_gb        = local.disk
  label          = "${var.stack}-${local.head}"
  bid_price      = var.spot ? var.bid : null
  cancel_unavail = !var.spot
  use_ssh        = true
  onstart        = local.onstart
  env = {
    "-p ${var.scheduler_port}:${var.scheduler_port}" = "1"
    SKYINFRA_START                                   = base64gzip("${local.first}${local.user_data}")
  }

  timeouts {
    create = "${var.wait_seconds}s"
  }

  lifecycle {
    ignore_changes       = [offer_id, onstart, env, template_hash_id]
    replace_triggered_by = [terraform_data.head.id]
  }
}

resource "vastai_instance" "worker" {
  for_each = terraform_data.worker

  offer_id       = try(local.offers[index(local.names, each.key)], null)
  image          = var.image
  disk_gb        = local.disk
  label          = "${var.stack}-${each.key}"
  bid_price      = var.spot ? var.bid : null
  cancel_unavail = !var.spot
  use_ssh        = true
  onstart        = local.onstart
  env            = { SKYINFRA_START = base64gzip("${local.first}${replace(local.user_data_worker, "@SKYINFRA_NODE@", each.key)}") }

  timeouts {
    create = "${var.wait_seconds}s"
  }

  lifecycle {
    ignore_changes       = [offer_id, onstart, env, template_hash_id]
    replace_triggered_by = [terraform_data.worker[each.key].id]
  }
}

# The public address and port of the head, which the Terraform provider does not give. What a provisioner finds out
# reaches the state by way of a file, which is read once and removed.
resource "terraform_data" "found" {
  input            = "${path.root}/.skyinfra-${var.stack}-${var.name}.head"
  triggers_replace = [vastai_instance.head.id]

  lifecycle {
    ignore_changes = [input]
  }

  provisioner "local-exec" {
    command     = "python3 '${path.module}/address.py' find"
    environment = { FILE = self.input, INSTANCE = vastai_instance.head.id, PORT = var.scheduler_port, WAIT = var.wait_seconds }
  }
}

resource "terraform_data" "address" {
  input            = try(trimspace(file(terraform_data.found.output)), "")
  triggers_replace = [terraform_data.found.id]

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = self.input != ""
      error_message = "The address of the head was found by an apply that was cut off. Have it looked up again: terraform apply -replace=module.${var.name}.terraform_data.found"
    }
  }

  provisioner "local-exec" {
    command     = "python3 '${path.module}/address.py' forget"
    environment = { FILE = terraform_data.found.output }
  }
}
