data "google_compute_zones" "up" {
  status = "UP"
}

data "google_compute_machine_types" "offered" {
  for_each = { for pair in setproduct(local.considered, distinct([for each in values(local.types) : each[0].machine])) : join("/", pair) => pair }

  zone   = each.value[0]
  filter = "name = '${each.value[1]}'"
}

locals {
  allowed = length(var.zones) > 0 ? var.zones : sort(data.google_compute_zones.up.names)
  # Those in which machines are made: a zone that has N1 need not have the GPUs that are added to it.
  equipped   = length(var.zones) > 0 ? [] : [for zone in local.allowed : zone if contains(var.gpu_zones, zone)]
  considered = length(local.equipped) > 0 ? local.equipped : local.allowed
  # The zones of the group take one of its types each; that of machines has theirs.
  group_zones = [for zone in local.considered : zone if anytrue([for type in var.machine_types : length(data.google_compute_machine_types.offered["${zone}/${local.types[type][0].machine}"].machine_types) > 0])]
  zones       = [for zone in local.considered : zone if alltrue([for role in local.elastic ? ["nodes", "head"] : [local.role] : length(data.google_compute_machine_types.offered["${zone}/${local.of[role].machine}"].machine_types) > 0])]
}

# The zone of the machines is kept, whatever is offered where from then on.
resource "terraform_data" "zone" {
  input = try(local.zones[0], "")

  lifecycle {
    ignore_changes = [input]

    precondition {
      condition     = length(var.machine_types) == 1 || !can(regex("\\+", join(" ", var.machine_types)))
      error_message = "machine_types: a machine type with GPUs that are added to it stands alone."
    }

    precondition {
      condition     = length([for one in [var.spot, var.flex_start_seconds != null, var.reservation != null] : one if one]) <= 1
      error_message = "spot: a node is a spot machine, or comes by flex_start_seconds, or out of a reservation. Leave the others out."
    }

    precondition {
      condition     = !local.elastic || !(local.grouped || var.spot || var.flex_start_seconds != null || var.reservation_bound)
      error_message = "min_nodes: for machines of one type that stop and start again: no group, no spot machines, no flex_start_seconds, no reservation_bound."
    }

    precondition {
      condition     = !local.grouped || var.flex_start_seconds == null
      error_message = "flex_start_seconds: for machines of one type, which are no group."
    }

    precondition {
      condition     = !var.reservation_bound || var.reservation != null
      error_message = "reservation_bound: nodes are bound to a reservation. Name it in reservation."
    }

    precondition {
      condition     = !var.gpudirect || (!local.grouped && can(regex("^(a3-ultragpu|a4-highgpu)-8g$", var.machine_types[0])))
      error_message = "gpudirect: for machines of a3-ultragpu-8g or a4-highgpu-8g, which are no group."
    }

    postcondition {
      condition     = self.input != "" && (!local.grouped || length(local.group_zones) > 0)
      error_message = "machine_types: ${join(", ", keys(local.types))} is offered in none of ${join(", ", local.considered)}. Choose another zone, region or machine type."
    }

    postcondition {
      condition     = self.input == "" || contains(local.allowed, self.input)
      error_message = "zones: the nodes stand in ${self.input}, which is not among ${join(", ", local.allowed)}. Name it too, or move the nodes, which ends what runs on them: -replace=module.NAME.terraform_data.zone."
    }
  }
}
