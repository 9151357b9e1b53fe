output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = {
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = "vastai"
    simulated = false
    # The mapped ones, which differ from those that the head listens on.
    head = {
      address = local.found[0]
      port    = tonumber(local.found[1])
    }
    nodes = [
      for name, instance in merge({ (local.head) = vastai_instance.head }, vastai_instance.worker) : {
        name           = name
        id             = instance.id
        address        = name == local.head ? local.found[0] : instance.id
        public_address = name == local.head ? local.found[0] : null
        zone           = instance.geolocation
        machine_type   = var.machine_types[0]
        head           = name == local.head
      }
    ]
    group_nodes = 0
    slots       = var.slots
    secret      = local.secret
  }
}
