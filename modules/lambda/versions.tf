terraform {
  required_version = ">= 1.4"

  required_providers {
    lambdalabs = {
      source  = "registry.terraform.io/elct9620/lambdalabs"
      version = ">= 0.8.0, < 1.0.0"
    }
  }
}
