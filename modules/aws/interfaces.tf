# The network interfaces. That of the head is a resource of its own: the head keeps its address when it is replaced, so
# the other nodes find it again. The others come and go with their node, through a launch template, which is the one
# place where EC2 takes several cards and tags for them.

locals {
  plain      = [{ network_card = 0, device_index = 0, interface_type = "interface" }]
  interfaces = { for type in distinct(concat(var.machine_types, [local.head_type])) : type => lookup(var.efa_interfaces, type, local.plain) }
}

resource "aws_network_interface" "head" {
  subnet_id       = local.head_subnet
  security_groups = concat(local.security_groups, aws_security_group.head[*].id)
  description     = "skyinfra ${local.title}: the head"
  interface_type  = local.interfaces[local.head_type][0].interface_type == "efa" ? "efa" : null
  tags            = merge(local.tags, { Name = "${var.stack}/${local.head}" })
}

resource "aws_eip" "head" {
  count = local.own_network || var.head_public_ip ? 1 : 0

  domain            = "vpc"
  network_interface = aws_network_interface.head.id
  tags              = merge(local.tags, { Name = "${var.stack}/${local.head}" })

  depends_on = [aws_internet_gateway.this]
}

resource "aws_launch_template" "interfaces" {
  for_each = toset(concat(["head"], length(local.workers) > 0 ? ["worker"] : []))

  name_prefix = "${local.prefix}${each.key}-"

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  dynamic "network_interfaces" {
    for_each = local.interfaces[each.key == "head" ? local.head_type : var.machine_types[0]]

    content {
      # Terraform's own interface for the head's first card; on every other card a new one.
      network_interface_id        = each.key == "head" && network_interfaces.key == 0 ? aws_network_interface.head.id : null
      subnet_id                   = each.key == "head" ? (network_interfaces.key == 0 ? null : aws_network_interface.head.subnet_id) : local.instance_subnet
      security_groups             = each.key == "head" && network_interfaces.key == 0 ? null : local.security_groups
      delete_on_termination       = each.key == "head" && network_interfaces.key == 0 ? "false" : "true"
      associate_public_ip_address = each.key == "worker" && network_interfaces.key == 0 && local.own_network && !local.private ? "true" : null
      device_index                = network_interfaces.value.device_index
      network_card_index          = network_interfaces.value.network_card
      interface_type              = network_interfaces.value.interface_type == "interface" || (each.key == "head" && network_interfaces.key == 0) ? null : network_interfaces.value.interface_type
    }
  }

  tag_specifications {
    resource_type = "network-interface"
    tags          = merge(local.tags, { Name = local.title })
  }

  tags = merge(local.tags, { Name = local.title })
}
