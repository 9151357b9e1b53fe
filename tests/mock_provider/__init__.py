"""A Terraform provider made of the schema of a real one; see README.md."""
