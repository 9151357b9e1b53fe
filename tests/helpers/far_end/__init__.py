"""SSH whose far end is on this machine: a program that stands first on PATH."""
