output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = {
    version   = 1
    stack     = var.stack
    pool      = var.name
    provider  = "runpod"
    simulated = false
    # The mapped ones, which differ from those that the head listens on.
    head = {
      address = local.found[0]
      port    = tonumber(local.found[1])
    }
    nodes = [
      for name, pod in merge({ (local.head) = runpod_pod.head }, runpod_pod.worker) : {
        name           = name
        id             = pod.id
        address        = name == local.head ? local.found[0] : pod.id
        public_address = name == local.head ? local.found[0] : null
        zone           = pod.data_center_id
        machine_type   = var.machine_types[0]
        head           = name == local.head
      }
    ]
    group_nodes = 0
    slots       = var.slots
    secret      = local.secret
  }
}
