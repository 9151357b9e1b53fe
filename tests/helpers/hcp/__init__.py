"""HCP Terraform on this machine: its API, its state storage, and its runs."""
