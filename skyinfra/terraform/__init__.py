"""Driving Terraform: the program, its plans and errors, the project, outputs and backends."""
