terraform {
  required_version = ">= 1.4"

  required_providers {
    azurerm = {
      source  = "registry.terraform.io/hashicorp/azurerm"
      version = ">= 4.75.0, < 6.0.0"
    }
    tls = {
      source  = "registry.terraform.io/hashicorp/tls"
      version = ">= 4.0.0, < 5.0.0"
    }
  }
}
