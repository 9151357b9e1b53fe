"""The hours of a fleet: for how long its machines run, and whose tasks have their slots."""
