output "user_data_head" {
  description = "The user data of the head; @SKYINFRA_NODE@ is left."
  value       = replace(local.user_data.head, "@SKYINFRA_VOLUME@", var.volume)

  precondition {
    condition     = var.pool.versions != null || !can(regex("@SKYINFRA_BUCKET@/versions", "${var.pool.user_data_head}${var.pool.user_data_worker}"))
    error_message = "versions: the user data ask for versions.json. Give versions, and runner_file where it is an input, as `skyinfra render` wrote them."
  }

  precondition {
    condition     = var.limit.bytes == null || local.sizes.head + local.slack <= coalesce(var.limit.bytes, 0)
    error_message = "user_data_head: ${local.sizes.head} bytes${local.packed}, and ${var.limit.called} takes ${coalesce(var.limit.bytes, 0)} (${local.slack} are kept for the secret). Move packages and files into the image, or fetch them at boot."
  }
}

output "user_data_worker" {
  description = "The user data of the other nodes; @SKYINFRA_NODE@ is left."
  value       = local.user_data.worker

  precondition {
    condition     = (var.pool.node_count == 1 && !var.head_apart) || var.pool.user_data_worker != ""
    error_message = "user_data_worker: needed, for this pool has nodes besides its head."
  }

  precondition {
    condition     = var.limit.bytes == null || local.sizes.worker + local.slack <= coalesce(var.limit.bytes, 0)
    error_message = "user_data_worker: ${local.sizes.worker} bytes${local.packed}, and ${var.limit.called} takes ${coalesce(var.limit.bytes, 0)} (${local.slack} are kept for the secret). Move packages and files into the image, or fetch them at boot."
  }
}

output "versions" {
  description = "versions.json, with the runner's file; empty where there are none."
  value = var.pool.versions == null ? "" : jsonencode(merge(var.pool.versions, {
    version = 1
    wheel   = var.pool.runner_file == "" ? null : { name = basename(var.pool.runner_file), sha256 = filesha256(var.pool.runner_file) }
  }))
}

output "fleet" {
  description = "What the manifests of all fleets begin with. Holds the fleet secret."
  value = {
    version   = 1
    stack     = var.pool.stack
    pool      = var.pool.name
    simulated = false
    slots     = var.pool.slots
    secret    = var.secret.triggers_replace
  }
}

output "names" {
  description = "Names for the provider: `own` of what a fleet has one of, `nodes` of the nodes, by their names within the fleet."
  value = {
    own   = local.own
    nodes = { for index in range(var.pool.node_count) : "${var.pool.name}-${index}" => "${local.own}-${index}" }
  }
}
