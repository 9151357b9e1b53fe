"""What the head of a fleet runs beside its own slots: the scheduler, jobs and their journal, leases, the relay."""
