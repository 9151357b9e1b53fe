# One H100 on demand, reached through the scheduler's port from one network.
#
#   terraform apply -var 'allow_cidrs=["203.0.113.7/32"]'
#   terraform output -json fleet > fleet.json        # holds the fleet secret
#   python -c 'import skyinfra as sky; print(sky.connect("fleet.json").slots())'

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
  # The provider repeats a refused launch 25 times; this says within a minute that there is no capacity.
  max_retries = 5
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-east-1"
}

variable "allow_cidrs" {
  description = "Networks that may reach the scheduler."
  type        = list(string)
  default     = []
}

module "single" {
  source = "../.."

  name           = "single"
  stack          = "examples"
  machine_types  = ["p5.4xlarge"]
  user_data_head = file("${path.module}/head.yaml")
  slots          = [{ index = 0, kind = "gpu", accelerator = "H100", gpu = 0 }]
  allow_cidrs    = var.allow_cidrs
  labels         = { example = "single" }
}

output "fleet" {
  description = "The manifest of the fleet."
  value       = module.single.fleet
  sensitive   = true
}

output "session" {
  description = "A shell on the node, with no port open."
  value       = "aws ssm start-session --target ${module.single.head.instance_id}"
}
