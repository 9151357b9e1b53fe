output "own" {
  description = "The name of what a fleet has one of."
  value       = local.own
}

output "nodes" {
  description = "The names of the nodes, by their names within the fleet."
  value       = { for index in range(var.node_count) : "${var.name}-${index}" => "${local.own}-${index}" }
}
