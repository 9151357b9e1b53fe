locals {
  names = [for index in range(var.node_count) : "${var.name}-${index}"]

  # Spot and fallback lists need a group that goes on trying; everything else is plain instances.
  elastic = var.min_nodes != null
  grouped = local.elastic || (var.group == null ? length(var.machine_types) > 1 || (var.spot && var.node_count > 1) : var.group || length(var.machine_types) > 1)

  head    = local.grouped ? "${var.name}-head" : local.names[0]
  workers = local.grouped ? [] : slice(local.names, 1, length(local.names))

  head_type   = local.grouped ? var.head_machine_type : var.machine_types[0]
  has_workers = local.grouped || length(local.workers) > 0

  # Name prefixes: several stacks, and the same stack in several regions, share the account's names.
  prefix = "skyinfra-${var.name}-"
  title  = "${var.stack}/${var.name}"
  tags   = merge(var.labels, { "skyinfra:stack" = var.stack, "skyinfra:pool" = var.name })
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle {
    ignore_changes = [triggers_replace]
  }
}

module "core" {
  source     = "../core"
  head_apart = local.grouped
  secret     = terraform_data.secret
  places = {
    head   = "${aws_network_interface.head.private_ip}:${var.scheduler_port}"
    bucket = local.bucket_url
    runner = local.runner_url
  }
  volume = aws_ebs_volume.head.id
  limit  = { bytes = 16384, gzip = true, called = "EC2" }
  pool = {
    name             = var.name
    stack            = var.stack
    node_count       = var.node_count
    user_data_head   = var.user_data_head
    user_data_worker = var.user_data_worker
    runner_file      = var.runner_file
    versions         = var.versions
    scheduler_port   = var.scheduler_port
    slots            = var.slots
    volumes          = var.volumes
  }
}

# What the path of an SSM parameter names changes with every release of the image. A node keeps the AMI it was made
# with until `image` itself changes.
resource "terraform_data" "image" {
  for_each = local.images

  input            = local.amis[each.key]
  triggers_replace = each.value

  lifecycle {
    ignore_changes = [input]
  }
}

locals {
  images = merge({ nodes = var.image }, local.grouped ? { head = coalesce(var.head_image, var.image) } : {})
  amis   = { for role, image in local.images : role => try(data.aws_ssm_parameter.image[role].insecure_value, image) }
}

data "aws_ssm_parameter" "image" {
  for_each = { for role, image in local.images : role => image if startswith(image, "/") }

  name = each.value
}

# What a node is replaced for, besides what EC2 cannot change on an instance. Its user data are not among it: they
# carry the layout the node begins with, and a changed layout reaches running nodes in place. The market options are:
# the provider reads those of a capacity block back as none, and would replace the node at every apply.
# The secret and the address at which the head is found are told to Terraform where the nodes are. (Up to 0.1.0 this was
# terraform_data.identity, with another kind of revision: a name of its own, so that it is made and replaces nothing.)
resource "terraform_data" "declared" {
  for_each = toset(local.has_workers ? ["head", "worker"] : ["head"])

  triggers_replace = concat([
    coalesce(var.user_data_revision, sha256(each.key == "head" ? var.user_data_head : var.user_data_worker)),
    terraform_data.image[each.key == "head" && local.grouped ? "head" : "nodes"].id,
    # A group gives the rest to the nodes it launches from then on.
    local.grouped ? "" : jsonencode([var.efa_interfaces, var.spot, var.spot_max_price, var.capacity_block_id, var.capacity_reservation_id]),
    # EC2 stops and starts an instance for another machine type, and stops no one-time spot instance.
    !local.grouped && var.spot ? var.machine_types[0] : "",
    # It stands in what a node was made from: where the head listens, and where the others look for it.
    var.scheduler_port,
    # Their ids stand there too.
  ], each.key == "head" ? var.volumes[*].id : [])
}

# The caller's security groups of the workers: EC2 takes them when it makes the interface of a node.
resource "terraform_data" "security_groups" {
  count = length(local.workers) > 0 ? 1 : 0

  triggers_replace = var.security_group_ids
}

resource "aws_instance" "head" {
  ami                         = terraform_data.image[local.grouped ? "head" : "nodes"].output
  instance_type               = local.head_type
  iam_instance_profile        = local.instance_profile
  key_name                    = one(aws_key_pair.this[*].key_name)
  placement_group             = local.grouped ? null : local.placement_group
  user_data_base64            = base64gzip(replace(replace(module.core.user_data_head, "@SKYINFRA_NODE@", local.head), "@SKYINFRA_VOLUMES@", join(" ", var.volumes[*].id)))
  user_data_replace_on_change = false
  # A stopped instance keeps disks that cost something, and no plan would start it: a node that ends itself is gone.
  instance_initiated_shutdown_behavior = var.shutdown_terminates ? "terminate" : null

  launch_template {
    id      = aws_launch_template.interfaces["head"].id
    version = aws_launch_template.interfaces["head"].latest_version
  }

  dynamic "instance_market_options" {
    for_each = local.grouped ? [] : local.market_options

    content {
      market_type = instance_market_options.value

      dynamic "spot_options" {
        for_each = instance_market_options.value == "spot" ? [1] : []

        content {
          max_price                      = var.spot_max_price
          spot_instance_type             = "one-time"
          instance_interruption_behavior = "terminate"
        }
      }
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = local.reservation[*]

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    # The head reads the wanted layout from its tag.
    instance_metadata_tags = "enabled"
  }

  root_block_device {
    encrypted   = true
    kms_key_id  = var.kms_key_id
    volume_type = "gp3"
    volume_size = local.grouped || var.disk_gb == 0 ? null : var.disk_gb
    tags        = merge(local.tags, { Name = "${var.stack}/${local.head}" })
  }

  tags = merge(
    local.tags,
    { Name = "${var.stack}/${local.head}", "skyinfra:node" = local.head, "skyinfra:role" = "head" },
    var.layout == "" ? {} : { "skyinfra:layout" = var.layout },
    # Which group the head may ask for more nodes, and within which bounds: a change reaches it while it runs.
    local.elastic ? { "skyinfra:group" = "${aws_autoscaling_group.workers[0].name} ${coalesce(var.min_nodes, 0)} ${var.node_count}" } : {},
  )

  lifecycle {
    ignore_changes       = [user_data_base64, launch_template, instance_market_options]
    replace_triggered_by = [terraform_data.declared["head"], terraform_data.secret.id, aws_network_interface.head.id, aws_ebs_volume.head.id]
  }

  # Its first boot fetches the runner and packages, so the way to them is there before it is.
  depends_on = [
    aws_eip.head,
    aws_route_table_association.public,
    aws_vpc_security_group_egress_rule.nodes,
    aws_s3_bucket_policy.runner,
    aws_s3_object.secret,
    aws_s3_object.versions,
    aws_s3_object.runner,
    aws_iam_role_policy.session_manager,
    # A node that ends writes what it has not written yet.
    aws_iam_role_policy.buckets,
    terraform_data.offered,
  ]
}

resource "aws_instance" "worker" {
  for_each = toset(local.workers)

  ami                         = terraform_data.image["nodes"].output
  instance_type               = var.machine_types[0]
  iam_instance_profile        = local.instance_profile
  key_name                    = one(aws_key_pair.this[*].key_name)
  placement_group             = local.placement_group
  user_data_base64            = base64gzip(replace(module.core.user_data_worker, "@SKYINFRA_NODE@", each.key))
  user_data_replace_on_change = false
  # A stopped instance keeps disks that cost something, and no plan would start it: a node that ends itself is gone.
  instance_initiated_shutdown_behavior = var.shutdown_terminates ? "terminate" : null

  launch_template {
    id      = aws_launch_template.interfaces["worker"].id
    version = aws_launch_template.interfaces["worker"].latest_version
  }

  dynamic "instance_market_options" {
    for_each = local.market_options

    content {
      market_type = instance_market_options.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = local.reservation[*]

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  root_block_device {
    encrypted   = true
    kms_key_id  = var.kms_key_id
    volume_type = "gp3"
    volume_size = var.disk_gb == 0 ? null : var.disk_gb
    tags        = merge(local.tags, { Name = "${var.stack}/${each.key}" })
  }

  tags = merge(local.tags, { Name = "${var.stack}/${each.key}", "skyinfra:node" = each.key, "skyinfra:role" = "worker" })

  lifecycle {
    ignore_changes       = [user_data_base64, launch_template, instance_market_options]
    replace_triggered_by = [terraform_data.declared["worker"], terraform_data.secret.id, aws_network_interface.head.id, terraform_data.security_groups]
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
    terraform_data.offered,
  ]
}

locals {
  # Spot with several nodes is a group, which has its own way to say so.
  market_options  = var.spot ? ["spot"] : var.capacity_block_id != null ? ["capacity-block"] : []
  reservation     = var.capacity_block_id != null ? var.capacity_block_id : var.capacity_reservation_id
  placement_group = one(aws_placement_group.this[*].name)
}

resource "aws_placement_group" "this" {
  count = var.placement_group ? 1 : 0

  # With a part of its own, for two fleets of one name.
  name     = "skyinfra-${var.stack}-${var.name}-${substr(terraform_data.secret.id, 0, 8)}"
  strategy = "cluster"
  tags     = merge(local.tags, { Name = local.title })

  lifecycle {
    ignore_changes = [name]
  }
}

resource "aws_key_pair" "this" {
  count = var.ssh_public_key == "" ? 0 : 1

  key_name_prefix = local.prefix
  public_key      = trimspace(var.ssh_public_key)
  tags            = merge(local.tags, { Name = local.title })
}
