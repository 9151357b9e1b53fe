output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value       = module.google.fleet
}

output "slices" {
  description = "The private addresses of the hosts of each slice, by its name."
  value       = { for name, slice in google_tpu_v2_vm.slice : name => slice.network_endpoints[*].ip_address }
}
