"""Taking a node out of service: who asks for it, preemption notices of providers, and what tasks are told."""
