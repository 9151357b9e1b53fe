"""Servers on this machine that answer as others do: metadata services, APIs of providers, receivers of webhooks."""
