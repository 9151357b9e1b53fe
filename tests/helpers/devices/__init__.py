"""Machines with the fake or the simulated NVIDIA driver, and the answers of the drivers of other vendors."""
