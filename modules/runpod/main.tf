locals {
  head = local.names[0]
  # "2x NVIDIA GeForce RTX 4090 (secure)", or "cpu3c-8-16": FLAVOR-VCPUS-GIB.
  machine = regex("^(?:(?:(?P<count>[0-9]+)x )?(?P<gpu>[A-Z].*) \\((?P<cloud>secure|community)\\)|(?P<cpu>cpu[0-9][a-z])-(?P<vcpus>[0-9]+)-[0-9]+)$", var.machine_types[0])

  # Where the head is, once RunPod has started it: address and port, as its own API says them.
  found  = split(" ", terraform_data.address.output)
  places = { head = join(":", local.found), bucket = "file://${local.delivered}", runner = "" }
  volume = ""
  # What Linux takes for one variable of the environment, in base64.
  limit = { bytes = 96000, gzip = true, called = "a pod's environment" }

  # A pod begins with this command, whatever its image: what it does stands in its environment, compressed.
  args = "sh -c 'mkdir -p /opt/skyinfra && umask 077 && printf %s \"$SKYINFRA_START\" | base64 -d | gzip -dc >/opt/skyinfra/start && unset SKYINFRA_START RUNPOD_API_KEY && exec sh /opt/skyinfra/start'"

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

  pod = {
    made  = [terraform_data.secret.id, var.image, var.machine_types[0], var.disk_gb, var.scheduler_port, var.registry, var.min_cuda, var.data_centers]
    gpu   = local.machine.gpu
    count = local.machine.gpu == null ? null : try(tonumber(local.machine.count), 1)
    cloud = local.machine.gpu == null ? null : upper(local.machine.cloud)
    vcpus = local.machine.cpu == null ? null : tonumber(local.machine.vcpus)
    disk  = var.disk_gb == 0 ? 20 : var.disk_gb
  }
}

# What a pod is made from. Another one is another pod.
resource "terraform_data" "head" {
  triggers_replace = [local.pod.made, coalesce(var.user_data_revision, sha256(var.user_data_head))]

  lifecycle {
    precondition {
      condition     = var.versions != null || !can(regex("@SKYINFRA_BUCKET@/versions", "${var.user_data_head}${var.user_data_worker}"))
      error_message = "versions: the user data ask for versions.json. Give versions as `skyinfra render` wrote them."
    }

    precondition {
      condition     = var.node_count == 1 || var.user_data_worker != ""
      error_message = "user_data_worker: needed, for this pool has nodes besides its head."
    }
  }
}

resource "terraform_data" "worker" {
  for_each = toset(slice(local.names, 1, length(local.names)))

  # They know the head by the address that it has when they are made.
  triggers_replace = [local.pod.made, coalesce(var.user_data_revision, sha256(var.user_data_worker)), terraform_data.address.id]
}

resource "runpod_pod" "head" {
  name             = "${var.stack}-${local.head}"
  image            = var.image
  args             = local.args
  env              = { SKYINFRA_START = base64gzip("${local.first}${local.user_data}") }
  gpu_type_id      = local.pod.gpu
  gpu_count        = local.pod.count
  cpu_type_id      = local.machine.cpu
  vcpu_count       = local.pod.vcpus
  cloud            = local.pod.cloud
  data_center_ids  = length(var.data_centers) == 0 ? null : var.data_centers
  min_cuda_version = var.min_cuda
  registry         = var.registry
  disk             = local.pod.disk
  ports            = ["${var.scheduler_port}/tcp"]

  lifecycle {
    # An update would restart the pod, at another port.
    ignore_changes       = [args, env]
    replace_triggered_by = [terraform_data.head.id]
  }
}

resource "runpod_pod" "worker" {
  for_each = terraform_data.worker

  name             = "${var.stack}-${each.key}"
  image            = var.image
  args             = local.args
  env              = { SKYINFRA_START = base64gzip("${local.first}${replace(local.user_data_worker, "@SKYINFRA_NODE@", each.key)}") }
  gpu_type_id      = local.pod.gpu
  gpu_count        = local.pod.count
  cpu_type_id      = local.machine.cpu
  vcpu_count       = local.pod.vcpus
  cloud            = local.pod.cloud
  data_center_ids  = length(var.data_centers) == 0 ? null : var.data_centers
  min_cuda_version = var.min_cuda
  registry         = var.registry
  disk             = local.pod.disk

  lifecycle {
    ignore_changes       = [args, env]
    replace_triggered_by = [terraform_data.worker[each.key].id]
  }
}

# The public address and port of the head, which the Terraform provider does not give. What a provisioner finds out
# reaches the state by way of a file, which is read once and removed.
resource "terraform_data" "found" {
  input            = "${path.root}/.skyinfra-${var.stack}-${var.name}.head"
  triggers_replace = [runpod_pod.head.id]

  lifecycle {
    ignore_changes = [input]
  }

  provisioner "local-exec" {
    command     = "python3 '${path.module}/address.py' find"
    environment = { FILE = self.input, POD = runpod_pod.head.id, PORT = var.scheduler_port, WAIT = var.wait_seconds }
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
