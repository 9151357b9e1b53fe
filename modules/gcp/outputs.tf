output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value       = module.google.fleet
}

output "group" {
  description = "Name of the managed instance group of the workers; null where the workers are machines."
  value       = one(google_compute_region_instance_group_manager.workers[*].name)
}

output "network" {
  description = "The network and subnetwork of the nodes. Another pool can take the subnetwork."
  value       = { network = module.google.network, subnetwork = module.google.subnetwork }
}
