terraform {
  # optional() in types needs 1.3, terraform_data 1.4.
  required_version = ">= 1.4"

  required_providers {
    google = {
      source  = "registry.terraform.io/hashicorp/google"
      version = ">= 7.45, < 9.0"
    }

    google-beta = {
      source  = "registry.terraform.io/hashicorp/google-beta"
      version = ">= 7.45, < 9.0"
    }
  }
}
