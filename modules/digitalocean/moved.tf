# Up to 0.2 these stood in this module.
moved {
  from = terraform_data.fleet
  to   = module.hosts.terraform_data.fleet
}

moved {
  from = terraform_data.head
  to   = module.hosts.terraform_data.head
}

moved {
  from = terraform_data.worker
  to   = module.hosts.terraform_data.worker
}

moved {
  from = terraform_data.layout
  to   = module.hosts.terraform_data.layout
}

moved {
  from = terraform_data.worker_layout
  to   = module.hosts.terraform_data.worker_layout
}
