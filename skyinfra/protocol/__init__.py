"""Documents and calls that node and client share: manifest, node configuration, instance, remote calls.

Travels to nodes with the runner: standard library, ``distributed``, ``cloudpickle`` and ``cryptography`` only.
"""
