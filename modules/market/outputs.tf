output "unpack" {
  description = "What a container does first, whatever its image: it unpacks what it starts with from SKYINFRA_START."
  value       = local.unpack
}

output "start_head" {
  description = "SKYINFRA_START of the head."
  value       = local.start_head
}

output "start_worker" {
  description = "SKYINFRA_START of the other nodes, by name."
  value       = local.start_worker
}

output "address_id" {
  description = "What changes when the head has another address. The other nodes know the one that it has when they are made."
  value       = terraform_data.address.id
}

output "fleet" {
  description = "The manifest of the fleet."
  value = merge(module.core.fleet, {
    provider = var.kind
    # The mapped ones, which differ from those that the head listens on.
    head = {
      address = local.found[0]
      port    = tonumber(local.found[1])
    }
    nodes = [
      for name, container in var.containers : {
        name           = name
        id             = container.id
        address        = name == local.head ? local.found[0] : container.id
        public_address = name == local.head ? local.found[0] : null
        zone           = container.zone
        machine_type   = var.pool.machine_types[0]
        head           = name == local.head
      }
    ]
    group_nodes = 0
  })
}

output "names" {
  description = "The names for the provider, as ../core gives them."
  value       = module.core.names
}
