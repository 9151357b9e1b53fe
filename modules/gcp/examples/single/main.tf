# One L4 on demand, reached through Identity-Aware Proxy: no port is open.
#
#   skyinfra render --out . writes the user data, the runner, and what it needs, of a declared pool
#   terraform apply -var project=PROJECT -var user_data_head="$(cat POOL.head.yaml)" -var runner_file=WHEEL ...
#   terraform output -json fleet > fleet.json        # holds the fleet secret
#   python -c 'import skyinfra as sky; print(sky.connect("fleet.json").slots())'

terraform {
  required_version = ">= 1.4"

  required_providers {
    google = {
      source  = "registry.terraform.io/hashicorp/google"
      version = ">= 7.45"
    }
  }
}

provider "google" {
  project = var.project
  region  = "us-central1"
}

variable "project" {
  description = "Id of the project."
  type        = string
}

variable "user_data_head" {
  description = "User data of the node, as rendered."
  type        = string
}

variable "versions" {
  description = "The versions that the node installs, as rendered."
  type = object({
    python       = string
    requirements = list(string)
  })
}

variable "runner_file" {
  description = "The runner, as rendered beside the variables: a compressed wheel."
  type        = string
}

module "single" {
  source = "../.."

  name           = "single"
  stack          = "examples"
  machine_types  = ["g2-standard-4"]
  user_data_head = var.user_data_head
  versions       = var.versions
  runner_file    = var.runner_file
  slots          = [{ index = 0, kind = "gpu", accelerator = "L4", gpu = 0 }]
  labels         = { example = "single" }
}

output "fleet" {
  description = "The manifest of the fleet."
  value       = module.single.fleet
  sensitive   = true
}
