terraform {
  required_providers {
    google-beta = {
      source  = "registry.terraform.io/hashicorp/google-beta"
      version = ">= 8.7"
    }
  }
}

resource "google_tpu_v2_vm" "slice" {
  provider         = google-beta
  name             = "train"
  zone             = "us-central1-a"
  runtime_version  = "v2-alpha-tpuv5"
  accelerator_type = "v5p-8"
  metadata         = { startup-script = "first" }

  network_config {
    network             = "train"
    enable_external_ips = true
  }

  scheduling_config {
    spot = true
  }
}

output "addresses" {
  value = google_tpu_v2_vm.slice.network_endpoints[*].ip_address
}
