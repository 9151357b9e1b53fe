"""Benchmarks: each against a named baseline of the same run, printed as ratios. ``make bench`` runs them all."""
