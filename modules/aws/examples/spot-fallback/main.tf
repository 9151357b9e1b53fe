# Four spot nodes of whichever of three machine types there is, in the order of preference, behind a small head on
# demand. What the nodes need to know is rendered from a declaration, as in the example `mig`.

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
  region = var.region
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-east-1"
}

variable "user_data_head" {
  description = "User data of the head, as rendered: a scheduler and no slots."
  type        = string
}

variable "user_data_worker" {
  description = "User data of the nodes, as rendered."
  type        = string
}

variable "versions" {
  description = "The versions that the nodes install, as rendered."
  type = object({
    python       = string
    requirements = list(string)
  })
}

variable "runner_file" {
  description = "The runner, as rendered beside the variables; empty where the declaration names one."
  type        = string
  default     = ""
}

module "spot" {
  source = "../.."

  name             = "spot"
  stack            = "examples"
  node_count       = 4
  machine_types    = ["g6.xlarge", "g5.xlarge", "g4dn.xlarge"]
  spot             = true
  spot_max_price   = 0.6
  user_data_head   = var.user_data_head
  user_data_worker = var.user_data_worker
  versions         = var.versions
  runner_file      = var.runner_file
  slots            = [{ index = 0, kind = "gpu", gpu = 0 }]
  # The head has no GPU, so it does without the image of those that have.
  head_machine_type = "m6i.large"
  head_image        = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
  labels            = { example = "spot-fallback" }
}

output "fleet" {
  description = "The manifest of the fleet."
  value       = module.spot.fleet
  sensitive   = true
}

output "group" {
  description = "The Auto Scaling group: what it could not launch, and why, is in its activities."
  value       = "aws autoscaling describe-scaling-activities --auto-scaling-group-name ${module.spot.group}"
}
