terraform {
  required_providers {
    google = {
      source  = "registry.terraform.io/hashicorp/google"
      version = ">= 6.50"
    }
  }
}

provider "google" {
  project = "p"
  region  = "us-central1"
}

data "google_compute_zones" "up" {
  status = "UP"
}

resource "google_compute_network" "this" {
  name                    = "train"
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "this" {
  name          = "train"
  network       = google_compute_network.this.id
  ip_cidr_range = "10.0.0.0/24"
}

resource "google_compute_firewall" "scheduler" {
  name          = "train"
  network       = google_compute_network.this.id
  source_ranges = ["198.51.100.0/24"]

  allow {
    protocol = "tcp"
    ports    = ["8786"]
  }
}

resource "google_compute_address" "head" {
  name = "train"
}

resource "google_compute_instance" "node" {
  count        = 2
  name         = "train-${count.index}"
  machine_type = "a3-highgpu-1g"
  zone         = data.google_compute_zones.up.names[0]
  labels       = { pool = "train" }

  metadata = {
    user-data = "first"
  }

  boot_disk {
    initialize_params {
      image = "ubuntu-os-accelerator-images/ubuntu-accelerator-2404-amd64-with-nvidia-570"
      size  = 100
    }
  }

  network_interface {
    subnetwork = google_compute_subnetwork.this.id
    network_ip = "10.0.0.${10 + count.index}"

    access_config {
      nat_ip = count.index == 0 ? google_compute_address.head.address : null
    }
  }

  scheduling {
    provisioning_model          = "SPOT"
    on_host_maintenance         = "TERMINATE"
    instance_termination_action = "DELETE"
    automatic_restart           = false
  }
}

output "addresses" {
  value = google_compute_instance.node[*].network_interface[0].access_config[0].nat_ip
}
