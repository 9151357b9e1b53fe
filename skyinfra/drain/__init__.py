"""Draining a node: the request, preemption notices of providers, and informing tasks."""
