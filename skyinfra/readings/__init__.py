"""Readings: what slots and the tasks on them use, from drivers, and in the words of Prometheus."""
