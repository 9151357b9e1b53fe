"""The number of nodes of a fleet, where it follows the work: the head starts some, and lets go who has no task."""
