# Who reaches the nodes, and what the nodes may do.

locals {
  own_groups      = length(var.security_group_ids) == 0
  security_groups = local.own_groups ? aws_security_group.nodes[*].id : var.security_group_ids
  open_ports      = local.own_groups ? setunion([var.scheduler_port], var.ssh_public_key == "" ? [] : [22]) : []
  openings        = { for pair in setproduct(local.open_ports, var.allow_cidrs) : "${pair[0]} ${pair[1]}" => { port = pair[0], cidr = pair[1] } }
}

resource "aws_security_group" "nodes" {
  count = local.own_groups ? 1 : 0

  name_prefix = local.prefix
  description = "skyinfra ${local.title}: the nodes reach each other"
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = local.title })

  lifecycle {
    create_before_destroy = true
    ignore_changes        = [description]
  }
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  count = local.own_groups ? 1 : 0

  security_group_id            = aws_security_group.nodes[0].id
  referenced_security_group_id = aws_security_group.nodes[0].id
  ip_protocol                  = "-1"
  description                  = "between the nodes"
  tags                         = local.tags
}

# EFA needs the group named; an open network is not enough for it.
resource "aws_vpc_security_group_egress_rule" "efa" {
  count = local.own_groups ? 1 : 0

  security_group_id            = aws_security_group.nodes[0].id
  referenced_security_group_id = aws_security_group.nodes[0].id
  ip_protocol                  = "-1"
  description                  = "between the nodes, EFA included"
  tags                         = local.tags
}

resource "aws_vpc_security_group_egress_rule" "nodes" {
  count = local.own_groups ? 1 : 0

  security_group_id = aws_security_group.nodes[0].id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
  description       = "packages, images and data"
  tags              = local.tags
}

resource "aws_security_group" "head" {
  count = local.own_groups ? 1 : 0

  name_prefix = "${local.prefix}head-"
  description = "skyinfra ${local.title}: who reaches the head"
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = "${local.title}/head" })

  lifecycle {
    create_before_destroy = true
    ignore_changes        = [description]
  }
}

resource "aws_vpc_security_group_ingress_rule" "head" {
  for_each = local.openings

  security_group_id = aws_security_group.head[0].id
  cidr_ipv4         = can(regex(":", each.value.cidr)) ? null : each.value.cidr
  cidr_ipv6         = can(regex(":", each.value.cidr)) ? each.value.cidr : null
  ip_protocol       = "tcp"
  from_port         = each.value.port
  to_port           = each.value.port
  description       = each.value.port == var.scheduler_port ? "scheduler" : "ssh"
  tags              = local.tags
}

locals {
  own_profile      = var.iam_instance_profile == null
  instance_profile = local.own_profile ? one(aws_iam_instance_profile.this[*].name) : var.iam_instance_profile
  # IAM takes keys that differ in case alone for one: a label `name` is left out there.
  iam_tags = merge({ for key, value in local.tags : key => value if lower(key) != "name" }, { Name = local.title })
}

data "aws_partition" "current" {
  count = local.own_profile ? 1 : 0
}

locals {
  # IAM of the European Sovereign Cloud takes no ec2.amazonaws.eu: pulumi/pulumi-eks#2341.
  principals = !local.own_profile ? "" : data.aws_partition.current[0].partition == "aws-eusc" ? "amazonaws.com" : data.aws_partition.current[0].dns_suffix
}

resource "aws_iam_role" "this" {
  count = local.own_profile ? 1 : 0

  # IAM takes 38 characters here.
  name_prefix          = substr("skyinfra-${var.name}-", 0, 38)
  path                 = var.iam_path
  permissions_boundary = var.permissions_boundary
  description          = "skyinfra ${local.title}: Session Manager on the nodes"
  tags                 = local.iam_tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.${local.principals}" }
    }]
  })
}

# Session Manager and the key of the bucket, nothing else: AmazonSSMManagedInstanceCore reads every parameter of the
# account. The bucket itself lets the role in.
resource "aws_iam_role_policy" "session_manager" {
  count = local.own_profile ? 1 : 0

  name = "session-manager"
  role = aws_iam_role.this[0].name

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat([{
      Effect = "Allow"
      Action = [
        "ec2messages:AcknowledgeMessage",
        "ec2messages:DeleteMessage",
        "ec2messages:FailMessage",
        "ec2messages:GetEndpoint",
        "ec2messages:GetMessages",
        "ec2messages:SendReply",
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
      ]
      Resource = "*"
      }], [for key in var.kms_key_id[*] : {
      Effect    = "Allow"
      Action    = ["kms:Decrypt"]
      Resource  = key
      Condition = { StringLike = { "kms:ViaService" = "s3.*" } }
    }])
  })
}

# A node of a group ends itself, and no other node: the group would start one in place of a machine that shuts down. Where
# the size follows the work, the head raises it.
resource "aws_iam_role_policy" "end" {
  count = local.own_profile && local.grouped && (var.shutdown_terminates || local.elastic) ? 1 : 0

  name = "end"
  role = aws_iam_role.this[0].name

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = concat(["autoscaling:TerminateInstanceInAutoScalingGroup"], local.elastic ? ["autoscaling:SetDesiredCapacity"] : [])
      Resource = aws_autoscaling_group.workers[0].arn
    }]
  })
}

# What nodes mount. Mounting lists, and whether an object is there is answered only to who may list its bucket.
resource "aws_iam_role_policy" "buckets" {
  count = local.own_profile && length(var.buckets) > 0 ? 1 : 0

  name = "buckets"
  role = aws_iam_role.this[0].name

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = flatten([for each in var.buckets : [
      {
        Effect   = "Allow"
        Action   = ["s3:ListBucket"]
        Resource = "arn:${data.aws_partition.current[0].partition}:s3:::${each.bucket}"
      },
      {
        Effect   = "Allow"
        Action   = concat(["s3:GetObject"], each.write ? ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"] : [])
        Resource = "arn:${data.aws_partition.current[0].partition}:s3:::${each.bucket}/${each.prefix == "" ? "" : "${each.prefix}/"}*"
      },
    ]])
  })
}

resource "aws_iam_instance_profile" "this" {
  count = local.own_profile ? 1 : 0

  name_prefix = local.prefix
  path        = var.iam_path
  role        = aws_iam_role.this[0].name
  tags        = local.iam_tags
}
