terraform {
  required_version = ">= 1.4"

  required_providers {
    verda = {
      source = "registry.terraform.io/verda-cloud/verda"
      # From 1.1.4 on it says what becomes of the disk.
      version = ">= 1.1.4, < 2.0.0"
    }
    tls = {
      source  = "registry.terraform.io/hashicorp/tls"
      version = ">= 4.0.0, < 5.0.0"
    }
  }
}
