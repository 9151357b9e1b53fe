output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = merge(module.core.fleet, {
    provider = "container"
    # The published ones, which differ from those that the head listens on.
    head = {
      address = trim(local.address, "[]")
      port    = local.port
    }
    nodes = [
      for name in local.elastic ? [local.head] : local.names : {
        name           = name
        id             = local.containers[name]
        address        = local.shared ? "127.0.0.1" : local.containers[name]
        public_address = name == local.head ? trim(local.address, "[]") : null
        zone           = null
        machine_type   = var.machine_types[0]
        head           = name == local.head
      }
    ]
    group_nodes = coalesce(var.min_nodes, 0)
  }, local.elastic ? { max_nodes = var.node_count } : {})

  # Whoever reads the manifest may use the fleet, so it waits for every node.
  depends_on = [terraform_data.head, terraform_data.worker]
}
