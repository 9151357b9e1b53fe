# The workers of spot pools and of pools with a fallback list: an Auto Scaling group that tries the machine types in
# their order, and goes on trying.

locals {
  # Machine types with the same interfaces share a launch template; each with EFA has its own.
  templates = local.grouped ? { for type in var.machine_types : (contains(keys(var.efa_interfaces), type) ? type : "plain") => type... } : {}
  # One zone where the nodes must be close, else every zone that offers one of the types.
  group_zones   = !local.grouped ? [] : local.one_zone ? [terraform_data.zone["group"].output] : terraform_data.group_zones[0].output
  group_subnets = [for zone in local.group_zones : local.worker_subnets[zone] if contains(keys(local.worker_subnets), zone)]
}

# The name that the image gives its root volume.
data "aws_ami" "nodes" {
  count = local.grouped ? 1 : 0

  # An image of the caller's choice may be an old one.
  include_deprecated = true

  filter {
    name   = "image-id"
    values = [local.amis["nodes"]]
  }
}

resource "aws_launch_template" "group" {
  for_each = local.templates

  name_prefix            = local.prefix
  ebs_optimized          = "true"
  image_id               = terraform_data.image["nodes"].output
  instance_type          = each.value[0]
  key_name               = one(aws_key_pair.this[*].key_name)
  user_data              = base64gzip(replace(module.core.user_data_worker, "@SKYINFRA_NODE@", "${var.name}-asg"))
  update_default_version = true

  iam_instance_profile {
    name = local.instance_profile
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  block_device_mappings {
    device_name = data.aws_ami.nodes[0].root_device_name

    ebs {
      encrypted             = "true"
      kms_key_id            = var.kms_key_id
      volume_type           = "gp3"
      volume_size           = var.disk_gb == 0 ? null : var.disk_gb
      delete_on_termination = "true"
    }
  }

  dynamic "placement" {
    for_each = local.placement_group[*]

    content {
      group_name = placement.value
    }
  }

  dynamic "network_interfaces" {
    for_each = local.interfaces[each.value[0]]

    content {
      security_groups             = local.security_groups
      delete_on_termination       = "true"
      associate_public_ip_address = network_interfaces.key == 0 && local.own_network && !local.private ? "true" : null
      device_index                = network_interfaces.value.device_index
      network_card_index          = network_interfaces.value.network_card
      interface_type              = network_interfaces.value.interface_type == "interface" ? null : network_interfaces.value.interface_type
    }
  }

  dynamic "tag_specifications" {
    for_each = ["volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${var.stack}/${var.name}-asg" })
    }
  }

  tags = merge(local.tags, { Name = local.title })

  lifecycle {
    ignore_changes       = [user_data]
    replace_triggered_by = [terraform_data.declared["worker"], terraform_data.secret.id, aws_network_interface.head.id]
  }
}

resource "aws_autoscaling_group" "workers" {
  count = local.grouped ? 1 : 0

  name_prefix = local.prefix
  # Nodes that end themselves lower the desired capacity, which the next deploy raises again. The head holds the least:
  # a group that did would start other nodes for ever once the head has ended.
  min_size = local.elastic || var.shutdown_terminates ? 0 : var.node_count
  max_size = var.node_count
  # Null is what the group has: the head raises it, and nodes that end lower it.
  desired_capacity    = local.elastic ? null : var.node_count
  vpc_zone_identifier = local.group_subnets
  capacity_rebalance  = var.spot
  # Only a node itself knows that it has no task: the group ends none for a smaller size, nor to balance its zones.
  protect_from_scale_in = local.elastic ? true : null
  suspended_processes   = local.elastic ? ["AZRebalance"] : null
  # A group that is destroyed ends them all the same.
  force_delete = local.elastic ? true : null
  # Capacity may take days. A create that gives up waiting would be replaced by the next apply, with the nodes it got.
  wait_for_capacity_timeout = "0"

  # Machines with much memory take their time to end.
  timeouts {
    delete = "30m"
  }

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = var.spot ? 0 : 100
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "capacity-optimized-prioritized"
      spot_max_price                           = var.spot_max_price
    }

    launch_template {
      launch_template_specification {
        launch_template_id = values(aws_launch_template.group)[0].id
        version            = values(aws_launch_template.group)[0].latest_version
      }

      dynamic "override" {
        for_each = var.machine_types

        content {
          instance_type = override.value

          launch_template_specification {
            launch_template_id = aws_launch_template.group[contains(keys(var.efa_interfaces), override.value) ? override.value : "plain"].id
            version            = aws_launch_template.group[contains(keys(var.efa_interfaces), override.value) ? override.value : "plain"].latest_version
          }
        }
      }
    }
  }

  dynamic "tag" {
    for_each = merge(local.tags, { Name = "${var.stack}/${var.name}-asg", "skyinfra:role" = "worker" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    replace_triggered_by = [terraform_data.declared["worker"], terraform_data.secret.id, aws_network_interface.head.id]
  }

  depends_on = [
    aws_route_table_association.public,
    aws_route_table_association.private,
    aws_route.nat,
    aws_vpc_security_group_egress_rule.nodes,
    aws_s3_bucket_policy.runner,
    aws_s3_object.secret,
    aws_s3_object.versions,
    aws_s3_object.runner,
    aws_iam_role_policy.session_manager,
    # A node that ends writes what it has not written yet.
    aws_iam_role_policy.buckets,
  ]
}
