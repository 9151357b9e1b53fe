output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = {
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = "ssh"
    simulated = false
    head = {
      address = local.reached[local.head]
      port    = var.scheduler_port
    }
    nodes = [
      for node in local.order : {
        name           = node
        id             = terraform_data.node[node].id
        address        = local.reached[node]
        public_address = local.hosts[node].address
        zone           = null
        machine_type   = var.machine_types[0]
        head           = node == local.head
      }
    ]
    group_nodes = 0
    slots       = var.slots
    secret      = local.secret
  }

  # Whoever reads the manifest may use the fleet, so it waits for every node.
  depends_on = [terraform_data.head, terraform_data.worker, terraform_data.layout, terraform_data.worker_layout]
}
