terraform {
  required_version = ">= 1.4"

  required_providers {
    oci = {
      source  = "registry.terraform.io/oracle/oci"
      version = ">= 6.0.0, < 9.0.0"
    }
    tls = {
      source  = "registry.terraform.io/hashicorp/tls"
      version = ">= 4.0.0, < 5.0.0"
    }
  }
}
