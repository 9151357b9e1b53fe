terraform {
  required_providers {
    lambdalabs = {
      source  = "registry.terraform.io/elct9620/lambdalabs"
      version = "~> 0.8"
    }
  }
}

data "lambdalabs_instance_types" "all" {
}

resource "lambdalabs_ssh_key" "this" {
  name = "train"
}

resource "lambdalabs_instance" "head" {
  region_name        = "us-east-1"
  instance_type_name = "gpu_1x_h100_pcie"
  ssh_key_names      = [lambdalabs_ssh_key.this.name]
  # As every refresh finds it, and the provider updates nothing.
  file_system_names = []
}
