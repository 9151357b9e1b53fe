terraform {
  # optional() in types needs 1.3, terraform_data 1.4.
  required_version = ">= 1.4"

  required_providers {
    aws = {
      # Fully qualified: OpenTofu would look a short source up in its own registry.
      source  = "registry.terraform.io/hashicorp/aws"
      version = ">= 5.100, < 7.0"
    }
  }
}
