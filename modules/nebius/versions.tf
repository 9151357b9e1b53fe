terraform {
  required_version = ">= 1.4"

  required_providers {
    nebius = {
      source = "registry.terraform.io/nebius/nebius"
      # From 0.6 on its instances have managed disks.
      version = ">= 0.6.32, < 1.0.0"
    }
    tls = {
      source  = "registry.terraform.io/hashicorp/tls"
      version = ">= 4.0.0, < 5.0.0"
    }
  }
}
