# Up to 0.2 these stood in this module.
moved {
  from = terraform_data.fleet
  to   = module.google.terraform_data.fleet
}

moved {
  from = terraform_data.image
  to   = module.google.terraform_data.image
}

moved {
  from = terraform_data.declared
  to   = module.google.terraform_data.declared
}

moved {
  from = terraform_data.runner
  to   = module.google.terraform_data.runner
}

moved {
  from = terraform_data.versions
  to   = module.google.terraform_data.versions
}

moved {
  from = google_compute_disk.head
  to   = module.google.google_compute_disk.head
}

moved {
  from = google_compute_instance.node
  to   = module.google.google_compute_instance.node
}

moved {
  from = google_compute_network.this
  to   = module.google.google_compute_network.this
}

moved {
  from = google_compute_subnetwork.this
  to   = module.google.google_compute_subnetwork.this
}

moved {
  from = google_compute_router.this
  to   = module.google.google_compute_router.this
}

moved {
  from = google_compute_router_nat.this
  to   = module.google.google_compute_router_nat.this
}

moved {
  from = google_compute_firewall.this
  to   = module.google.google_compute_firewall.this
}

moved {
  from = google_compute_address.head
  to   = module.google.google_compute_address.head
}

moved {
  from = google_compute_address.public
  to   = module.google.google_compute_address.public
}
