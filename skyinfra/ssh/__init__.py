"""How ``ssh`` reaches the nodes of a fleet, and those nodes as hosts of its configuration."""
