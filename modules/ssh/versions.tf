terraform {
  # terraform_data, the only resource used here, is built into Terraform from 1.4 and into every OpenTofu.
  required_version = ">= 1.4"
}
