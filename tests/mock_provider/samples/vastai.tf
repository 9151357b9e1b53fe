terraform {
  required_providers {
    vastai = {
      source  = "registry.terraform.io/realnedsanders/vastai"
      version = "~> 1.0"
    }
  }
}

data "vastai_gpu_offers" "h100" {
  gpu_name = "H100 SXM"
  num_gpus = 1
}

resource "vastai_ssh_key" "this" {
  ssh_key = "ssh-ed25519 x"
}

resource "vastai_instance" "head" {
  offer_id    = data.vastai_gpu_offers.h100.most_affordable.id
  image       = "ubuntu:24.04"
  disk_gb     = 50
  use_ssh     = true
  onstart     = "true"
  bid_price   = 1.5
  env         = { NODE = "head" }
  ssh_key_ids = [vastai_ssh_key.this.id]

  # Left out, it stays unknown after the create, which Terraform refuses.
  cancel_unavail  = false
  image_login     = ""
  use_jupyter_lab = false
}
