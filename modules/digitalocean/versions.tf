terraform {
  required_version = ">= 1.4"

  required_providers {
    digitalocean = {
      source = "registry.terraform.io/digitalocean/digitalocean"
      # From 2.99.1 on it knows gpu_partition_mode.
      version = ">= 2.99.1, < 3.0.0"
    }
    tls = {
      source  = "registry.terraform.io/hashicorp/tls"
      version = ">= 4.0.0, < 5.0.0"
    }
  }
}
