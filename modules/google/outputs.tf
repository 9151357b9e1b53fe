output "fleet" {
  description = "The manifest of the fleet."
  value = merge(module.core.fleet, {
    provider = var.kind
    account  = google_compute_instance.node[var.head].project
    head = {
      address = coalesce(one(google_compute_address.public[*].address), google_compute_address.head.address)
      port    = var.pool.scheduler_port
    }
    # Other nodes come and go without Terraform; the scheduler knows them.
    nodes = [for node in var.elastic == null ? var.nodes : [var.head] : {
      name           = node
      id             = google_compute_instance.node[node].instance_id
      address        = google_compute_instance.node[node].network_interface[0].network_ip
      public_address = node == var.head ? one(google_compute_address.public[*].address) : null
      zone           = google_compute_instance.node[node].zone
      machine_type   = local.machines[node].type
      head           = node == var.head
    }]
    group_nodes = var.group_nodes
    }, {
    for name, value in { max_nodes = try(var.elastic.most, null) } : name => value if value != null
    }, {
    # A client that does not reach that address goes through Identity-Aware Proxy.
    for name, via in { via = { kind = "iap", target = google_compute_instance.node[var.head].name, zone = google_compute_instance.node[var.head].zone, project = google_compute_instance.node[var.head].project } } : name => via if length(var.pool.allow_cidrs) == 0
  })
}

output "suffix" {
  description = "The part of names in which two fleets of one name differ."
  value       = local.suffix
}

output "prefix" {
  description = "How the names of what belongs to the fleet begin."
  value       = local.prefix
}

output "labels" {
  description = "Labels on everything that takes them."
  value       = local.labels
}

output "tags" {
  description = "Network tags of the nodes."
  value       = local.tags
}

output "images" {
  description = "By role, the resource with the image that was found at first, and the image."
  value       = terraform_data.image
}

output "delivered" {
  description = "What the nodes find in their metadata."
  value       = local.delivered
}

output "user_data_worker" {
  description = "The user data of nodes that are no machines of this module; @SKYINFRA_NODE@ is left."
  value       = module.core.user_data_worker
}

output "account" {
  description = "The e-mail address of the service account of nodes that are no machines of this module, in a list that is empty for none. Whoever has it has its rights until it has ended."
  value       = local.account
  depends_on  = [google_storage_bucket_iam_member.mounted]
}

output "address" {
  description = "The address at which the nodes find the head: address, project."
  value       = google_compute_address.head
}

output "network" {
  description = "The network of the nodes."
  value       = local.network
}

output "subnetwork" {
  description = "The subnetwork of the nodes. Whoever stands in it waits for the way to the outside."
  value       = local.subnetwork
  depends_on  = [google_compute_router_nat.this, google_compute_firewall.this]
}
