# What no single input can be refused for. The rest of the module waits for these.

locals {
  reserved      = var.capacity_block_id != null || var.capacity_reservation_id != null
  offered_text  = length(local.offered) == 0 ? "no zone of this region" : join(", ", sort(local.offered))
  machines_text = join(", ", var.machine_types)
  given_vpcs    = distinct(data.aws_subnet.given[*].vpc_id)
  # Graviton by the letter after the generation, and NVIDIA's Grace.
  arm            = [for type in concat(var.machine_types, local.grouped && var.head_image == null ? [var.head_machine_type] : []) : can(regex("^([a-z]+[0-9]+g[a-z]*(-[a-z0-9]+)?|a1|p6e-gb[0-9]+)\\.", type))]
  unknown_efa    = setsubtract(keys(var.efa_interfaces), var.machine_types)
  zones_not_here = setsubtract(var.zones, local.present)
}

resource "terraform_data" "checks" {
  lifecycle {
    precondition {
      condition     = !local.own_profile || length(distinct([for key in keys(var.labels) : lower(key)])) == length(var.labels)
      error_message = "labels: no two names that differ in case alone, which IAM takes for one."
    }

    precondition {
      condition     = var.vpc_id == null || length(var.subnet_ids) > 0
      error_message = "vpc_id: a VPC alone does not say where in it the nodes stand. Give subnet_ids, the subnets of that VPC to use, or leave vpc_id out for a network of the module's own."
    }

    precondition {
      condition     = length(local.given_vpcs) <= 1
      error_message = "subnet_ids: the subnets belong to several VPCs (${join(", ", local.given_vpcs)}). Give subnets of one VPC."
    }

    precondition {
      condition     = var.vpc_id == null || length(var.subnet_ids) == 0 || contains(local.given_vpcs, coalesce(var.vpc_id, "-"))
      error_message = "vpc_id: the subnets of subnet_ids belong to ${join(", ", local.given_vpcs)}. Give that one, or leave vpc_id out."
    }

    precondition {
      condition     = length(var.security_group_ids) == 0 || length(var.subnet_ids) > 0
      error_message = "security_group_ids: security groups belong to a VPC that is there already, so subnet_ids must be given too."
    }

    precondition {
      condition     = length(var.security_group_ids) == 0 || length(var.allow_cidrs) == 0
      error_message = "allow_cidrs: with security_group_ids their own rules say who comes in. Leave allow_cidrs out, or leave security_group_ids out for groups of the module's own."
    }

    precondition {
      condition     = length(local.zones_not_here) == 0
      error_message = "zones: ${join(", ", local.zones_not_here)} is not among ${join(", ", local.present)}, the zones of ${local.own_network ? "this region" : "subnet_ids"}."
    }

    precondition {
      condition     = length(distinct(local.arm)) == 1
      error_message = "machine_types: ${local.machines_text}${local.grouped && var.head_image == null ? " and the head's ${var.head_machine_type}" : ""} have different architectures, and share one image. Name types of one architecture${local.grouped ? ", and a head_machine_type or head_image to match" : ""}."
    }

    precondition {
      condition     = !var.spot || !local.reserved
      error_message = "spot: spot instances run in no capacity block or reservation. Leave spot out, or capacity_block_id and capacity_reservation_id."
    }

    precondition {
      condition     = var.capacity_block_id == null || var.capacity_reservation_id == null
      error_message = "capacity_block_id: nodes run in a capacity block or in a capacity reservation, not in both. Leave one out."
    }

    precondition {
      condition     = !local.reserved || !local.grouped
      error_message = "capacity_block_id: nodes in reserved capacity are instances, and no group, which would buy its own on demand. Leave out group and min_nodes and name one machine type, or leave out capacity_block_id and capacity_reservation_id."
    }

    precondition {
      condition     = var.spot || var.spot_max_price == null
      error_message = "spot_max_price: only spot instances have a maximum price. Set spot = true, or leave spot_max_price out."
    }

    precondition {
      condition     = !local.reserved || length(var.machine_types) == 1
      error_message = "machine_types: a capacity block or reservation is for one machine type; ${local.machines_text} are given."
    }

    precondition {
      condition     = !local.reserved || length(var.zones) == 1 || length(var.subnet_ids) == 1
      error_message = "zones: a capacity block or reservation is in one zone. Name that zone, or give one subnet in it."
    }

    precondition {
      condition     = length(local.unknown_efa) == 0
      error_message = "efa_interfaces: ${join(", ", local.unknown_efa)} is not among machine_types (${local.machines_text})."
    }

    precondition {
      condition     = length(var.volumes) == 0 || !local.has_workers
      error_message = "volumes: an EBS volume is attached to one node. Take node_count = 1 and one machine type, and no group."
    }

    precondition {
      condition     = local.has_bucket || !can(regex("@SKYINFRA_BUCKET@", "${var.user_data_head}${var.user_data_worker}"))
      error_message = "versions: the user data name a bucket (@SKYINFRA_BUCKET@), and this pool has none. Give versions and runner_file as `skyinfra render` wrote them, or let the user data hold @SKYINFRA_SECRET@."
    }
  }
}

# The account and region that the pool was made in. With other credentials, or in another region, the provider would find
# nothing of it, and Terraform forget machines that run: no plan is made there.
data "aws_caller_identity" "current" {}

data "aws_region" "current" {}

resource "terraform_data" "place" {
  input = {
    account = data.aws_caller_identity.current.account_id
    region  = data.aws_region.current.id
  }

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = self.input.account == data.aws_caller_identity.current.account_id
      error_message = "The pool is in the account ${self.input.account}, and these credentials are of ${data.aws_caller_identity.current.account_id}, where Terraform would not find it, and forget machines that run. Use credentials of that account, or destroy the pool with them first."
    }

    postcondition {
      condition     = self.input.region == data.aws_region.current.id
      error_message = "The pool is in ${self.input.region}, and the provider is that of ${data.aws_region.current.id}, where Terraform would not find it, and forget machines that run. Destroy the pool in ${self.input.region} first, or give the one in ${data.aws_region.current.id} another name."
    }
  }
}
