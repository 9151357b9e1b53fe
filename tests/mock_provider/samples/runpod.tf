terraform {
  required_providers {
    runpod = {
      source  = "registry.terraform.io/runpod/runpod"
      version = "~> 2.0"
    }
  }
}

resource "runpod_pod" "head" {
  name        = "head"
  image       = "ubuntu:24.04"
  gpu_type_id = "NVIDIA H100 80GB HBM3"
  gpu_count   = 1
  cloud       = "SECURE"
  disk        = 50
  ports       = ["8786/tcp", "22/tcp"]
  env         = { NODE = "head" }

  persistent_volume = {
    size = 20
    path = "/workspace"
  }
}
