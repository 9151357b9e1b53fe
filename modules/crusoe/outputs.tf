output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value       = local.fleet

  # Whoever reads the manifest may use the fleet, so it waits for every node.
  depends_on = [terraform_data.head, terraform_data.worker, terraform_data.layout, terraform_data.worker_layout]
}
