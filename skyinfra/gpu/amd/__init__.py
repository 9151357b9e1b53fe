"""AMD GPUs: their partition modes, through ``amd-smi``."""
