output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = merge({
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = "local"
    simulated = var.simulate
    head = {
      address = split(":", local.scheduler)[0]
      port    = tonumber(split(":", local.scheduler)[1])
    }
    nodes = [
      for name in local.names : {
        name           = name
        id             = terraform_data.node[name].id
        address        = "127.0.0.1"
        public_address = "127.0.0.1"
        zone           = null
        machine_type   = var.machine_types[0]
        head           = name == local.head
      }
    ]
    slots  = var.slots
    secret = terraform_data.secret.triggers_replace
  }, local.elastic ? { group_nodes = var.min_nodes, max_nodes = var.node_count } : {})

  # Whoever reads the manifest may use the fleet, so it waits for every node.
  depends_on = [terraform_data.head, terraform_data.worker]
}
