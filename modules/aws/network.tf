# Where the nodes stand. With subnet_ids the network is the caller's; otherwise a small one of the module's own: a public
# subnet in every zone that is used, and, where nodes have several network interfaces, a private one behind a NAT
# gateway, since EC2 gives such a node no public address.

data "aws_ec2_instance_type_offerings" "nodes" {
  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = var.machine_types
  }
}

data "aws_ec2_instance_type_offerings" "head" {
  count = local.grouped ? 1 : 0

  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = [var.head_machine_type]
  }
}

# Local Zones and Wavelength Zones are left out: they have to be opted into. An impaired zone is not: nodes stand in it.
data "aws_availability_zones" "all" {
  count = local.own_network ? 1 : 0

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_subnet" "given" {
  count = length(var.subnet_ids)

  id = var.subnet_ids[count.index]
}

locals {
  own_network = length(var.subnet_ids) == 0
  vpc_id      = local.own_network ? one(aws_vpc.this[*].id) : data.aws_subnet.given[0].vpc_id

  offered      = toset(data.aws_ec2_instance_type_offerings.nodes.locations)
  head_offered = local.grouped ? toset(data.aws_ec2_instance_type_offerings.head[0].locations) : local.offered

  present    = local.own_network ? sort(one(data.aws_availability_zones.all[*].names)) : distinct(data.aws_subnet.given[*].availability_zone)
  considered = [for zone in(length(var.zones) > 0 ? var.zones : local.present) : zone if contains(local.present, zone)]
  # The zones of the nodes and of the head, in order of preference.
  zones      = [for zone in local.considered : zone if contains(local.offered, zone)]
  head_zones = [for zone in local.considered : zone if contains(local.head_offered, zone)]

  # Traffic of EFA and of a cluster placement group stays in one zone, so the group of such nodes does too.
  one_zone = var.placement_group || length(var.efa_interfaces) > 0
  choices = merge(
    { head = { zone = try(local.head_zones[0], ""), types = local.grouped ? [var.head_machine_type] : var.machine_types, offered = local.head_offered } },
    local.grouped && local.one_zone ? { group = { zone = try(local.zones[0], ""), types = var.machine_types, offered = local.offered } } : {},
  )
  considered_text = length(local.considered) == 0 ? "no zone" : join(", ", local.considered)
}

# The zone of the head and of all instances. It is kept, whatever AWS offers where from then on: nodes that run are not
# moved, and can be destroyed, for what a list of zones says.
resource "terraform_data" "zone" {
  for_each = local.choices

  input = each.value.zone

  lifecycle {
    ignore_changes = [input, triggers_replace]

    postcondition {
      condition     = self.input != ""
      error_message = "${each.key == "head" && local.grouped ? "head_machine_type" : "machine_types"}: ${join(", ", each.value.types)} is offered in ${length(each.value.offered) == 0 ? "no zone of this region" : join(", ", sort(each.value.offered))}, but not in ${local.considered_text}. Choose another zone, subnet, region or machine type."
    }

    postcondition {
      condition     = self.input == "" || contains(local.considered, self.input)
      error_message = "zones: the nodes stand in ${self.input}, which is not among ${local.considered_text}. ${startswith(self.input, data.aws_region.current.id) ? "Name it too, or move the nodes, which ends what runs on them: -replace='module.NAME.terraform_data.zone[\"${each.key}\"]'." : "That is another region, where Terraform does not find them: destroy them with the region that they are in first."}"
    }
  }

  depends_on = [terraform_data.checks]
}

# Whether that zone offers the machine types, when they are chosen.
resource "terraform_data" "offered" {
  for_each = local.choices

  input            = length(setintersection(each.value.offered, [terraform_data.zone[each.key].output])) > 0
  triggers_replace = each.value.types

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = self.input
      error_message = "${each.key == "head" && local.grouped ? "head_machine_type" : "machine_types"}: ${join(", ", each.value.types)} is offered in ${length(each.value.offered) == 0 ? "no zone of this region" : join(", ", sort(each.value.offered))}, but not in ${terraform_data.zone[each.key].output}, where the nodes stand. ${startswith(terraform_data.zone[each.key].output, data.aws_region.current.id) ? "Choose another machine type, or move the nodes, which ends what runs on them: -replace='module.NAME.terraform_data.zone[\"${each.key}\"]'." : "That is another region, where Terraform does not find them: destroy them with the region that they are in first."}"
    }
  }
}

# The zones of a group. They are kept until its machine types or its zones are declared anew, which moves no node that
# stands in one of the new ones.
resource "terraform_data" "group_zones" {
  count = local.grouped && !local.one_zone ? 1 : 0

  input            = local.zones
  triggers_replace = [var.machine_types, var.zones, var.subnet_ids]

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = length(self.input) > 0
      error_message = "machine_types: ${local.machines_text} is offered in ${local.offered_text}, but not in ${local.considered_text}. Choose another zone, subnet, region or machine type."
    }
  }
}

locals {
  # Every zone that may be used, whatever it offers: a subnet costs nothing, and stays under the nodes in it.
  public_zones  = local.own_network ? toset(local.considered) : toset([])
  private       = local.own_network && local.has_workers && anytrue([for type in var.machine_types : length(local.interfaces[type]) > 1])
  private_zones = local.private ? toset(local.considered) : toset([])

  # One subnet for each zone; of several given in one zone the first.
  given           = { for subnet in data.aws_subnet.given : subnet.availability_zone => subnet.id... }
  head_subnets    = local.own_network ? { for zone, subnet in aws_subnet.public : zone => subnet.id } : { for zone, ids in local.given : zone => ids[0] }
  worker_subnets  = local.private ? { for zone, subnet in aws_subnet.private : zone => subnet.id } : local.head_subnets
  head_subnet     = lookup(local.head_subnets, terraform_data.zone["head"].output, null)
  instance_subnet = lookup(local.worker_subnets, terraform_data.zone["head"].output, null)

  # A subnet keeps its addresses when zones come and go, so its number is that of the zone's letter.
  numbers = { for index, letter in split("", "abcdefgh") : letter => index }
}

resource "aws_vpc" "this" {
  count = local.own_network ? 1 : 0

  cidr_block           = var.vpc_cidr
  enable_dns_hostnames = true
  tags                 = merge(local.tags, { Name = local.title })
}

# Nothing uses the group that EC2 makes with a VPC: without rules, nothing gets through it.
resource "aws_default_security_group" "this" {
  count = local.own_network ? 1 : 0

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${local.title}/unused" })
}

resource "aws_internet_gateway" "this" {
  count = local.own_network ? 1 : 0

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = local.title })
}

resource "aws_subnet" "public" {
  for_each = local.public_zones

  vpc_id            = aws_vpc.this[0].id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.vpc_cidr, 4, local.numbers[substr(each.key, -1, 1)])
  tags              = merge(local.tags, { Name = "${local.title}/public/${each.key}" })
}

resource "aws_route_table" "public" {
  count = local.own_network ? 1 : 0

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${local.title}/public" })
}

resource "aws_route" "internet" {
  count = local.own_network ? 1 : 0

  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  for_each = local.public_zones

  subnet_id      = aws_subnet.public[each.key].id
  route_table_id = aws_route_table.public[0].id

  depends_on = [aws_route.internet]
}

resource "aws_subnet" "private" {
  for_each = local.private_zones

  vpc_id            = aws_vpc.this[0].id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.vpc_cidr, 4, 8 + local.numbers[substr(each.key, -1, 1)])
  tags              = merge(local.tags, { Name = "${local.title}/private/${each.key}" })
}

resource "aws_eip" "nat" {
  count = local.private ? 1 : 0

  domain = "vpc"
  tags   = merge(local.tags, { Name = "${local.title}/nat" })

  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  count = local.private ? 1 : 0

  allocation_id = aws_eip.nat[0].id
  subnet_id     = local.head_subnet
  tags          = merge(local.tags, { Name = local.title })

  depends_on = [aws_route_table_association.public]
}

resource "aws_route_table" "private" {
  count = local.private ? 1 : 0

  vpc_id = aws_vpc.this[0].id
  tags   = merge(local.tags, { Name = "${local.title}/private" })
}

resource "aws_route" "nat" {
  count = local.private ? 1 : 0

  route_table_id         = aws_route_table.private[0].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

resource "aws_route_table_association" "private" {
  for_each = local.private_zones

  subnet_id      = aws_subnet.private[each.key].id
  route_table_id = aws_route_table.private[0].id
}

# What nodes read from S3 does not pay for the NAT gateway.
resource "aws_vpc_endpoint" "s3" {
  count = local.private ? 1 : 0

  vpc_id          = aws_vpc.this[0].id
  service_name    = "com.amazonaws.${data.aws_region.current.id}.s3"
  route_table_ids = [aws_route_table.private[0].id]
  tags            = merge(local.tags, { Name = "${local.title}/s3" })
}
