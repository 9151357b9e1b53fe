"""Projects of Terraform: their programs, commands and synthesized stacks, and mirrors of providers."""
