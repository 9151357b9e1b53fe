# Two nodes of eight H100, each GPU with its MIG layout. What the nodes need to know is rendered from a declaration: user
# data, slots, layout and revision.
#
#   skyinfra render STACK --out .
#   terraform apply -var-file=STACK-POOL.tfvars.json     # warns of the values that this root does not take from it
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

variable "user_data_head" {
  description = "User data of the head, as rendered."
  type        = string
}

variable "user_data_worker" {
  description = "User data of the other node, as rendered."
  type        = string
}

variable "user_data_revision" {
  description = "What the nodes are replaced for, as rendered: everything in the user data but the layout."
  type        = string
}

variable "layout" {
  description = "The layout as a tag, as rendered."
  type        = string
}

variable "slots" {
  description = "The slots of each node, as rendered."
  type = list(object({
    index       = number
    kind        = string
    accelerator = optional(string)
    profile     = optional(string)
    gpu         = optional(number)
  }))
}

module "mig" {
  source = "../.."

  name               = "mig"
  stack              = "examples"
  node_count         = 2
  machine_types      = ["p5.48xlarge"]
  user_data_head     = var.user_data_head
  user_data_worker   = var.user_data_worker
  user_data_revision = var.user_data_revision
  layout             = var.layout
  slots              = var.slots
  disk_gb            = 500

  # One interface of EFA on each of the 32 cards; on every fourth also with an address.
  placement_group = true
  efa_interfaces = {
    "p5.48xlarge" = [
      for card in range(32) : {
        network_card   = card
        device_index   = card == 0 ? 0 : 1
        interface_type = card % 4 == 0 ? "efa" : "efa-only"
      }
    ]
  }

  labels = { example = "mig" }
}

output "fleet" {
  description = "The manifest of the fleet."
  value       = module.mig.fleet
  sensitive   = true
}
