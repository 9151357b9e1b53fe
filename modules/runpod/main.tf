locals {
  names = [for index in range(var.node_count) : "${var.name}-${index}"]
  head  = local.names[0]

  # "2x NVIDIA GeForce RTX 4090 (secure)", or "cpu3c-8-16": FLAVOR-VCPUS-GIB.
  machine = regex("^(?:(?:(?P<count>[0-9]+)x )?(?P<gpu>[A-Z].*) \\((?P<cloud>secure|community)\\)|(?P<cpu>cpu[0-9][a-z])-(?P<vcpus>[0-9]+)-[0-9]+)$", var.machine_types[0])

  # A pod begins with this command, whatever its image.
  args = "sh -c '${module.market.unpack} && unset SKYINFRA_START RUNPOD_API_KEY && exec sh /opt/skyinfra/start'"
  made = [terraform_data.secret.id, var.image, var.machine_types[0], var.disk_gb, var.scheduler_port, var.registry, var.min_cuda, var.data_centers]
  # Network volumes, which all pods mount. Without any, the list is that of pods before.
  network_volumes = [for volume in var.volumes : { volume_id = volume.id, path = volume.path }]

  pod = {
    gpu   = local.machine.gpu
    count = local.machine.gpu == null ? null : try(tonumber(local.machine.count), 1)
    cloud = local.machine.gpu == null ? null : upper(local.machine.cloud)
    vcpus = local.machine.cpu == null ? null : tonumber(local.machine.vcpus)
    disk  = var.disk_gb == 0 ? 20 : var.disk_gb
  }
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

module "market" {
  source     = "../market"
  kind       = "runpod"
  secret     = terraform_data.secret
  answers    = path.module
  deleted    = var.deletes_itself ? { url = "https://rest.runpod.io/v1/pods/$RUNPOD_POD_ID", key = "$RUNPOD_API_KEY" } : null
  head_id    = runpod_pod.head.id
  containers = { for name, each in merge({ (local.head) = runpod_pod.head }, runpod_pod.worker) : name => { id = each.id, zone = each.data_center_id } }
  # https://docs.runpod.io/api-reference/pods/POST/pods: the name has at most 191 characters
  names = { limit = 63 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count
    machine_types  = var.machine_types
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker
    versions       = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds, volumes = var.volumes
  }
}

# What a container is made from. Another one is another container.
resource "terraform_data" "head" {
  triggers_replace = concat([local.made, coalesce(var.user_data_revision, sha256(var.user_data_head))], var.volumes[*].id)
}

resource "terraform_data" "worker" {
  for_each = toset(slice(local.names, 1, length(local.names)))

  # They know the head by the address that it has when they are made.
  triggers_replace = concat([local.made, coalesce(var.user_data_revision, sha256(var.user_data_worker)), module.market.address_id], var.volumes[*].id)
}

resource "runpod_pod" "head" {
  name             = module.market.names.nodes[local.head]
  image            = var.image
  args             = local.args
  env              = { SKYINFRA_START = module.market.start_head }
  gpu_type_id      = local.pod.gpu
  gpu_count        = local.pod.count
  cpu_type_id      = local.machine.cpu
  vcpu_count       = local.pod.vcpus
  cloud            = local.pod.cloud
  data_center_ids  = length(var.data_centers) == 0 ? null : var.data_centers
  min_cuda_version = var.min_cuda
  registry         = var.registry
  disk             = local.pod.disk
  network_volumes  = length(var.volumes) == 0 ? null : local.network_volumes
  ports            = ["${var.scheduler_port}/tcp"]

  lifecycle {
    # An update would restart the pod, at another port.
    ignore_changes       = [name, args, env]
    replace_triggered_by = [terraform_data.head.id]
  }
}

resource "runpod_pod" "worker" {
  for_each = terraform_data.worker

  name             = module.market.names.nodes[each.key]
  image            = var.image
  args             = local.args
  env              = { SKYINFRA_START = module.market.start_worker[each.key] }
  gpu_type_id      = local.pod.gpu
  gpu_count        = local.pod.count
  cpu_type_id      = local.machine.cpu
  vcpu_count       = local.pod.vcpus
  cloud            = local.pod.cloud
  data_center_ids  = length(var.data_centers) == 0 ? null : var.data_centers
  min_cuda_version = var.min_cuda
  registry         = var.registry
  disk             = local.pod.disk
  network_volumes  = length(var.volumes) == 0 ? null : local.network_volumes

  lifecycle {
    ignore_changes       = [name, args, env]
    replace_triggered_by = [terraform_data.worker[each.key].id]
  }
}
