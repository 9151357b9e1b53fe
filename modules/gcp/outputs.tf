output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = merge({
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = "gcp"
    simulated = false
    head = {
      address = coalesce(one(google_compute_address.public[*].address), google_compute_address.head.address)
      port    = var.scheduler_port
    }
    # The nodes of a group come and go without Terraform; the scheduler knows them.
    nodes = [for node in local.machines : {
      name           = node
      id             = google_compute_instance.node[node].instance_id
      address        = google_compute_instance.node[node].network_interface[0].network_ip
      public_address = node == local.head ? one(google_compute_address.public[*].address) : null
      zone           = google_compute_instance.node[node].zone
      machine_type   = local.of[local.role].type
      head           = node == local.head
    }]
    group_nodes = local.grouped ? var.node_count : 0
    slots       = var.slots
    secret      = local.secret
    }, {
    # A client that does not reach that address goes through Identity-Aware Proxy.
    for name, via in { via = { kind = "iap", target = google_compute_instance.node[local.head].name, zone = google_compute_instance.node[local.head].zone, project = google_compute_instance.node[local.head].project } } : name => via if length(var.allow_cidrs) == 0
  })
}

output "group" {
  description = "Name of the managed instance group of the workers; null where the workers are machines."
  value       = one(google_compute_region_instance_group_manager.workers[*].name)
}

output "network" {
  description = "The network and subnetwork of the nodes. Another pool can take the subnetwork."
  value       = { network = local.network, subnetwork = local.subnetwork }
}
