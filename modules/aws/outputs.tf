output "fleet" {
  description = "The manifest of the fleet, version 1: what a client needs to reach it. Holds the fleet secret."
  sensitive   = true
  value = merge(module.core.fleet, {
    provider = "aws"
    account  = terraform_data.place.output.account
    head = {
      address = local.reached
      port    = var.scheduler_port
    }
    # The nodes of an Auto Scaling group come and go without Terraform; the scheduler knows them.
    nodes = [for name in concat([local.head], local.workers) : {
      name           = name
      id             = local.instances[name].id
      address        = name == local.head ? aws_network_interface.head.private_ip : local.instances[name].private_ip
      public_address = name == local.head ? one(aws_eip.head[*].public_ip) : try(coalesce(local.instances[name].public_ip), null)
      zone           = local.instances[name].availability_zone
      machine_type   = name == local.head ? local.head_type : var.machine_types[0]
      head           = name == local.head
    }]
    group_nodes                    = local.elastic ? coalesce(var.min_nodes, 0) : local.grouped ? var.node_count : 0
    }, local.elastic ? { max_nodes = var.node_count } : {}, {
    # A client that does not reach that address goes through Session Manager.
    for name, via in { via = { kind = "ssm", target = aws_instance.head.id, region = terraform_data.place.output.region } } : name => via if length(var.allow_cidrs) == 0
  })
}

locals {
  instances = merge({ (local.head) = aws_instance.head }, aws_instance.worker)

  # Where nobody outside is let in, the head's own address is the one to reach it by: from its network, or through
  # Session Manager.
  reached = length(var.allow_cidrs) > 0 ? coalesce(one(aws_eip.head[*].public_ip), aws_network_interface.head.private_ip) : aws_network_interface.head.private_ip
}

output "head" {
  description = "The head: instance id (for Session Manager), private address, and public address where it has one."
  value = {
    instance_id = aws_instance.head.id
    private_ip  = aws_network_interface.head.private_ip
    public_ip   = one(aws_eip.head[*].public_ip)
  }
}

output "group" {
  description = "Name of the Auto Scaling group of the workers; null where the workers are instances."
  value       = one(aws_autoscaling_group.workers[*].name)
}

output "network" {
  description = "The network the nodes stand in: VPC and subnets, one a zone. Another pool can take them as its vpc_id and subnet_ids."
  value = {
    vpc_id     = local.vpc_id
    subnet_ids = values(local.head_subnets)
  }
}

output "access" {
  description = "The security groups of the nodes, and the role and instance profile that the module made; null where they are the caller's."
  value = {
    security_group_ids = local.security_groups
    role_name          = one(aws_iam_role.this[*].name)
    role_arn           = one(aws_iam_role.this[*].arn)
    instance_profile   = local.instance_profile
  }
}
