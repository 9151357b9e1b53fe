terraform {
  required_providers {
    scaleway = {
      source  = "registry.terraform.io/scaleway/scaleway"
      version = ">= 2.60"
    }
  }
}

resource "scaleway_instance_ip" "head" {
  zone = "fr-par-2"
}

resource "scaleway_instance_server" "head" {
  name  = "train-0"
  zone  = "fr-par-2"
  type  = "L4-1-24G"
  image = "ubuntu_jammy_gpu_os_12"
  ip_id = scaleway_instance_ip.head.id
  tags  = ["train"]

  root_volume {
    volume_type = "sbs_volume"
    size_in_gb  = 125
  }
}
