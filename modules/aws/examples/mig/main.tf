# Two nodes of eight H100, each GPU with its MIG layout. Nothing of it is Python: what the nodes need to know was rendered
# from declaration/ and stands in rendered/.
#
#   skyinfra render declaration --out rendered
#   terraform init && terraform apply
#
# A changed layout is rendered again and applied: one tag of the head changes, and the nodes repartition in place.

terraform {
  required_version = ">= 1.4"

  required_providers {
    aws = {
      source  = "registry.terraform.io/hashicorp/aws"
      version = ">= 5.100"
    }
  }
}

provider "aws" {
  region      = var.region
  max_retries = 5
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-east-1"
}

locals {
  # The inputs of the module, as rendered; a root of its own could take them with -var-file in the same way.
  pool = jsondecode(file("${path.module}/rendered/examples-mig.tfvars.json"))
}

module "mig" {
  source = "../.."

  name               = local.pool.name
  stack              = local.pool.stack
  node_count         = local.pool.node_count
  machine_types      = local.pool.machine_types
  image              = local.pool.image
  disk_gb            = local.pool.disk_gb
  user_data_head     = file("${path.module}/rendered/examples-mig.head.yaml")
  user_data_worker   = file("${path.module}/rendered/examples-mig.worker.yaml")
  user_data_revision = local.pool.user_data_revision
  versions           = local.pool.versions
  layout             = local.pool.layout
  slots              = local.pool.slots
  efa_interfaces     = local.pool.efa_interfaces
  placement_group    = local.pool.placement_group
  labels             = local.pool.labels
}

output "fleet" {
  description = "The manifest of the fleet."
  value       = module.mig.fleet
  sensitive   = true
}
