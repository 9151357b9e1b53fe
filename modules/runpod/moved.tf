# Up to 0.2 these stood in this module.
moved {
  from = terraform_data.found
  to   = module.market.terraform_data.found
}

moved {
  from = terraform_data.address
  to   = module.market.terraform_data.address
}
