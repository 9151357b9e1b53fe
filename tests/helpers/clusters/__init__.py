"""Slurm on this machine, and pools that Slurm and Kubernetes can carry."""
