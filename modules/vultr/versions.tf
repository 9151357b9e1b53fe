terraform {
  required_version = ">= 1.4"

  required_providers {
    vultr = {
      source  = "registry.terraform.io/vultr/vultr"
      version = ">= 2.25.0, < 3.0.0"
    }
    tls = {
      source  = "registry.terraform.io/hashicorp/tls"
      version = ">= 4.0.0, < 5.0.0"
    }
  }
}
