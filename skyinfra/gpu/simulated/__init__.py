"""A simulated NVIDIA driver, for nodes without GPUs."""
