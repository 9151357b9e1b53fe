"""The connection of a client to a fleet: it sends tasks, shows what they print, and takes their results."""
