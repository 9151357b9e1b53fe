terraform {
  required_version = ">= 1.6"

  required_providers {
    runpod = {
      source  = "registry.terraform.io/runpod/runpod"
      version = "~> 2.0"
    }
  }
}
