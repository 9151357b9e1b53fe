"""The head of a fleet: the scheduler, jobs and their journal, leases, the relay."""
