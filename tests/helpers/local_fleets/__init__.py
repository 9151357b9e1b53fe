"""Fleets of processes on this machine: nodes of the real runner with simulated devices, and heads with slots alone."""
