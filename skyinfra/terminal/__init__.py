"""Output of commands: tables, JSON, and drawings of GPUs and of what changes on them."""
