locals {
  names = [for index in range(var.node_count) : "${var.name}-${index}"]
  head  = local.names[0]

  # "2x-RTX_4090", with what a list has written after it.
  machine = regex("^(?P<count>[0-9]+)x-(?P<gpu>[A-Za-z0-9_-]+?)(?:-[0-9]+-[0-9]+)?$", var.machine_types[0])
  disk    = var.disk_gb == 0 ? 20 : var.disk_gb

  # What is offered now and will do, the cheapest first. The ports are those of the scheduler and of SSH.
  offered = {
    for offer in coalesce(data.vastai_gpu_offers.this.offers, []) : format("%014.6f %d", offer.price_per_hour, offer.id) => offer.id
    if offer.reliability >= var.min_reliability && offer.direct_port_count >= 2 && offer.disk_space_gb >= local.disk
    && offer.cpu_cores >= var.min_vcpus && offer.cpu_ram_gb >= var.min_memory_gb
    && (var.min_cuda == null ? true : offer.cuda_version >= tonumber(var.min_cuda))
    && (var.spot ? offer.min_bid <= coalesce(var.bid, 0) : true)
    && (length(var.countries) == 0 ? true : length(setintersection(toset(var.countries), toset(split(", ", coalesce(offer.geolocation, "?"))))) > 0)
  }
  # Offers perish: that of a node is taken when it is made, and no longer looked at.
  offers = values(local.offered)

  # What Vast.ai's own entry runs at every start.
  onstart = "${module.market.unpack} && unset SKYINFRA_START CONTAINER_API_KEY && (while :; do sh /opt/skyinfra/start; sleep 5; done) >/var/log/skyinfra-start.log 2>&1 &"

  made = [terraform_data.secret.id, var.image, var.machine_types[0], local.disk, var.spot, var.scheduler_port]
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

module "market" {
  source     = "../market"
  kind       = "vastai"
  secret     = terraform_data.secret
  answers    = path.module
  deleted    = var.deletes_itself ? { url = "https://console.vast.ai/api/v0/instances/$CONTAINER_ID/", key = "$CONTAINER_API_KEY" } : null
  head_id    = vastai_instance.head.id
  containers = { for name, each in merge({ (local.head) = vastai_instance.head }, vastai_instance.worker) : name => { id = each.id, zone = each.geolocation } }
  # https://docs.vast.ai/api: no limit is said
  names = { limit = 63 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count
    machine_types  = var.machine_types
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker
    versions       = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

# What a container is made from. Another one is another container.
resource "terraform_data" "head" {
  triggers_replace = [local.made, coalesce(var.user_data_revision, sha256(var.user_data_head))]
}

resource "terraform_data" "worker" {
  for_each = toset(slice(local.names, 1, length(local.names)))

  # They know the head by the address that it has when they are made.
  triggers_replace = [local.made, coalesce(var.user_data_revision, sha256(var.user_data_worker)), module.market.address_id]
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

# The provider lists them when it has made an instance, and loses the instance where it cannot read their dates: so they
# are read before anything is made.
data "vastai_ssh_keys" "account" {}

resource "vastai_instance" "head" {
  offer_id       = try(local.offers[0], null)
  image          = var.image
  disk_gb        = local.disk
  label          = module.market.names.nodes[local.head]
  bid_price      = var.spot ? var.bid : null
  cancel_unavail = !var.spot
  use_ssh        = true
  # Left out, the provider leaves them unknown when it has made an instance, which Terraform refuses.
  use_jupyter_lab = false
  image_login     = ""
  ssh_key_ids     = []
  onstart         = local.onstart
  env = {
    "-p ${var.scheduler_port}:${var.scheduler_port}" = "1"
    SKYINFRA_START                                   = module.market.start_head
  }

  timeouts { create = "${var.wait_seconds}s" }

  lifecycle {
    ignore_changes       = [label, offer_id, onstart, env, template_hash_id]
    replace_triggered_by = [terraform_data.head.id]

    precondition {
      condition     = !var.spot || var.bid != null
      error_message = "bid: an interruptible instance needs one."
    }
  }
}

resource "vastai_instance" "worker" {
  for_each = terraform_data.worker

  offer_id        = try(local.offers[index(local.names, each.key)], null)
  image           = var.image
  disk_gb         = local.disk
  label           = module.market.names.nodes[each.key]
  bid_price       = var.spot ? var.bid : null
  cancel_unavail  = !var.spot
  use_ssh         = true
  use_jupyter_lab = false
  image_login     = ""
  ssh_key_ids     = []
  onstart         = local.onstart
  env             = { SKYINFRA_START = module.market.start_worker[each.key] }

  timeouts { create = "${var.wait_seconds}s" }

  lifecycle {
    ignore_changes       = [label, offer_id, onstart, env, template_hash_id]
    replace_triggered_by = [terraform_data.worker[each.key].id]
  }
}
