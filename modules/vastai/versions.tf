terraform {
  required_version = ">= 1.6"

  required_providers {
    vastai = {
      source  = "registry.terraform.io/realnedsanders/vastai"
      version = "~> 1.0"
    }
  }
}
