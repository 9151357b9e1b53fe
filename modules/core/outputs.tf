output "user_data_head" {
  description = "The user data of the head; @SKYINFRA_NODE@ is left."
  value       = replace(local.user_data.head, "@SKYINFRA_VOLUME@", var.volume)

  precondition {
    condition     = var.limit.bytes == null || local.sizes.head + local.slack <= coalesce(var.limit.bytes, 0)
    error_message = "user_data_head: ${local.sizes.head} bytes${local.packed}, and ${var.limit.called} takes ${coalesce(var.limit.bytes, 0)} (${local.slack} are kept for the secret). Move packages and files into the image, or fetch them at boot."
  }
}

output "user_data_worker" {
  description = "The user data of the other nodes; @SKYINFRA_NODE@ is left."
  value       = local.user_data.worker

  precondition {
    condition     = var.limit.bytes == null || local.sizes.worker + local.slack <= coalesce(var.limit.bytes, 0)
    error_message = "user_data_worker: ${local.sizes.worker} bytes${local.packed}, and ${var.limit.called} takes ${coalesce(var.limit.bytes, 0)} (${local.slack} are kept for the secret). Move packages and files into the image, or fetch them at boot."
  }
}
