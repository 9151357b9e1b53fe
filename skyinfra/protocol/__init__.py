"""What node and client share: manifest, node configuration, credentials, the instance a task runs on.

Travels to nodes with the runner: standard library, ``distributed``, ``cloudpickle`` and ``cryptography`` only.
"""
