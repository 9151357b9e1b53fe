output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = merge({
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = "gcptpu"
    simulated = false
    head = {
      address = coalesce(one(google_compute_address.public[*].address), google_compute_address.head.address)
      port    = var.scheduler_port
    }
    nodes = [{
      name           = local.head
      id             = google_compute_instance.head.instance_id
      address        = google_compute_instance.head.network_interface[0].network_ip
      public_address = one(google_compute_address.public[*].address)
      zone           = google_compute_instance.head.zone
      machine_type   = var.head_machine_type
      head           = true
    }]
    # The slices, or the hosts of one: the scheduler knows them.
    group_nodes = var.node_count * var.hosts
    slots       = var.slots
    secret      = local.secret
    }, {
    # A client that does not reach that address goes through Identity-Aware Proxy.
    for name, via in { via = { kind = "iap", target = google_compute_instance.head.name, zone = google_compute_instance.head.zone, project = google_compute_instance.head.project } } : name => via if length(var.allow_cidrs) == 0
  })
}

output "slices" {
  description = "The private addresses of the hosts of each slice, by its name."
  value       = { for name, slice in google_tpu_v2_vm.slice : name => slice.network_endpoints[*].ip_address }
}
