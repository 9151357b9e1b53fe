terraform {
  required_version = ">= 1.4"

  required_providers {
    scaleway = {
      source  = "registry.terraform.io/scaleway/scaleway"
      version = ">= 2.50.0, < 3.0.0"
    }
    tls = {
      source  = "registry.terraform.io/hashicorp/tls"
      version = ">= 4.0.0, < 5.0.0"
    }
  }
}
